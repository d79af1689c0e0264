"""Figures of kinds `scaling` and `widths`: how numbers go with the size of models.

`scaling`: perplexity by the size of a model in bits, a line for each precision (RCP Figure 1); ours are on the left, on
the right the paper's numbers, at the sizes in its models' names. `widths`: by how much one row is above another on
models of several widths, one panel per effect. Points are models with their 95 % intervals over seeds and windows; the
line is fitted to them, and the paper's number for a model with 4096 features is a horizontal line.
"""

import math
import re
from typing import Any

import numpy as np

from reproduction.claims.widths import Course, courses
from reproduction.frame.values import Values, results_behind
from reproduction.render.figures.axes import PercentAxis, change_label, logarithmic
from reproduction.render.figures.changes import Change
from reproduction.render.figures.panels import Sheet, entry, legend, name_points, note, panels
from reproduction.render.figures.style import (
    DASHED,
    NEUTRAL,
    OURS,
    OURS_MARK,
    PUBLISHED,
    PUBLISHED_MARK,
    SERIES,
    drawn_rows,
)
from reproduction.tables.project import Project
from reproduction.tables.quantities import PERPLEXITY
from reproduction.tables.tables import RunTable
from reproduction.words.describe import model_name
from rotquant.recipes.schemes import UNQUANTIZED_BITS

Points = dict[str, tuple[float, float]]
"""Size in bits and perplexity by model."""

#: Panels of `widths` side by side.
_ACROSS = 3


def scaling(project: Project, table: RunTable, values: Values, sheet: Sheet) -> None:
    """Draw two panels, both axes logarithmic; a model that broke down has no mark."""
    rows = drawn_rows(table)
    named: list[tuple[Any, Points]] = []
    with panels(sheet, 1, 2, (3.3, 2.9), least=2.5) as (figure, grid):
        for axis, name, points in zip(grid[0], ("computed here", "published"), (ours, papers), strict=True):
            for place, row in enumerate(rows):
                found = points(project, table, values, row)
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
    """Each model once, in order of size; non-finite ones are left out."""
    found: Points = {}
    for column in project.columns(table):
        number = values.ours.get((row, column, PERPLEXITY.name))
        if number is not None and math.isfinite(number.mean):
            size = values[row, column, "megabits"].mean
            found.setdefault(model_name(project.slot(table, column)), (size, number.mean))
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


def widths(project: Project, table: RunTable, values: Values, sheet: Sheet) -> None:
    """Draw panels side by side, each with its own scale."""
    found = courses(project, table, values, results_behind(project, values))
    down = max(1, math.ceil(len(found) / _ACROSS))
    with panels(sheet, down, _ACROSS, (2.2, 1.9), names=0.3) as (figure, grid):
        for axis, course in zip(grid.flat, found, strict=False):
            _course(axis, course)
        for axis in grid.flat[len(found) :]:
            axis.remove()
        figure.supxlabel("features of a model")
        figure.supylabel("increase of perplexity")
        published = entry("published", PUBLISHED, linestyle=DASHED)
        legend(figure, [entry("computed here", OURS, **OURS_MARK), entry("line through them", OURS), published])


def _course(axis: Any, course: Course) -> None:
    """Draw the models of a panel, equal widths slightly apart."""
    bars = {name: (rise.high - rise.low) / 2 for name, rise in course.rises.items()}
    drawn = [Change(rise.effect, None, bars[name]) for name, rise in course.rises.items()]
    scale = PercentAxis([*drawn, Change(None, course.papers, 0.0)])
    places = {name: math.log2(course.widths[name]) for name in course.rises}
    tops = [scale.place(rise.effect) for rise in course.rises.values()]
    spread = [0.0 if scale.beyond(rise.effect) else bars[name] for name, rise in course.rises.items()]
    axis.errorbar(list(places.values()), tops, yerr=spread, linestyle="", color=OURS, elinewidth=1, **OURS_MARK)
    if course.line is not None:
        along = np.linspace(min(places.values()), max(places.values()), 50)
        rises = [100 * math.expm1(course.line.at(place - along[0])) for place in along]
        axis.plot(along, [scale.place(rise) for rise in rises], color=OURS, linewidth=0.9)
    axis.axhline(scale.place(course.papers), color=PUBLISHED, linestyle=DASHED, linewidth=1)
    if scale.beyond(course.papers):
        look = {"color": PUBLISHED, "ha": "right", "va": "top", "xycoords": axis.get_yaxis_transform()}
        note(axis, change_label(course.papers), (1, scale.place(course.papers)), (0, -2), **look)
    scale.apply(axis, "y")
    axis.axhline(0, color=NEUTRAL, linewidth=0.8)
    ticks = sorted(set(course.widths.values()))
    axis.set_xticks([math.log2(width) for width in ticks], [str(width) for width in ticks])
    axis.set_title(course.effect.name)
