"""Which plan is the current one: that of the configuration, tables, sources and checkpoints as they are now.

A plan's file is named by everything that it follows from, so a plan in use is never replaced: another configuration,
an edited source or a changed checkpoint has another file. Where that file is there, nothing is expanded again.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, short_hash, write_text
from rotquant.study.plan import PLANS, Places, Plan, read_plan, write_plan

#: Part of every plan's name: to be raised when a plan of the same inputs says something else than before.
FORMAT = 3

PACKAGE = Path(__file__).resolve().parents[1]


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
    sources = sources_digest()
    said = _said_digest(root, overrides, options or {}, sources)
    with contextlib.suppress(ResultError, OSError, ValueError):
        seen = Places.model_validate_json((root / PLANS / f"{said}.seen").read_bytes())
        return read_plan(root / PLANS / f"{_inputs(root, said, seen)}.json")
    from rotquant.study.configuration import load_config
    from rotquant.study.expansion import make_plan, places_seen  # what an unchanged project does without
    from rotquant.study.project import load_project

    project = load_project((), root, load_config(overrides, root, options))
    seen = places_seen(project)
    plan = make_plan(project, _inputs(root, said, seen), sources)
    if write:
        write_plan(root, plan)
        write_text(root / PLANS / f"{said}.seen", seen.model_dump_json())
    return plan


def sources_digest() -> str:
    """Digest of the files with all code behind a result: where it is the same, so is every digest of a stage's code."""
    folders = [PACKAGE, PACKAGE.parent / "kernels"]
    files = (path for folder in folders for path in _files(str(folder)))
    return _files_digest([FORMAT, sys.version_info[:2]], PACKAGE.parent, (*files, *_methods_elsewhere()))


def _said_digest(root: Path, overrides: Sequence[str | Path], options: Mapping[str, Any], sources: str) -> str:
    """Digest of what files say: sources of the package, tables, published numbers and the configuration's layers."""
    folders = (root / "workflow" / name for name in ("papers", "kernels", "schemas"))
    files = (path for folder in folders for path in _files(str(folder)))
    layers = (root / "config/config.yaml", *overrides)
    return _files_digest([sources, repr(sorted(options.items()))], root, (*files, *layers))


def _files_digest(basis: Any, root: Path, files: Iterable[str | Path]) -> str:
    """Digest of a basis and of files, each with its path from `root`."""
    digest = hashlib.sha256(canonical_json(basis).encode())
    for path in files:
        with contextlib.suppress(OSError):  # which is told by whoever reads the file for what it says
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            digest.update(f"{os.path.relpath(path, root)}:{content}\n".encode())
    return digest.hexdigest()[:16]


def _methods_elsewhere() -> Iterator[str]:
    """The files of methods that other packages bring: of a package all that is Python, as its digest counts it."""
    for point in entry_points(group="rotquant.methods"):
        with contextlib.suppress(ImportError, ValueError):
            found = find_spec(point.module)
            if found is not None and found.origin is not None:
                for folder in found.submodule_search_locations or ():
                    yield from (path for path in _files(folder) if path.endswith(".py"))
                yield found.origin


def _inputs(root: Path, said: str, seen: Places) -> str:
    """Digest of what files say and of the places that a plan looks at without reading them whole.

    Of a file it takes name, size and the times at which it and its entry changed: large files are not read for it.
    """
    whole = [[place, _stamps(root / place)] for place in seen.content]
    there = [[place, (root / place).exists()] for place in seen.existence]
    return short_hash(canonical_json([said, whole, there]))


def _stamps(place: Path) -> list[Any]:
    """What tells a changed file from an unchanged one, for a file or all of a folder; nothing where there is none."""
    found = []
    for path in _files(str(place)) if place.is_dir() else [str(place)]:
        with contextlib.suppress(OSError):
            entry = os.stat(path)
            found.append([os.path.relpath(path, place), entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns])
    return found


def _files(folder: str) -> list[str]:
    """The files below a folder, sorted, without what Python compiled."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.join(parent, name) for name in names if not name.endswith(".pyc")]
    return sorted(found)
