"""Where a number comes from: digests of the code that made it.

A stage's digest covers its entry modules and every rotquant module that they import, found by reading the sources, so
an edit re-runs what it can affect and only that. Comments and docstrings do not count. Nothing here imports torch.
"""

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from rotquant.foundation.errors import ConfigError, nearest
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Metric

PACKAGE = Path(__file__).resolve().parents[1]
KERNELS = PACKAGE.parent / "kernels"

#: Entry modules of each stage of the workflow; what they import belongs to the stage too.
STAGES: dict[str, tuple[str, ...]] = {
    "rotations": ("rotquant.study.stages.rotations",),
    "weights": ("rotquant.study.stages.weights",),
    "runs": ("rotquant.study.stages.runs",),
    "tasks": ("rotquant.metrics.zeroshot.folders",),
    "tables": ("rotquant.study.values",),
    "figures": ("rotquant.reporting.figures.draw",),
    "reports": ("rotquant.reporting.pages.page", "rotquant.reporting.tracking"),
    "speed": ("rotquant.reporting.speed.page", "rotquant.reporting.speed.figures", "rotquant.reporting.tracking"),
    "index": ("rotquant.reporting.scoreboard", "rotquant.reporting.html", "rotquant.reporting.html.pages"),
}

#: Modules whose edits cannot change a result: how a sentence is worded, a file put in place, progress shown.
NEUTRAL = frozenset(
    {
        "rotquant",
        "rotquant.foundation.errors",
        "rotquant.foundation.files",
        "rotquant.foundation.progress",
        "rotquant.foundation.environment",
        "rotquant.study.digests",
    }
)

#: Packages that a time depends on. What else benchmarks import describes models and recipes, or simulates them.
TIMED = ("rotquant.bench", "rotquant.kernels", "rotquant.decoder", "rotquant.tensors.hadamard")

#: What else the time of a benchmark depends on that runs more of the library than kernels.
TIMED_BESIDE: dict[str, tuple[str, ...]] = {
    "rotquant.bench.learning.benchmarks": (
        "rotquant.methods.spinquant",
        "rotquant.tensors.stiefel",
        "rotquant.models.placement",
        "rotquant.recipes.presets",
        "rotquant.weights.build",
        "rotquant.models.stream",
        "rotquant.weights.gptq",
        "rotquant.weights.clipping",
        "rotquant.tensors.quantization",
        "rotquant.models.simulation.kv_cache",
        "rotquant.models.simulation.wrapping",
        "rotquant.tensors.distortion",
    ),
}

#: How sources include headers of ours, those beside them and those of kernels/include.
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)

#: Modules that act only where a recipe has the section, so that an edit of one method leaves the others' results alone.
OPTIONAL: dict[str, Callable[[Recipe], object]] = {
    "rotquant.weights.gptq": lambda recipe: recipe.weights and recipe.weights.gptq,
    "rotquant.methods.smoothquant": lambda recipe: recipe.smoothing,
    "rotquant.methods.omniquant": lambda recipe: recipe.omniquant,
    "rotquant.methods.awq": lambda recipe: recipe.awq,
    "rotquant.methods.llm_qat": lambda recipe: recipe.llm_qat,
    "rotquant.methods.quip": lambda recipe: recipe.quip,
    "rotquant.tensors.lattice": lambda recipe: recipe.quip,
    "rotquant.methods.outliers": lambda recipe: recipe.outliers,
    "rotquant.methods.spinquant": lambda recipe: recipe.learning,
    "rotquant.methods.spinquant_network": lambda recipe: recipe.learning,
    "rotquant.tensors.stiefel": lambda recipe: recipe.learning,
}

#: Modules that act for some kinds of metrics only; a package stands for all its modules.
METRIC_MODULES: dict[str, tuple[str, ...]] = {
    "perplexity": ("rotquant.metrics.perplexity",),
    "zero_shot": ("rotquant.metrics.zeroshot",),
    "snr": ("rotquant.metrics.snr", "rotquant.tensors.distortion"),
    "magnitudes": ("rotquant.metrics.magnitudes",),
    "outliers": ("rotquant.metrics.outliers", "rotquant.metrics.magnitudes", "rotquant.tensors.distortion"),
    "range_use": ("rotquant.metrics.range_use",),
}


def code_digest(stage: str, recipe: Recipe | None = None, metric: Metric | None = None) -> str:
    """Digest of the sources of one stage: 16 hexadecimal digits; with recipe and metric, of those that act for them.

    Raises:
        ConfigError: for an unknown stage.
    """
    if stage not in STAGES:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, list(STAGES))}.")
    idle = [] if recipe is None else [module for module, acts in OPTIONAL.items() if not acts(recipe)]
    if metric is not None:
        acting = METRIC_MODULES[metric.kind]
        others = [module for modules in METRIC_MODULES.values() for module in modules]
        idle = [module for module in (*idle, *others) if module not in acting]
    return _modules_digest(stage_modules(stage, frozenset(idle)))


@functools.cache
def kernels_digest(module: str) -> str:
    """Digest of a benchmark's modules and of the kernel sources that they name: by what code a time was measured."""
    texts = [f"{name} {hashlib.sha256((KERNELS / name).read_bytes()).hexdigest()}" for name in kernel_sources(module)]
    return hashlib.sha256("\n".join([_modules_digest(timed_modules(module)), *texts]).encode()).hexdigest()[:16]


def kernel_sources(module: str) -> tuple[str, ...]:
    """Paths under kernels/ of the sources that a benchmark's modules name, and of what these include, sorted."""
    constants = (node for name in timed_modules(module) for node in ast.walk(_tree(name)))
    texts = {node.value for node in constants if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    waiting = [text for text in texts if text.endswith((".cu", ".cpp")) and (KERNELS / text).is_file()]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            beside = Path(name).parent
            for header in _INCLUDE.findall((KERNELS / name).read_text()):
                own = (beside / header).as_posix()
                waiting.append(own if (KERNELS / own).is_file() else f"include/{header}")
    return tuple(sorted(found))


def timed_modules(module: str) -> tuple[str, ...]:
    """Names of the modules that a benchmark's module imports, directly or not, and its time depends on, sorted.

    Itself included; those in `TIMED`, and in what `TIMED_BESIDE` names.
    """
    return tuple(name for name in _reached((module,)) if name.startswith(TIMED + TIMED_BESIDE.get(module, ())))


@functools.cache
def stage_modules(stage: str, without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Names of the rotquant modules that a stage's entry modules import, directly or not, entries included, sorted."""
    return _reached(STAGES[stage], without)


def _reached(entries: tuple[str, ...], without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The entry modules and every rotquant module that they import, directly or not, sorted."""
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module in found or module in NEUTRAL or _source(module) is None:
            continue
        if any(module == idle or module.startswith(f"{idle}.") for idle in without):
            continue
        found.add(module)
        waiting.extend(_imported(module))
    return tuple(sorted(found))


def _source(module: str) -> Path | None:
    """The file of a rotquant module or package, or None when there is no such module."""
    base = PACKAGE.joinpath(*module.split(".")[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _source(module)
    assert path is not None
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python (line {error.lineno}: {error.msg}).") from None


@functools.cache
def _imported(module: str) -> set[str]:
    """Every rotquant module named by an import statement anywhere in a module, with the packages that contain it."""
    names: set[str] = set()
    path = _source(module)
    package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = package.split(".")
                origin = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            names.add(origin)
            names.update(f"{origin}.{alias.name}" for alias in node.names)
    ours = {name for name in names if name == "rotquant" or name.startswith("rotquant.")}
    return ours | {name.rpartition(".")[0] for name in ours if name.count(".") > 1}


@functools.cache
def _modules_digest(modules: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(f"{name} {_module_digest(name)}" for name in modules).encode()).hexdigest()[:16]


@functools.cache
def _module_digest(module: str) -> str:
    tree = _tree(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(
            node
        ):
            node.body = node.body[1:]
    content = _dump(tree).encode() + b"".join(path.read_bytes() for path in _data_files(module))
    return hashlib.sha256(content).hexdigest()


def _dump(tree: ast.Module) -> str:
    """A syntax tree as text, the same by every Python that reads it: 3.12 added an empty field, 3.13 shows none."""
    options = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(tree, **options).replace(", type_params=[]", "")


def _data_files(module: str) -> list[Path]:
    """What lies beside a package's modules and is read by them: templates, styles, scripts."""
    path = _source(module)
    if path is None or path.name != "__init__.py":
        return []
    return sorted(file for file in path.parent.iterdir() if file.is_file() and file.suffix not in (".py", ".pyc"))


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
