"""Which plan is the current one: that of the configuration, tables, sources and checkpoints as they are now.

A plan's file is named by everything that it follows from, so a plan in use is never replaced: another configuration,
an edited source or a changed checkpoint has another file. Where that file is there, nothing is expanded again.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.identity.code import below, sources, sources_digest
from reproduction.run.plan import PLANS, Places, Plan, read_plan, write_plan
from rotquant.foundation.contents import stamp
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, check_regular, short_hash, write_text
from rotquant.foundation.hub import commit_of

#: Part of every plan's name: to be raised when a plan of the same inputs says something else than before.
FORMAT = 4


def current_plan(
    root: Path, overrides: Sequence[str | Path] = (), options: Mapping[str, Any] | None = None, *, write: bool = True
) -> Plan:
    """The plan of a configuration as the files are now: read where it was written, else made and written.

    Args:
        root: the project's folder.
        overrides: files on top of config/config.yaml, or the first of them alone.
        options: what Snakemake's --config says.
        write: False leaves a plan that is made unwritten, as for a single command.

    Raises:
        ConfigError, RecipeError, CheckpointError: what is wrong with the configuration or a table.
    """
    code = sources_digest(sources())
    said = _said_digest(root, overrides, options or {}, code)
    with contextlib.suppress(ResultError, OSError, ValueError):
        seen = Places.model_validate_json(_content(root / PLANS / f"{said}.seen"))
        return read_plan(root / PLANS / f"{_inputs(root, said, seen)}.json")
    from reproduction.run.expansion import make_plan, places_seen  # what an unchanged project does without
    from reproduction.tables.configuration import load_config
    from reproduction.tables.project import load_project

    project = load_project((), root, load_config(overrides, root, options))
    seen = places_seen(project)
    plan = make_plan(project, _inputs(root, said, seen), code)
    if write:
        write_plan(root, plan)
        write_text(root / PLANS / f"{said}.seen", seen.model_dump_json())
    return plan


def _said_digest(root: Path, overrides: Sequence[str | Path], options: Mapping[str, Any], code: str) -> str:
    """Digest of what files say: sources of the package, tables, published numbers and the configuration's layers."""
    folders = (root / "workflow" / name for name in ("papers", "kernels", "schemas"))
    files = (path for folder in folders for path in below(folder))
    layers = (root / "config/config.yaml", *overrides)
    return _files_digest([FORMAT, code, repr(sorted(options.items()))], root, (*files, *layers))


def _files_digest(basis: Any, root: Path, files: Iterable[str | Path]) -> str:
    """Digest of a basis and of files, each with its path from `root`."""
    digest = hashlib.sha256(canonical_json(basis).encode())
    for path in files:
        with contextlib.suppress(OSError, ResultError):  # told by whoever reads the file for what it says
            content = hashlib.sha256(_content(Path(path))).hexdigest()
            digest.update(f"{os.path.relpath(path, root)}:{content}\n".encode())
    return digest.hexdigest()[:16]


def _content(path: Path) -> bytes:
    """The bytes of a file, which may be anything but is not waited for."""
    check_regular(path)
    return path.read_bytes()


def _inputs(root: Path, said: str, seen: Places) -> str:
    """Digest of what files say, of the places that a plan looks at without reading them whole, and of hubs' commits."""
    whole = [[place, _stamps(root / place)] for place in seen.content]
    commits = [[kind, name, commit_of(kind, name)] for kind, name in seen.hub]
    return short_hash(canonical_json([said, whole, commits]))


def _stamps(place: Path) -> list[Any]:
    """What tells a changed file from an unchanged one, for a file or all of a folder; nothing where there is none."""
    paths = below(place) if place.is_dir() else [str(place)]
    return [[os.path.relpath(path, place), found] for path in paths if (found := stamp(path))]
