"""Kinds of cell: what differs between cells in the code that computes them.

A run may learn rotations by a method, makes weights by the other methods of its recipe, and is measured by a metric.
Each of these is a kind; one run stands for all kinds that it has, so that every one is run once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from reproduction.identity.run import Run
from reproduction.run.plan import Plan
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import ZeroShot


@dataclass(frozen=True)
class Kind:
    """A kind of cell. run: the key of the run that stands for it. cells: how many runs of the plan are of it."""

    name: str
    run: str
    cells: int


def kinds_of(plan: Plan) -> list[Kind]:
    """The kinds of cell of a plan: of rotations, of weights, of metrics, each the more runs are of it.

    A run with little work stands for a kind, and rather one of perplexity on learned or stored weights. What a run
    chosen before has is no kind of its own.
    """
    runs = {key: plan.run(key) for part in plan.parts.values() for key in part.runs}
    cheap = sorted(runs, key=lambda key: (runs[key].metric.kind != "perplexity", work(runs[key].recipe)))
    plain = sorted(runs, key=lambda key: (runs[key].weights_key is not None, work(runs[key].recipe)))
    found: list[Kind] = []
    covered: set[str] = set()
    for kind, order in ((learned, cheap), (made, cheap), (measured, plain)):
        counted = Counter(map(kind, runs.values()))
        for name, cells in counted.most_common():
            if name and name not in covered:
                found.append(Kind(name, _first(runs, order, kind, name), cells))
                covered |= {of(runs[found[-1].run]) for of in (learned, made, measured)}
    return found


def _first(runs: dict[str, Run], order: list[str], kind: Callable[[Run], str], name: str) -> str:
    return next(key for key in order if kind(runs[key]) == name)


def learned(run: Run) -> str:
    """The kind of a run's learned rotations, in words; empty where they are not learned."""
    return f"rotations by {run.recipe.learner.name}" if run.recipe.learner else ""


def made(run: Run) -> str:
    """The kind of a run's weights, in words: the methods that make them, learned rotations apart."""
    recipe = run.recipe
    names = [name for name, method in recipe.methods.items() if method is not recipe.learner]
    methods = " + ".join(names) or ("round-to-nearest" if recipe.weights else "")
    parts = [methods, "rotated" if recipe.rotation else "", "" if recipe.weights else "weights as they are"]
    return ", ".join(part for part in parts if part) if recipe != Recipe() else "full precision"


def measured(run: Run) -> str:
    """The kind of a run's measurement, in words."""
    if isinstance(run.metric, ZeroShot):
        return f"zero-shot: {', '.join(run.metric.tasks)}"
    return run.metric.kind.replace("_", " ")


def work(recipe: Recipe) -> int:
    """Tokens that a recipe's methods read, and those of all steps."""
    budgets = [method.budget(recipe) for method in recipe.methods.values()]
    return sum(budget.tokens + budget.steps * budget.seen for budget in budgets)
