"""Figures of kind `range_use`: points of two or three features before and after rotation (SpinQuant Figure 6).

A box around the points is covered by a quantizer with one scale for all features; the dark part is the box of their own
ranges.
"""

import itertools
from pathlib import Path
from typing import Any

from reproduction.frame.values import Values
from reproduction.render.figures.arrays import array_of
from reproduction.render.figures.panels import drawn, entry, inches, legend
from reproduction.render.figures.style import DASHED, NEUTRAL, OURS, PUBLISHED, SMALL, WIDTHS, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable

#: Minimum width of a panel in inches.
_LEAST = 1.6


def range_use(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a panel per row, all to one scale; those of three features below those of two.

    Raises:
        ResultError: a run file is missing or has no points.
    """
    rows, column = drawn_rows(table), project.columns(table)[0]
    keys = {row: values[row, column, "range_use"].runs[0] for row in rows}
    ranges = {row: array_of(project, keys[row], "ranges") for row in rows}
    sizes = [[row for row in rows if len(ranges[row]) == size] for size in sorted({len(ranges[row]) for row in rows})]
    beside = min(max(map(len, sizes)), int(WIDTHS["page"] / _LEAST))
    lines = [line[start : start + beside] for line in sizes for start in range(0, len(line), beside)]
    limit = 1.1 * max(itertools.chain(*ranges.values()))
    width = inches(2.4 * beside)
    with drawn(path, (width, 0.4 + min(2.5, 0.6 + width / beside) * len(lines))) as figure:
        for line, place in zip(lines, figure.subfigures(len(lines), squeeze=False)[:, 0], strict=True):
            for index, row in enumerate(line):
                points = list(zip(*array_of(project, keys[row], "points"), strict=True))
                solid = len(ranges[row]) == 3
                axis = place.add_subplot(1, beside, index + 1, projection="3d" if solid else None)
                _draw(axis, points, ranges[row], limit)
                shown = ", ".join(f"{number:.4g}" for number in ranges[row])
                use = values[row, column, "range_use"].mean
                axis.set_title(f"{row}\nranges [{shown}]: {use:.3g} % used", fontsize=SMALL)
        points, own = entry("points", OURS, marker="o", markersize=3), entry("ranges of the features", OURS)
        legend(figure, [points, own, entry("one range for all", PUBLISHED, linestyle=DASHED)])


def _draw(axis: Any, points: list[tuple[float, ...]], extent: list[float], limit: float) -> None:
    """Draw the points of two or three features, the box of their ranges, and that of one range for all."""
    axis.plot(*points, linestyle="", marker="o", markersize=1.5, color=OURS, alpha=0.5)
    for box, look in ((extent, _OWN), ([max(extent)] * len(extent), _COMMON)):
        corners = list(itertools.product((-1, 1), repeat=len(extent)))
        for one, other in itertools.combinations(corners, 2):
            if sum(a != b for a, b in zip(one, other, strict=True)) == 1:
                axis.plot(*([a * size, b * size] for a, b, size in zip(one, other, box, strict=True)), **look)
    for number, name in zip(range(1, 1 + len(extent)), "xyz", strict=False):
        axis.set(**{f"{name}lim": (-limit, limit), f"{name}label": f"$x_{number}$"})
    if len(extent) == 2:
        axis.set_aspect("equal")
        return
    ticks = [-round(limit), 0, round(limit)]
    axis.set(xticks=ticks, yticks=ticks, zticks=ticks)
    axis.tick_params(pad=-2)
    axis.set_box_aspect((1, 1, 1), zoom=0.75)
    for side in (axis.xaxis, axis.yaxis, axis.zaxis):
        side.labelpad = -6
        side.set_pane_color((1, 1, 1, 0))
        side.line.set_color(NEUTRAL)


_OWN: dict[str, Any] = {"color": OURS, "linewidth": 1.1}
_COMMON: dict[str, Any] = {"color": PUBLISHED, "linewidth": 0.9, "linestyle": DASHED}
