"""The current plan: that of the present configuration, tables, sources and checkpoints.

A plan's file name depends on all of its inputs, so a plan in use is never replaced: another configuration, an edited
source or a changed checkpoint has another file. If the file exists, nothing is expanded again.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from reproduction.identity.code import below, sources, sources_digest
from reproduction.run.plan import PLANS, Places, Plan, read_plan, write_plan
from rotquant.foundation.contents import stamp
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, check_regular, short_hash, write_text
from rotquant.foundation.hub import commit_of

#: Part of every plan's name, to be raised when the plan's content for equal inputs changes.
FORMAT = 8


def current_plan(
    root: Path, overrides: Sequence[str | Path] = (), options: Mapping[str, Any] | None = None, *, write: bool = True
) -> Plan:
    """The plan of a configuration for the present files: read if it exists, else made and written.

    Args:
        root: the project's folder.
        overrides: files on top of config/config.yaml, or on top of the first if it stands alone.
        options: the values of Snakemake's --config.
        write: whether to write a new plan; False for a single command.

    Raises:
        ConfigError, RecipeError, CheckpointError: an error in the configuration or a table.
    """
    code = sources_digest(sources())
    said = _said_digest(root, overrides, options or {}, code)
    with contextlib.suppress(ResultError, OSError, ValueError):
        seen = Places.model_validate_json(_content(root / PLANS / f"{said}.seen"))
        return read_plan(root / PLANS / f"{_inputs(root, said, seen)}.json")
    from reproduction.planning.expansion import make_plan, places_seen  # not needed for an unchanged project
    from reproduction.planning.fits import KnownFits
    from reproduction.sources import load_project
    from reproduction.tables.configuration import load_config

    fits = KnownFits(root)
    project = load_project((), root, load_config(overrides, root, options), known=fits.known)
    seen = places_seen(project)
    plan = make_plan(project, _inputs(root, said, seen), code)
    if write:
        fits.write(project.fittings, project.models)
        write_plan(root, plan)
        write_text(root / PLANS / f"{said}.seen", seen.model_dump_json())
    return plan


def _said_digest(root: Path, overrides: Sequence[str | Path], options: Mapping[str, Any], code: str) -> str:
    """Digest of files' content: the package's sources, tables, published numbers and the configuration's layers."""
    digest = hashlib.sha256(canonical_json([FORMAT, code, repr(sorted(options.items()))]).encode())
    files = (path for name in ("papers", "kernels") for path in below(root / "workflow" / name))
    for path in (*files, root / "config/config.yaml", *overrides):
        with contextlib.suppress(OSError, ResultError):  # reported when the file's content is read
            content = hashlib.sha256(_content(Path(path))).hexdigest()
            digest.update(f"{os.path.relpath(path, root)}:{content}\n".encode())
    return digest.hexdigest()[:16]


def _content(path: Path) -> bytes:
    """The bytes of a file of any type, without blocking."""
    check_regular(path)
    return path.read_bytes()


def _inputs(root: Path, said: str, seen: Places) -> str:
    """Digest of files' content, of the places that a plan depends on without reading them whole, and of hub commits."""
    whole = [[place, _stamps(root / place)] for place in seen.content]
    commits = [[kind, name, commit_of(kind, name)] for kind, name in seen.hub]
    versions = [[name, _version(name)] for name in seen.packages]
    return short_hash(canonical_json([said, whole, commits, versions]))


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _stamps(place: Path) -> list[Any]:
    """Metadata that changes with a file, for a file or all files of a folder; empty if there is none."""
    paths = below(place) if place.is_dir() else [str(place)]
    return [[os.path.relpath(path, place), found] for path in paths if (found := stamp(path))]
