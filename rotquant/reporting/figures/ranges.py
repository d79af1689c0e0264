"""Figures of kind `range_use`: points of two or three features before and after rotation (SpinQuant Figure 6).

Around the points stands the box that a quantizer with one scale for all features covers; dark is what their own ranges
fill of it.
"""

import itertools
from pathlib import Path
from typing import Any

from rotquant.reporting.figures.arrays import array_of
from rotquant.reporting.figures.panels import entry, legend
from rotquant.reporting.figures.style import DASHED, NEUTRAL, OURS, PUBLISHED, drawn_rows, save_svg, styled
from rotquant.study.project import Project
from rotquant.study.tables import Table
from rotquant.study.values import Values


def range_use(project: Project, table: Table, values: Values, path: Path) -> None:
    """A panel per row, all drawn to one scale; those of three features below those of two.

    Raises:
        ResultError: a run file is missing or holds no points.
    """
    rows, column = drawn_rows(table), project.columns(table)[0]
    keys = {row: values[row, column, "range_use"].runs[0] for row in rows}
    ranges = {row: array_of(project, keys[row], "ranges") for row in rows}
    lines = [[row for row in rows if len(ranges[row]) == size] for size in sorted({len(ranges[row]) for row in rows})]
    limit = 1.1 * max(itertools.chain(*ranges.values()))
    with styled() as plt:
        figure = plt.figure(figsize=(2.5 * max(map(len, lines)), 0.4 + 2.7 * len(lines)), layout="constrained")
        for line, place in zip(lines, figure.subfigures(len(lines), squeeze=False)[:, 0], strict=True):
            for index, row in enumerate(line):
                points = list(zip(*array_of(project, keys[row], "points"), strict=True))
                solid = len(ranges[row]) == 3
                axis = place.add_subplot(1, len(line), index + 1, projection="3d" if solid else None)
                (_solid if solid else _plane)(axis, points, ranges[row], limit)
                shown = ", ".join(f"{number:.4g}" for number in ranges[row])
                use = values[row, column, "range_use"].mean
                axis.set_title(f"{row}\nranges [{shown}]: {use:.3g} % used", fontsize=8)
        entries = [
            entry("points", OURS, marker="o", markersize=3),
            entry("ranges of the features", OURS),
            entry("one range for all", PUBLISHED, linestyle=DASHED),
        ]
        legend(figure, entries)
        save_svg(figure, path)


def _plane(axis: Any, points: list[tuple[float, ...]], extent: list[float], limit: float) -> None:
    """Two features."""
    axis.plot(*points, linestyle="", marker="o", markersize=1.6, color=OURS, alpha=0.5)
    for (width, height), look in ((extent, _OWN), ([max(extent)] * 2, _COMMON)):
        corners = [(-width, -height), (width, -height), (width, height), (-width, height), (-width, -height)]
        axis.plot(*zip(*corners, strict=True), **look)
    axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")


def _solid(axis: Any, points: list[tuple[float, ...]], extent: list[float], limit: float) -> None:
    """Three features."""
    axis.plot(*points, linestyle="", marker="o", markersize=1.4, color=OURS, alpha=0.4)
    for box, look in ((extent, _OWN), ([max(extent)] * 3, _COMMON)):
        corners = list(itertools.product((-1, 1), repeat=3))
        for one, other in itertools.combinations(corners, 2):
            if sum(a != b for a, b in zip(one, other, strict=True)) == 1:
                axis.plot(*([a * size, b * size] for a, b, size in zip(one, other, box, strict=True)), **look)
    axis.set(**{f"{name}lim": (-limit, limit) for name in "xyz"}, xlabel="$x_1$", ylabel="$x_2$", zlabel="$x_3$")
    ticks = [-round(limit), 0, round(limit)]
    axis.set(xticks=ticks, yticks=ticks, zticks=ticks)
    axis.tick_params(labelsize=6, pad=-2)
    axis.set_box_aspect((1, 1, 1), zoom=0.95)
    for side in (axis.xaxis, axis.yaxis, axis.zaxis):
        side.labelpad = -6
        side.set_pane_color((1, 1, 1, 0))
        side.line.set_color(NEUTRAL)


_OWN: dict[str, Any] = {"color": OURS, "linewidth": 1.1}
_COMMON: dict[str, Any] = {"color": PUBLISHED, "linewidth": 0.9, "linestyle": DASHED}
