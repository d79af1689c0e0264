"""Budgets of a table's methods: text, steps, learning rates, and run time.

All follow from the recipes, except the time, which is in the manifests of weights and the records of rotations.
"""

from statistics import fmean
from typing import NamedTuple

from reproduction.render.pages.origins import Results
from reproduction.run.results import RunResult
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from rotquant.costs.ways import way_of
from rotquant.recipes.recipe import Budget


class GivenBudget(NamedTuple):
    """A method with one budget: the rows that use it, the columns if not all, its mean time in seconds.

    in_blocks: whether its steps are those of each decoder layer, one after the other.
    """

    method: str
    rows: list[str]
    columns: list[str]
    budget: Budget
    seconds: float | None
    in_blocks: bool


#: Title of a method, its budget, and whether it learns layer by layer.
_Place = tuple[str, Budget, bool]


def given(project: Project, table: RunTable, results: Results) -> list[GivenBudget]:
    """Budgets of a table's methods, in the order of its rows; rows and columns of one budget together.

    Args:
        results: of the table's runs; missing ones have no time.
    """
    rows: dict[_Place, dict[str, None]] = {}
    columns: dict[_Place, dict[str, None]] = {}
    seconds: dict[_Place, list[float]] = {}
    everywhere = project.columns(table)
    for cell in project.cells(table.id):
        recipe = cell.runs[0].recipe
        for method in recipe.methods.values():
            place = (method.title, method.budget(recipe), way_of(method, recipe) == "blocks")
            rows.setdefault(place, {})[cell.row] = None
            columns.setdefault(place, {})[cell.column] = None
            found = (results.get(run.key) for run in cell.runs)
            seconds.setdefault(place, []).extend(
                took for result in found if result and (took := _seconds(result, method.name)) is not None
            )
    return [
        GivenBudget(
            place[0],
            [*names],
            [] if len(columns[place]) == len(everywhere) else [*columns[place]],
            place[1],
            fmean(seconds[place]) if seconds[place] else None,
            place[2],
        )
        for place, names in rows.items()
    ]


def _seconds(result: RunResult, name: str) -> float | None:
    """Run time of a run's method, from the record of its weights or rotations."""
    method, weights = result.run.recipe.methods[name], result.weights or {}
    if method is result.run.recipe.learner:
        return (result.rotation or {}).get("seconds")
    return weights.get("stages", {}).get(method.title)
