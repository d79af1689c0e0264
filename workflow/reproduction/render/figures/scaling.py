"""Figures of kind `scaling`: perplexity by the size of a model in bits, a line for each precision (RCP Figure 1).

Ours are on the left, on the right the paper's numbers, at the sizes in its models' names.
"""

import math
import re
from pathlib import Path
from typing import Any

from reproduction.frame.values import Values
from reproduction.render.figures.axes import logarithmic
from reproduction.render.figures.panels import entry, legend, name_points, panels, say
from reproduction.render.figures.style import DASHED, NEUTRAL, OURS_MARK, PUBLISHED_MARK, SERIES, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.quantities import PERPLEXITY
from reproduction.tables.tables import RunTable
from reproduction.words.describe import model_name
from rotquant.recipes.schemes import UNQUANTIZED_BITS

Points = dict[str, tuple[float, float]]
"""Size in bits and perplexity by model."""


def scaling(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a panel of what was computed and one of what is published, each where it has a point.

    Both axes are logarithmic. A model that broke down has no mark.
    """
    rows = drawn_rows(table)
    named: list[tuple[Any, Points]] = []
    both = (("computed here", ours), ("published", papers))
    sides = [(name, points, [points(project, table, values, row) for row in rows]) for name, points in both]
    sides = [side for side in sides if any(side[2])]
    if not sides:
        say("No figure: no model's size was computed here, and no perplexity is published.", path)
        return
    with panels(path, 1, len(sides), (3.3, 2.9), least=2.5) as (figure, grid):
        for axis, (name, points, lines) in zip(grid[0], sides, strict=True):
            for place, (row, found) in enumerate(zip(rows, lines, strict=True)):
                _line(axis, found, _color(table, row, place), name)
                if row == table.baseline:
                    named.append((axis, {model.removeprefix("Llama-"): place for model, place in found.items()}))
            axis.set_title(name)
            logarithmic(axis, "x")
            logarithmic(axis, "y")
            axis.set_xlabel("size in Mbit" if points is ours else "size in Gbit, by the model's name")
        grid[0][0].set_ylabel(PERPLEXITY.name)
        legend(figure, [entry(row, _color(table, row, place)) for place, row in enumerate(rows)])
        figure.draw_without_rendering()  # places of the marks
        for axis, points in named:  # the lines of other precisions have the models in the same order
            name_points(axis, points)


def ours(project: Project, table: RunTable, values: Values, row: str) -> Points:
    """Each model once, in order of size; those without both numbers and non-finite ones are left out."""
    found: Points = {}
    for column in project.columns(table):
        size, number = (values.ours.get((row, column, name)) for name in ("megabits", PERPLEXITY.name))
        if size is not None and number is not None and math.isfinite(number.mean):
            found.setdefault(model_name(project.slot(table, column)), (size.mean, number.mean))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def papers(project: Project, table: RunTable, values: Values, row: str) -> Points:
    """The paper's perplexities at the number of parameters in a model's name, all of them at the row's bits."""
    bits = next((cell.runs[0].recipe.weights for cell in project.cells(table.id) if cell.row == row), None)
    found: Points = {}
    for column in project.columns(table):
        number, size = values.published.get((row, column, PERPLEXITY.name)), re.search(r"([\d.]+)B", column)
        if number is not None and math.isfinite(number.mean) and size:
            width = UNQUANTIZED_BITS if bits is None else bits.scheme.bits
            found[column] = (float(size[1]) * width, number.mean)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _line(axis: Any, points: Points, color: str, name: str) -> None:
    """Draw a precision's models from the smallest to the largest."""
    look = {"linestyle": "-", **OURS_MARK} if name == "computed here" else {"linestyle": DASHED, **PUBLISHED_MARK}
    axis.plot([size for size, _ in points.values()], [loss for _, loss in points.values()], color=color, **look)


def _color(table: RunTable, row: str, place: int) -> str:
    return NEUTRAL if row == table.baseline else SERIES[(place - 1) % len(SERIES)]
