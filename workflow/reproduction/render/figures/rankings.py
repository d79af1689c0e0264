"""The figure of a ranking: what a class's divergence costs in bits and in seconds, and the ranks on each model."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.claims.ranking import Class
from reproduction.render.figures.axes import logarithmic
from reproduction.render.figures.panels import drawn, entry, name_points, name_rows, room_for
from reproduction.render.figures.style import LINK, NEUTRAL, OURS_MARK, SERIES, WIDTHS

#: Marks of models.
MARKS = "osD^v<>ph*"

#: Inches of the upper panels, and of what stands around the rows of a lower one.
_UPPER, _AROUND = 2.8, 0.55


def draw(classes: Sequence[Class], path: Path) -> None:
    """Draw divergence against bits and against seconds, a colour for each class; below, ranks, a panel for each.

    Named are the methods that are better than all that take less.
    """
    heights = [room_for(one.ranked.rows)[1] + _AROUND for one in classes]
    colors = [color for color, _ in zip(itertools.cycle((*SERIES, NEUTRAL)), classes, strict=False)]
    with drawn(path, (WIDTHS["page"], _UPPER + sum(heights))) as figure:
        upper, lower = figure.subfigures(2, 1, height_ratios=[_UPPER, sum(heights)])
        bits, seconds = upper.subplots(1, 2, sharey=True)
        named: list[tuple[Any, dict[str, tuple[float, float]]]] = []
        for axis, what in ((bits, "stored"), (seconds, "seconds")):
            for color, one in zip(colors, classes, strict=True):
                points = _points(one, getattr(one, what))
                if not points:
                    continue
                axis.plot(*zip(*points.values(), strict=True), linestyle="", color=color, **OURS_MARK)
                named.append((axis, _undominated(points)))
            logarithmic(axis, "y")
        logarithmic(seconds, "x")
        bits.set(xlabel="bits a weight", ylabel="KL divergence, nats, mean over models")
        seconds.set_xlabel("seconds of learning and rounding, mean over models")
        marks = [entry(one.said.name, color, **OURS_MARK) for one, color in zip(classes, colors, strict=True)]
        models = dict.fromkeys(column for one in classes for column in one.ranked.columns)
        marks += [entry(f"rank on {name}", NEUTRAL, marker=MARKS[place]) for place, name in enumerate(models)]
        upper.legend(handles=marks, loc="outside upper center", ncols=len(marks))
        axes = lower.subplots(len(classes), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axis, one, color in zip(axes, classes, colors, strict=True):
            _ranks(axis, one, color, [*models])
        figure.draw_without_rendering()  # places of the marks
        for axis, points in named:
            name_points(axis, points)


def _points(one: Class, costs: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Cost and mean divergence over models, by row; none of bits where weights are not quantized."""
    found = one.ranked
    return {
        row: (costs[row], fmean(found.standings[row, column].kl for column in found.columns))
        for row in found.rows
        if math.isfinite(costs[row])
    }


def _undominated(points: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The points that no other beats in both."""
    least, found = float("inf"), {}
    for row, (cost, divergence) in sorted(points.items(), key=lambda point: point[1]):
        if divergence < least:
            least, found[row] = divergence, (cost, divergence)
    return found


def _ranks(axis: Any, one: Class, color: str, models: Sequence[str]) -> None:
    """Draw each row's ranks: a mark for each model, and the range over seeds."""
    from matplotlib.ticker import MaxNLocator

    found = one.ranked
    name_rows(axis, found.rows)
    for place, row in enumerate(found.rows):
        axis.hlines(place, min(found.ranks[row]), max(found.ranks[row]), color=LINK, linewidth=1)
        for column in found.columns:
            mark = MARKS[models.index(column)]
            axis.plot(found.standings[row, column].rank, place, marker=mark, markersize=4.5, color=color)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlim=(0.5, len(found.rows) + 0.5), title=f"{one.said.name}: rank on each model, and its range over seeds")
