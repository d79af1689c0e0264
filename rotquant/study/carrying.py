"""Digests of recorded times carried on, to what the present rule says of the same code: by proof and never by editing.

`results/bench/carried.json` holds the steps. The first is from the rule of before, which knew modules by their names,
to that of `sources`: at one commit both rules look at the same files, and the first finds the records current there. A
later step leads from one commit to another where no definitions changed but those of which someone says, with a reason,
that what is timed does not run them or does the same with them. That nothing else changed is checked.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from rotquant.bench.records import BENCH, CellRecord, Record
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import ConfigError
from rotquant.study.digests import CARRIED
from rotquant.study.sources import Sources

Digests = dict[str, dict[str, str]]
"""By benchmark: the digest of before, and the one it is carried to."""

#: Prints where each benchmark of a tree begins, and what the rule of before says of it.
_OF_BEFORE = """
import json
from rotquant.bench.registry import BENCHMARKS
from rotquant.provenance import kernels_digest
print(json.dumps({name: [f"{one.module}:{name}", kernels_digest(one.module)] for name, one in BENCHMARKS.items()}))
"""
#: Prints where each benchmark of a tree begins: its function, and the methods of its recipe where the tree says so.
_BEGINNINGS = """
import json
from rotquant.bench.registry import BENCHMARKS
try:
    from rotquant.study.digests import benchmark_entries as entries
except ImportError:
    entries = lambda name: [f"{BENCHMARKS[name].module}:{name}"]
print(json.dumps({name: entries(name) for name in BENCHMARKS}))
"""


class Step(Frozen):
    """A step: at `commit` from the rule of before, or, with `to`, from that commit to another.

    aside, silent: what does not count at these commits, modules and names of methods, as they were called then. cells:
    recorded times found current there. definitions: all that changed in what benchmarks use. why: their times are the
    same.
    """

    commit: str
    aside: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    cells: int = 0
    to: str | None = None
    definitions: tuple[str, ...] = ()
    why: str = ""
    digests: Digests = Field(default_factory=dict)


def read_steps(path: Path = CARRIED) -> list[Step]:
    """The steps of a file, none where there is no file."""
    return [Step.model_validate(step) for step in json.loads(path.read_text())["steps"]] if path.exists() else []


def proved(step: Step, root: Path) -> Step:
    """A step with the digests that it carries, found anew.

    Raises:
        ConfigError: a commit is not in the history, as in a shallow clone.
    """
    return _between_commits(step, root, step.to) if step.to else _between_rules(step, root)


def _between_rules(step: Step, root: Path) -> Step:
    """From the rule of before to the present one, for benchmarks with records that are current at the commit."""
    with _exported(root, step.commit) as tree:
        sources = Sources(tree / "rotquant", step.aside)
        of_before = _said(tree, _OF_BEFORE)
        known = [cell for cell in _cells(root) if cell.benchmark in of_before]  # others came later
        current = [cell for cell in known if cell.code == of_before[cell.benchmark][1]]
        digests: Digests = {}
        for name in sorted({cell.benchmark for cell in current}):
            entry, before = of_before[name]
            digests[name] = {before: sources.digest(entry)}
    return step.model_copy(update={"cells": len(current), "digests": digests})


def _between_commits(step: Step, root: Path, to: str) -> Step:
    """From one commit to another, for benchmarks that use no other new or changed definition than those named."""
    digests: Digests = {}
    with _exported(root, step.commit) as first, _exported(root, to) as second:
        trees = [
            (Sources(tree / "rotquant", step.aside, step.silent), _said(tree, _BEGINNINGS)) for tree in (first, second)
        ]
        for name in sorted(set(trees[0][1]) & set(trees[1][1])):
            before, after = (sources.contents(*entries[name]) for sources, entries in trees)
            changed = {definition for content, names in after.items() if content not in before for definition in names}
            if changed <= set(step.definitions):
                old, new = (sources.digest(*entries[name]) for sources, entries in trees)
                digests[name] = {old: new}
    return step.model_copy(update={"digests": digests})


@contextmanager
def _exported(root: Path, commit: str) -> Iterator[Path]:
    """The package and the kernels of a commit, in a folder for a while."""
    command = ["git", "archive", commit, "rotquant", "kernels"]
    done = subprocess.run(command, cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise ConfigError(f"commit {commit} is not in the history of {root.resolve()}: a whole clone has it.")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def _said(tree: Path, program: str) -> dict[str, Any]:
    """What a program prints that imports the package of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program]
    return json.loads(subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def _cells(root: Path) -> list[CellRecord]:
    """All committed records of times."""
    data = (json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / BENCH).glob("*/*.json")))
    return [cell for record in data if "cells" in record for cell in Record.model_validate(record).cells]
