"""Code digests: hashes of the statements that a stage, or the timing of a benchmark, reaches.

A stage's digest covers what its modules reach by name (`identity.reach`), the methods of its recipe, and the kernel
sources and templates that these read. Names of modules, the order of definitions, comments and formatting do not count
(`identity.syntax`). No module is imported.
"""

import functools
import hashlib
import os
import re
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reproduction.identity.reach import RUN, Node, Reach
from reproduction.identity.syntax import OURS, is_ours, read_module
from rotquant.foundation.contents import stamp
from rotquant.foundation.errors import ConfigError, ResultError, nearest
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    from rotquant.recipes.recipe import Recipe

#: The packages whose code decides results, and their folders.
PACKAGES = {name: Path(find_spec(name).submodule_search_locations[0]) for name in OURS}  # pyright: ignore

#: Modules that decide no result: wording of messages, writing of files, names of results.
NEUTRAL = (
    *("rotquant.foundation", "rotquant.models.digests"),
    *("reproduction.reading", "reproduction.identity", "reproduction.corpora.digests"),
)

#: Where each stage of the workflow begins.
STAGES: dict[str, tuple[str, ...]] = {
    "rotations": ("reproduction.run.stages.rotations",),
    "weights": ("reproduction.run.stages.weights",),
    "runs": ("reproduction.run.stages.runs",),
    "tasks": ("reproduction.tasks.folders",),
    "index": ("reproduction.scoreboard.standings", "reproduction.scoreboard.page", "reproduction.render.html.pages"),
}

#: Kernels' includes of our headers: those in the same folder and those of kernels/include.
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
#: A C++ comment, or a string or character literal, which contains none.
_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')""", re.DOTALL)


def stage_digest(stage: str, recipe: "Recipe | None" = None) -> str:
    """Digest of the code of one stage, with a recipe also of its methods that act there: 16 hexadecimal digits.

    Raises:
        ConfigError: for an unknown stage.
    """
    return code_digest(*stage_entries(stage, recipe))


def stage_entries(stage: str, recipe: "Recipe | None" = None) -> tuple[str, ...]:
    """The entry modules of a stage, and the modules of a recipe's methods that act in it.

    Raises:
        ConfigError: for an unknown stage.
    """
    if stage not in STAGES:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, list(STAGES))}.")
    methods = () if recipe is None else recipe.methods.values()
    acting = {
        "rotations": lambda method: "rotations" in method.roles,
        "weights": lambda method: "rotations" not in method.roles,
        "runs": lambda method: method.acts_at_run_time,
    }.get(stage, lambda method: False)
    modules = ((type(method).__module__, method.actions) for method in methods if acting(method))
    return (*STAGES[stage], *dict.fromkeys(module for pair in modules for module in pair))


@functools.cache
def code_digest(*entries: str, aside: tuple[str, ...] = ()) -> str:
    """Digest of the statements that some modules reach, and of the kernels that these name: 16 hexadecimal digits.

    Args:
        aside: modules, with all below them, that are left out in addition to the neutral ones.
    """
    reach, found = _reach(), _reached(entries, aside)
    statements = [reach.digest(node, aside) for node in found if node.place >= 0]
    return short_hash("\n".join(sorted([*statements, *map(_content, _data(entries, aside))])))


@functools.cache
def code_files(*entries: str, aside: tuple[str, ...] = ()) -> frozenset[Path]:
    """The files with what `code_digest` hashes: Python, the kernels that it names, and data files next to a package."""
    reach, found = _reach(), _reached(entries, aside)
    modules = {reach.file(node.module) for node in found if node.place >= 0}
    return frozenset(file for file in modules if file) | _data(entries, aside)


@functools.cache
def _reach() -> Reach:
    return Reach(PACKAGES, NEUTRAL)


@functools.cache
def _reached(entries: tuple[str, ...], aside: tuple[str, ...]) -> Collection[Node]:
    brought = (place for entry in entries for path in _foreign(entry) for place in read_module(path).places())
    return _reach().reached(filter(is_ours, (*entries, *brought)), aside)


def _data(entries: tuple[str, ...], aside: tuple[str, ...]) -> frozenset[Path]:
    """The files that count whole: kernels, what lies beside a package, methods of other packages."""
    reach, found = _reach(), _reached(entries, aside)
    texts = {text for node in found if node.place >= 0 for text in reach.statement(node).texts}
    kernels = {path for text in texts if (path := _kernels() / text).is_file()}
    beside = {path for node in found if node.place == RUN for path in _beside(node.module)}
    return frozenset(_with_headers(kernels) | beside | {path for entry in entries for path in _foreign(entry)})


def forget() -> None:
    """Forget what this process knows of files, which may have changed since it read them."""
    for known in (code_digest, code_files, _reach, _reached, _content, _kernels, _included, _beside, read_module):
        known.cache_clear()


def root() -> Path:
    """The folder that displayed paths are relative to."""
    return PACKAGES["rotquant"].parent


@functools.cache
def _kernels() -> Path:
    """The folder of the kernels' sources."""
    return (PACKAGES["rotquant"] / "kernels" / "sources").resolve()


@functools.cache
def _beside(module: str) -> tuple[Path, ...]:
    """The templates, styles, scripts and data in the folder of a package."""
    package, *parts = module.split(".")
    place = PACKAGES[package].joinpath(*parts)
    others = place.iterdir() if place.is_dir() else ()
    said = (".py", ".pyc")
    return tuple(path for path in others if path.suffix not in said and path.name != "py.typed" and path.is_file())


def _foreign(module: str) -> list[Path]:
    """The files of a method from another package: its module's file, or all Python files of its package."""
    if is_ours(module):
        return []
    found = find_spec(module)
    if found is None or found.origin is None:
        return []
    origin = Path(found.origin)
    return sorted(origin.parent.rglob("*.py")) if "." in module or origin.name == "__init__.py" else [origin]


def _with_headers(sources: set[Path]) -> set[Path]:
    """Kernel sources and those of our headers that they include."""
    found, waiting = set(), [*sources]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _included(path)
    return found


@functools.cache
def _included(path: Path) -> tuple[Path, ...]:
    """Our headers that a kernel source or a header includes."""
    places = ((path.parent / name, name) for name in _INCLUDE.findall(path.read_text(encoding="utf-8")))
    return tuple(beside if beside.is_file() else _kernels() / "include" / name for beside, name in places)


@functools.cache
def _content(path: Path) -> str:
    """Digest of a file: Python syntax without docstrings, a kernel without comments, any other file whole."""
    if path.suffix == ".py":
        return short_hash(repr(read_module(path)), 64)
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cu", ".cuh", ".cpp", ".h", ".hpp"):
        lines = _COMMENT.sub(lambda match: match[1] or " ", text).splitlines()
        text = "\n".join(filter(None, map(str.strip, lines)))
    return short_hash(text, 64)


def sources() -> dict[str, str]:
    """SHA-256 of every file whose code can decide a result, by path: our packages, kernels, other packages' methods."""
    paths = [path for folder in (*PACKAGES.values(), _kernels()) for path in below(folder)]
    for point in entry_points(group="rotquant.methods"):
        paths += map(str, _foreign(point.module))
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}


def below(folder: Path) -> list[str]:
    """The files below a folder, sorted, without Python's bytecode."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.join(parent, name) for name in names if not name.endswith(".pyc")]
    return sorted(found)


class LoadedCode(NamedTuple):
    """Files as a process loads them, by path: SHA-256, and metadata that shows a change without reading."""

    digests: Mapping[str, str]
    stamps: Mapping[str, Any]

    @classmethod
    def now(cls) -> "LoadedCode":
        """The files as they are."""
        digests = sources()
        return cls(digests, {path: stamp(path) for path in digests})


#: The files when this process began to load them.
LOADED = LoadedCode.now()


def sources_digest(found: Mapping[str, str]) -> str:
    """Digest of `sources`: where it is equal, every other digest here is equal."""
    return short_hash(canonical_json({os.path.relpath(path, root()): digest for path, digest in found.items()}))


def refuse_other_code(
    planned: str, plan_sources: str, stage: str, recipe: "Recipe", loaded: LoadedCode | None = None
) -> None:
    """Refuse to compute with other code than planned, or to record results that edited files may have computed.

    Args:
        planned: the stage's digest in the plan. plan_sources: `sources_digest` when the plan was made.
        loaded: the files that the process has loaded; by default this one.

    Raises:
        ResultError: this process loaded another code, or files of the stage were edited since.
    """
    loaded = loaded or LOADED
    unchanged = all(stamp(path) == known for path, known in loaded.stamps.items())
    if unchanged and sources_digest(loaded.digests) == plan_sources:
        return
    now = sources()
    files = map(str, code_files(*stage_entries(stage, recipe)))
    edited = [path for path in files if now.get(path) != loaded.digests.get(path)]
    if edited or stage_digest(stage, recipe) != planned:
        where = f" ({os.path.relpath(sorted(edited)[0], root())})" if edited else ""
        raise ResultError(
            f"the code of the stage {stage!r} changed since the plan was made{where}: start again, what is done stays."
        )
