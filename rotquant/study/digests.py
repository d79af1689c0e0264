"""By which code a number was made: digests of the definitions that a stage, or the timing of a benchmark, uses.

What is looked up by name when it runs (the function of a metric, the methods of a recipe) belongs to a digest where it
acts; all else follows from the sources (`sources`), beginning at a function. Nothing here imports torch.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rotquant.bench.registry import find
from rotquant.foundation.errors import ConfigError, nearest
from rotquant.foundation.files import canonical_json, file_digest, short_hash
from rotquant.recipes.method import Method
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.registry import GROUP, built_in_names, find_method
from rotquant.recipes.schemes import Metric
from rotquant.study.sources import Sources

PACKAGE = Path(__file__).resolve().parents[1]

#: See `carrying`.
CARRIED = PACKAGE.parent / "results" / "bench" / "carried.json"

#: What decides no result: how a sentence is worded, a file put in place, progress shown, by which code it was.
NEUTRAL = ("rotquant.foundation", "rotquant.study.digests")
#: And no time: recipes are data, and what is asked of a benchmark is in the cell's key.
DATA = ("rotquant.recipes",)

SOURCES = Sources(PACKAGE, aside=NEUTRAL)
#: For what computes, where neither the words of a method nor the recipes that come with it decide anything.
COMPUTED = Sources(PACKAGE, aside=NEUTRAL, silent=("words", "presets", "effort", "given", "clips_weights"))

#: Where each stage of the workflow begins: its function, or modules that render.
STAGES: dict[str, tuple[str, ...]] = {
    "rotations": ("rotquant.study.stages.rotations:compute_rotations",),
    "weights": ("rotquant.study.stages.weights:compute_weights",),
    "runs": ("rotquant.study.stages.runs:measure_runs",),
    "tasks": ("rotquant.metrics.zeroshot.folders:prepare",),
    "tables": ("rotquant.study.values",),
    "figures": ("rotquant.reporting.figures.draw",),
    "reports": ("rotquant.reporting.pages.report", "rotquant.reporting.pages.markdown", "rotquant.reporting.tracking"),
    "speed": (
        *("rotquant.reporting.speed.report", "rotquant.reporting.pages.markdown"),
        *("rotquant.reporting.speed.figures", "rotquant.reporting.tracking"),
    ),
    "settings": ("rotquant.reporting.settings.report", "rotquant.reporting.pages.markdown"),
    "index": ("rotquant.reporting.scoreboard", "rotquant.reporting.html", "rotquant.reporting.html.pages"),
}

#: The module whose functions measure, each named as the kind of its metric.
MEASURES = "rotquant.study.stages.measures"
_KINDS = tuple(metric.model_fields["kind"].default for metric in get_args(get_args(Metric)[0]))

#: Count only where a method uses them. By hand, for imports cannot tell: storage and the stage name these kinds of
#: weight for every recipe, since a folder may hold them, and run none of their statements where no method made any.
OPTIONAL = ("rotquant.tensors.lattice", "rotquant.tensors.levels")


def method_entries(stage: str, recipe: Recipe) -> tuple[str, ...]:
    """Where the methods of a recipe begin that act in a stage: the learning one, the others, those at run time."""
    acts: dict[str, Callable[[Method], bool]] = {
        "rotations": lambda method: method is recipe.learner,
        "weights": lambda method: method is not recipe.learner,
        "runs": lambda method: method.acts_at_run_time(),
    }
    acting = (method for method in recipe.methods.values() if stage in acts and acts[stage](method))
    return tuple(type(method).entry() for method in acting)


def code_digest(stage: str, recipe: Recipe | None = None, metric: Metric | None = None) -> str:
    """Digest of the sources of one stage: 16 hexadecimal digits; with recipe and metric, of those that act for them.

    Raises:
        ConfigError: for an unknown stage.
    """
    if stage not in STAGES:
        raise ConfigError(f"unknown stage {stage!r}{nearest(stage, list(STAGES))}.")
    methods = () if recipe is None else method_entries(stage, recipe)
    idle = [] if recipe is None else list(_unused(methods))
    if metric is not None:
        idle += (f"{MEASURES}:{kind}" for kind in _KINDS if kind != metric.kind)
    ours = [entry for entry in methods if entry.startswith("rotquant.")]
    sources = COMPUTED if stage in ("rotations", "weights", "runs") else SOURCES
    digest = sources.digest(*STAGES[stage], *ours, aside=frozenset(idle))
    others = {entry: module_digest(entry.partition(":")[0]) for entry in methods if entry not in ours}
    return short_hash(canonical_json({"rotquant": digest, **others})) if others else digest


def module_digest(module: str) -> str:
    """Digest of a module outside of this package, of all that its file or its folder's Python files hold."""
    path = Path(inspect.getfile(importlib.import_module(module)))
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return short_hash("".join(str(file_digest(file)) for file in files))


def _unused(methods: tuple[str, ...]) -> tuple[str, ...]:
    """The optional modules that none of these methods uses."""
    used = COMPUTED.modules(*(entry for entry in methods if entry.startswith("rotquant.")))
    return tuple(module for module in OPTIONAL if module not in used)


def benchmark_digest(name: str) -> str:
    """Digest of what the time of a benchmark depends on, its kernels included: by what code it was measured.

    Raises:
        ConfigError: for an unknown benchmark.
    """
    return COMPUTED.digest(*benchmark_entries(name), aside=not_timed(name))


def benchmark_modules(name: str) -> frozenset[str]:
    """The modules that hold what the time of a benchmark depends on."""
    return COMPUTED.modules(*benchmark_entries(name), aside=not_timed(name))


def benchmark_entries(name: str) -> tuple[str, ...]:
    """Where a benchmark begins: its function, and the methods of the recipe that it times."""
    benchmark = find(name, "digest")
    return (benchmark.entry, *(find_method(method).entry() for method in benchmark.methods))


def not_timed(name: str) -> frozenset[str]:
    """What the time of a benchmark does not depend on: data, and methods that its recipe does not name."""
    named = find(name, "digest").methods
    others = (f"{GROUP}.{method}" for method in built_in_names() if method not in named)
    return frozenset((*DATA, *OPTIONAL, *others))


def is_current(benchmark: str, recorded: str) -> bool:
    """Whether a time was measured by the present code, going by the digest that its record holds."""
    for step in _carried():
        recorded = step.get(benchmark, {}).get(recorded, recorded)
    return recorded == benchmark_digest(benchmark)


@functools.cache
def _carried() -> tuple[dict[str, dict[str, str]], ...]:
    """The steps by which digests of before are carried on (`carrying`), by benchmark."""
    steps = json.loads(CARRIED.read_text(encoding="utf-8"))["steps"] if CARRIED.exists() else ()
    return tuple(step["digests"] for step in steps)
