"""A copy of the project in a temporary folder, with tiny tables, so that the workflow runs as a user runs it.

The copy has its own rotquant package, which its processes import: a test may edit it as a developer would. With `fake`,
the computing stages are replaced by arithmetic on the recipe, so that tests of the workflow's mechanics load no
torch.
"""

import atexit
import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.sources import load_project
from reproduction.tables import project as projects
from reproduction.tables.configuration import DEFAULT
from rotquant.foundation.files import short_hash
from tests.helpers import forked

REPOSITORY = Path(__file__).parents[2]
#: Where the packages lie in it.
PACKAGES = ("rotquant", "workflow/reproduction")

FAKE_ROTATIONS = '''"""Rotations stage of the tests: ten steps, each kept; waits at the fifth while `slow` exists."""

import json
import time
from pathlib import Path

from rotquant.foundation.files import file_digest, write_json, write_text
from rotquant.foundation.environment import environment


def compute_rotations(run, checkpoint, folder, device, code):
    unfinished = folder / "unfinished"
    history = json.loads(unfinished.read_text()) if unfinished.exists() else []
    started = time.time_ns()
    while len(history) < 10:
        while len(history) == 5 and Path("slow").exists():
            Path("started").touch()
            time.sleep(0.05)
        history.append({"step": len(history), "loss": 1 / (1 + len(history) + run.seed), "process": started})
        write_json(unfinished, history)
    unfinished.unlink()
    write_json(folder / "history.json", history)
    write_text(folder / "rotations.safetensors", f"learned with seed {run.seed}")
    return {
        **environment(),
        "code_digest": code,
        "key": run.rotation_key,
        "digest": file_digest(folder / "rotations.safetensors"),
        "checkpoint": run.checkpoint,
        "checkpoint_digest": run.checkpoint_digest,
        "first": history[0],
        "last": history[-1],
        "seed": run.seed,
        "learning": run.recipe.learner.model_dump(mode="json"),
        "corpora": {},
        "seconds": 2.0,
    }
'''

FAKE_WEIGHTS = '''"""Weights stage of the tests: waits while the file `slow` exists, fails when `fail` does."""

import time
from pathlib import Path

from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import file_digest, read_json, write_json, write_text
from rotquant.foundation.environment import environment


def compute_weights(run, checkpoint, folder, device, code, rotation=None):
    if Path("fail").exists():
        raise CheckpointError("the weights cannot be read.")
    while Path("slow").exists():
        Path("started").touch()
        time.sleep(0.05)
    folder.mkdir(parents=True, exist_ok=True)
    with Path("made").open("a") as made:
        made.write(f"weights {run.weights_key}\\n")
    learned = {} if rotation is None else {"rotation": read_json(rotation / "rotation.json")}
    made_of = run.weights_key, learned and learned["rotation"]["digest"]
    write_text(folder / "model.safetensors", f"tensors of {made_of}")
    write_json(folder / "rotquant.json", {"digests": {"model.safetensors": file_digest(folder / "model.safetensors")}})
    return {**environment(), "code_digest": code, "seconds": 0.5, "corpora": {}, **learned}, []
'''

FAKE_RUNS = '''"""Runs stage of the tests: numbers that depend on the recipe, the slot and the seed alone."""

from dataclasses import dataclass, field
from pathlib import Path

from rotquant.foundation.environment import environment
from reproduction.tables.quantities import quantities

FACTOR = 1.0


@dataclass(frozen=True)
class Measurement:
    metrics: dict
    arrays: dict = field(default_factory=dict)
    samples: dict = field(default_factory=dict)
    texts: dict = field(default_factory=dict)


def measure_run(run, checkpoint, folder, device, batch_size, code, allow_code_execution=False):
    with Path("made").open("a") as made:
        made.write(f"run {run.key}\\n")
    bits = run.recipe.weights.scheme.bits if run.recipe.weights else 16
    loss = 1 + 2.0**-bits + 0.001 * run.seed
    metrics = {}
    for place, quantity in enumerate(quantities(run.metric)):
        value = FACTOR * (10 + place + len(checkpoint) % 7)
        metrics[quantity.name] = value * loss if quantity.better == "lower" else value / loss
    return Measurement(metrics), {**environment(), "code_digest": code, "seconds": 0.25, "corpora": {}}
'''

FAKE_DELTAS = '''"""Checkpoints of the tests are names without files."""


def base_folder(path):
    return None
'''

FAKE_IDENTITY = '''"""Checkpoint digests of the tests: of the name alone."""

from rotquant.foundation.files import short_hash


def checkpoint_digest(path):
    return short_hash(str(path))


def refuse_other(checkpoint, planned):
    """There is nothing that could have changed."""
'''

TABLES: dict[str, Any] = {
    "paper": "quarot",
    "title": "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    "tables": [
        {
            "id": "quarot_table1",
            "title": "small",
            "section": "5.1",
            "caption": "A small table.",
            "metrics": [{"kind": "perplexity", "corpus": "wikitext2"}],
            "columns": ["Llama-2-7B", "Llama-2-13B"],
            "baseline": "Baseline",
            "rows": [
                {"name": "Baseline", "method": "baseline"},
                {"name": "QuaRot", "method": "quarot-rtn"},
            ],
            "published": "published/small.csv",
            "claims": [
                {
                    "text": "The baseline is better than QuaRot.",
                    "section": "5.1",
                    "mechanism": {"better": {"row": "Baseline", "than": ["QuaRot"]}},
                }
            ],
            "figure": {"kind": "relative_increase", "caption": "Increase."},
        }
    ],
}
PUBLISHED = """row,column,metric,value,unit
Baseline,Llama-2-7B,perplexity,5.47,ppl
Baseline,Llama-2-13B,perplexity,4.88,ppl
QuaRot,Llama-2-7B,perplexity,8.37,ppl
QuaRot,Llama-2-13B,perplexity,-,ppl
"""
CONFIG: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "seeds": [0, 1],
    "tracking": False,
    "corpora": {"wikitext2": {"name": "text", "source": "local", "path": "text"}},
    "calibration": {"samples": 2, "sequence_length": 16},
    "evaluation": {"sequence_length": 16, "max_windows": 2},
    "methods": {"spinquant": {"steps": 3, "batch_size": 2, "text": {"samples": 4, "sequence_length": 16}}},
    "zero_shot": {"suite": "shipped", "corpus": "wikitext2"},
    "slots": {"Llama-2-7B": {"checkpoint": "models/small"}, "Llama-2-13B": {"checkpoint": "models/larger"}},
}


@cache
def compiled() -> Path:
    """The packages with their bytecode, valid for as long as a source has the same content, whenever edited.

    Copies of the project share these files, hence none may be written in place.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    assert compileall.compile_dir(folder, quiet=1, invalidation_mode=checked)
    return Path(folder)


def _shared(source: str, target: str) -> None:
    """Let a file have a second name, a fifth of the time that a copy takes; copy it to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def shipped_project(configuration: str | Path = DEFAULT) -> projects.Project:
    """This repository's project, expanded once in a process for each configuration; tests leave it as it is."""
    return _shipped(Path(configuration))


@cache
def _shipped(configuration: Path) -> projects.Project:
    """A project whose cells are kept.

    Digests of checkpoints are found at once, so that none is kept that a test's `checkpoints_by_name` has given.
    """
    project = load_project([] if configuration == DEFAULT else [REPOSITORY / configuration], root=REPOSITORY)
    for slot in project.config.slots:
        project.digest(slot)
    return project


def packages_in(root: Path) -> dict[str, Path]:
    """Where the packages lie in a copy of the repository, by name (`reproduction.identity.code.PACKAGES`)."""
    return {Path(package).name: root / package for package in PACKAGES}


def checkpoints_by_name(patch: pytest.MonkeyPatch, name: Callable[[str], str] = lambda path: Path(path).name) -> None:
    """Identify checkpoints by the last part of their paths, so that tables expand where no model lies.

    Args:
        name: of a path; `str` as in a copy of the project.
    """
    patch.setattr(projects, "checkpoint_digest", lambda path: short_hash(name(path)))


def alive(group: int) -> bool:
    """Whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Copy:
    """The copied project; `fake` replaces the computing stages, `small` the tables and the configuration.

    edited: whether a file was, so that it may have other code than another copy.
    """

    def __init__(self, root: Path, *, fake: bool = True, small: bool = True) -> None:
        self.root, self.edited = root, False
        ignore = shutil.ignore_patterns("__pycache__", "models", "reproduction")
        shutil.copytree(REPOSITORY / "workflow", root / "workflow", ignore=ignore)
        shutil.copytree(REPOSITORY / "profiles", root / "profiles")
        shutil.copytree(REPOSITORY / "config", root / "config")
        shutil.copy(REPOSITORY / "Snakefile", root / "Snakefile")
        for package in PACKAGES:
            shutil.copytree(compiled() / package, root / package, copy_function=_shared)
        if fake:
            self.write("workflow/reproduction/run/stages/rotations.py", FAKE_ROTATIONS)
            self.write("workflow/reproduction/run/stages/weights.py", FAKE_WEIGHTS)
            self.write("workflow/reproduction/run/stages/runs.py", FAKE_RUNS)
            self.write("workflow/reproduction/run/stages/loaded.py", "")
            self.write("rotquant/models/deltas.py", FAKE_DELTAS)
            self.write("rotquant/models/digests.py", FAKE_IDENTITY)
        if small:
            self.set_tables(TABLES)
            self.set_config(CONFIG)
            self.write("workflow/papers/quarot/published/small.csv", PUBLISHED)
            for split in ("train", "test"):  # which the stand-ins do not read
                self.write(f"text/{split}.txt", f"The text of {split}.")
        else:  # group sizes and outlier features follow from the widths of the shipped models
            for path in (REPOSITORY / "workflow/resources/models").glob("*/config.json"):
                self.write(str(path.relative_to(REPOSITORY)), path.read_text())

    def write(self, path: str, text: str) -> None:
        """Write a file of the copy, which it then shares with no other."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8")

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text in a file of the copy, which must hold it."""
        text = (self.root / path).read_text(encoding="utf-8")
        assert old in text
        self.edited = True
        self.write(path, text.replace(old, new))

    def set_config(self, config: dict[str, Any]) -> None:
        """Replace the configuration."""
        self.write("config/config.yaml", yaml.safe_dump(config))

    def set_tables(self, tables: dict[str, Any]) -> None:
        """Replace all tables by these."""
        for path in (self.root / "workflow").glob("papers/*/*.yaml"):
            path.unlink()
        (self.root / "workflow/kernels/speed.yaml").unlink(missing_ok=True)
        self.write("workflow/papers/quarot/tables.yaml", yaml.safe_dump(tables, sort_keys=False))

    def environment(self) -> dict[str, str]:
        """Environment of the copy's processes: its own package, one thread, no tracking server of the user's."""
        kept = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        path = f"{Path(sys.executable).parent}:{kept['PATH']}"
        return {
            **kept,
            "PATH": path,
            "PYTHONPATH": f"{self.root}:{self.root / 'workflow'}",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, *command: str, **options: Any) -> subprocess.Popen:
        """Start a command in the copy, as a process group of its own."""
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def run(self, *command: str, timeout: float = 120) -> tuple[int, str]:
        """Run a command in the copy; return its exit status and its output, both streams together."""
        process = self.start(*command)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def rotquant(self, *arguments: str) -> tuple[int, str]:
        """Run `rotquant` in the copy as a job of `snakemake` does; otherwise as `run` does."""
        return forked.run("rotquant", self.root, self.environment(), *arguments)

    def snakemake(self, *arguments: str) -> tuple[int, str]:
        """Run Snakemake on two cores in the copy."""
        return forked.run("snakemake", self.root, self.environment(), "--cores", "2", *arguments)

    def planned(self, *arguments: str) -> dict[str, int]:
        """How many jobs of each rule a dry run would execute; rules of pages by one name."""
        status, output = self.snakemake("--dry-run", *arguments)
        assert status == 0, output
        lines = output.partition("Job stats:")[2].partition("total")[0].splitlines()
        pairs = [line.split() for line in lines if len(line.split()) == 2]
        counted: dict[str, int] = {}
        for rule, count in pairs:
            if count.isdigit():
                name = "page" if rule.startswith("page") else rule
                counted[name] = counted.get(name, 0) + int(count)
        return counted

    def read(self, pattern: str) -> dict[str, bytes]:
        """The content of all files that match, by path."""
        return {str(path.relative_to(self.root)): path.read_bytes() for path in sorted(self.root.glob(pattern))}
