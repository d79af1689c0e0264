"""Code digests: hashes of the modules that a stage, or the timing of a benchmark, imports.

A module's digest hashes its syntax tree without docstrings and without the modules that our own names are imported
from, so comments, formatting and module names do not count. A stage's digest covers the modules that it imports,
directly or not, the methods of its recipe, and the kernel sources and templates that these read. grimp follows the
imports; no module is imported.
"""

import ast
import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rotquant.foundation.contents import stamp
from rotquant.foundation.errors import ConfigError, ResultError, RotquantError, nearest
from rotquant.foundation.files import cache_folder, canonical_json, short_hash, write_text
from rotquant.foundation.parsing import parse_json

if TYPE_CHECKING:
    from rotquant.recipes.recipe import Recipe

#: The packages whose code decides results, and their folders.
PACKAGES = {name: Path(find_spec(name).submodule_search_locations[0]) for name in ("rotquant", "reproduction")}  # pyright: ignore

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
#: Syntax fields that do not affect what is computed; Python 3.11 lacks the last.
_SILENT = frozenset({"ctx", "kind", "type_comment", "type_params"})


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
    """Digest of the modules that some modules import, and of the kernels that these name: 16 hexadecimal digits.

    Args:
        aside: modules, with all below them, that are left out in addition to the neutral ones.
    """
    return short_hash("\n".join(sorted(_read(path).digest for path in code_files(*entries, aside=aside))))


@functools.cache
def code_files(*entries: str, aside: tuple[str, ...] = ()) -> frozenset[Path]:
    """The files that `code_digest` hashes: Python, the kernels that it names, and data files next to a module."""
    ours = imported([entry for entry in entries if _is_ours(entry)], (*NEUTRAL, *aside))
    paths = {path for module in ours for path in _files_of(module)}
    paths |= {path for entry in entries if not _is_ours(entry) for path in _foreign(entry)}
    named = {_kernels() / name for path in paths for name in _read(path).kernels}
    return frozenset(paths | _with_headers({path for path in named if path.is_file()}))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def root() -> Path:
    """The folder that displayed paths are relative to."""
    return PACKAGES["rotquant"].parent


@functools.cache
def _kernels() -> Path:
    """The folder of the kernels' sources."""
    return (PACKAGES["rotquant"] / "kernels" / "sources").resolve()


def imported(entries: Iterable[str], aside: Collection[str]) -> set[str]:
    """The entries, the modules of our packages that they import, directly or not, and the parent packages."""
    graph, found, waiting = _graph(), set(), [*entries]
    while waiting:
        module = waiting.pop()
        if module not in found and not any(f"{module}.".startswith(f"{one}.") for one in aside):
            found.add(module)
            waiting += graph.find_modules_directly_imported_by(module)
    around = {module.rsplit(".", count)[0] for module in found for count in range(1, module.count("."))}
    return found | around


@functools.cache
def _graph() -> Any:
    import grimp
    from grimp.exceptions import SourceSyntaxError

    try:
        return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    except SourceSyntaxError as error:
        raise ConfigError(f"{error.filename} is not valid Python (line {error.lineno}).") from None


def _files_of(module: str) -> Iterator[Path]:
    """A module's file; for a package also the templates, styles and scripts in its folder."""
    package, *parts = module.split(".")
    place = PACKAGES[package].joinpath(*parts)
    if not place.is_dir():
        yield place.with_suffix(".py")
        return
    yield place / "__init__.py"
    others = (path for path in place.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc"))
    yield from (path for path in others if path.name != "py.typed")


def _foreign(module: str) -> list[Path]:
    """The files of a method from another package: its module's file, or all Python files of its package."""
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


class _Said(NamedTuple):
    """A file's content: the digest of its syntax, kernel or text, and the kernels that it names."""

    digest: str
    kernels: tuple[str, ...] = ()


@functools.cache
def _read(path: Path) -> _Said:
    """Read a file: Python syntax without docstrings, a kernel without comments, any other file whole."""
    if path.suffix == ".py":
        return _read_python(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cu", ".cuh", ".cpp", ".h", ".hpp"):
        lines = _COMMENT.sub(lambda match: match[1] or " ", text).splitlines()
        text = "\n".join(filter(None, map(str.strip, lines)))
    return _Said(short_hash(text, 64))


def _read_python(path: Path) -> _Said:
    """Read a Python file, cached for the user by the file's content: parsing takes some ms."""
    source = path.read_bytes()
    kept = cache_folder("syntax") / hashlib.sha256(source + _rules()).hexdigest()
    with suppress(OSError, ValueError, TypeError):
        digest, kernels = parse_json(kept.read_bytes())
        if all(isinstance(text, str) for text in (digest, *kernels)):
            return _Said(digest, tuple(kernels))
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python (line {error.lineno}: {error.msg}).") from None
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    kernels = tuple(sorted(text for text in texts if text.endswith((".cu", ".cpp"))))
    said = _Said(short_hash(repr(_words(tree)), 64), kernels)
    with suppress(RotquantError):
        write_text(kept, json.dumps(said))
    return said


@functools.cache
def _rules() -> bytes:
    """The bytes of this file, on which cached digests depend too."""
    return Path(__file__).read_bytes()


def _words(value: Any) -> Any:
    """Syntax as plain data, equal for every Python from 3.11 on; string statements are left out as docstrings."""
    if isinstance(value, list):
        words = [_words(one) for one in value if not _is_text(one)]
        imports = [one for one in words if isinstance(one, list) and one[:1] == ["OurImport"]]
        return [*(one for one in words if one not in imports), *sorted(imports)] if imports else words
    if isinstance(value, ast.JoinedStr):  # Python 3.12 adds an empty text after a nested format
        return ["JoinedStr", *(_words(one) for one in value.values if getattr(one, "value", None) != "")]
    if isinstance(value, ast.ImportFrom) and _is_ours(value.module or ""):
        return ["OurImport", sorted((one.name, one.asname or "") for one in value.names)]
    if isinstance(value, ast.AST):
        fields = ((name, one) for name, one in ast.iter_fields(value) if name not in _SILENT)
        return [type(value).__name__, *(_words(one) for _, one in fields)]
    return value


def _is_text(node: Any) -> bool:
    """Whether a statement is only a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
