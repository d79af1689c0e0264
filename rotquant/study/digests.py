"""By which code a number was made: digests of the definitions that a stage, or the timing of a benchmark, uses.

What is looked up by name when it runs (the function of a metric, the methods of a recipe) belongs to a digest where it
acts; all else follows from the sources (`sources`), beginning at a function. Nothing here imports torch.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rotquant.bench.registry import find
from rotquant.foundation.errors import ConfigError, nearest
from rotquant.recipes.recipe import Recipe
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
    "index": ("rotquant.reporting.scoreboard", "rotquant.reporting.html", "rotquant.reporting.html.pages"),
}

#: The module whose functions measure, each named as the kind of its metric.
MEASURES = "rotquant.study.stages.measures"
_KINDS = tuple(metric.model_fields["kind"].default for metric in get_args(get_args(Metric)[0]))

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
        idle += (f"{MEASURES}:{kind}" for kind in _KINDS if kind != metric.kind)
    return SOURCES.digest(*STAGES[stage], aside=frozenset(idle))


def benchmark_digest(name: str) -> str:
    """Digest of what the time of a benchmark depends on, its kernels included: by what code it was measured.

    Raises:
        ConfigError: for an unknown benchmark.
    """
    return SOURCES.digest(find(name, "digest").entry, aside=not_timed(name))


def benchmark_modules(name: str) -> set[str]:
    """The modules that hold what the time of a benchmark depends on."""
    return SOURCES.modules(find(name, "digest").entry, aside=not_timed(name))


def not_timed(name: str) -> frozenset[str]:
    """What the time of a benchmark does not depend on: data, and methods that its recipe does not name."""
    methods = find(name, "digest").methods
    return frozenset((*DATA, *(module for module in OPTIONAL if module.rpartition(".")[2] not in methods)))


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
