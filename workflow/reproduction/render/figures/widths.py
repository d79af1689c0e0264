"""Figures of kind `widths`: by how much one row is above another on models of several widths, one panel per effect.

Points are models with their 95 % intervals over seeds and windows; the line is fitted to them. The paper's number for a
model with 4096 features is a horizontal line.
"""

import math
from typing import Any

import numpy as np

from reproduction.claims.widths import Course, courses
from reproduction.frame.values import Values, read_back
from reproduction.render.figures.axes import PercentAxis, change_label
from reproduction.render.figures.changes import Change
from reproduction.render.figures.panels import Sheet, entry, legend, note, panels
from reproduction.render.figures.style import DASHED, NEUTRAL, OURS, OURS_MARK, PUBLISHED
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable

_ACROSS = 3


def widths(project: Project, table: RunTable, values: Values, sheet: Sheet) -> None:
    """Draw panels side by side, each with its own scale."""
    found = courses(project, table, values, read_back(project, table)[1])
    down = max(1, math.ceil(len(found) / _ACROSS))
    with panels(sheet, down, _ACROSS, (2.2, 1.9), names=0.3) as (figure, grid):
        for axis, course in zip(grid.flat, found, strict=False):
            _draw(axis, course)
        for axis in grid.flat[len(found) :]:
            axis.remove()
        figure.supxlabel("features of a model")
        figure.supylabel("increase of perplexity")
        published = entry("published", PUBLISHED, linestyle=DASHED)
        legend(figure, [entry("computed here", OURS, **OURS_MARK), entry("line through them", OURS), published])


def _draw(axis: Any, course: Course) -> None:
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
