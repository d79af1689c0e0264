"""The figure of a ranking: each class's ranks on each model, and what its divergence costs in bits and in seconds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.claims.ranking import Class
from reproduction.render.figures.axes import logarithmic
from reproduction.render.figures.panels import LEGEND, drawn, entry, legend, name_points, name_rows, room_for
from reproduction.render.figures.style import LIGHT, LINK, NEUTRAL, OURS, WIDTHS

#: Marks of models.
MARKS = "osD^v<>ph*"
#: Inches of the lowest line of panels, and of what stands around the rows of a line.
_LEAST, _AROUND = 1.7, 0.65
#: The ratio of two values from which on their axis is logarithmic; of its third power, without ticks at 2 and 5.
_MUCH = 4.0


def draw(classes: Sequence[Class], path: Path) -> None:
    """Draw a line for each class: ranks by row, then mean divergence over models against bits and against seconds.

    A point has its row's number. Dark are those that are better than all that take less.
    """
    heights = [max(_LEAST, room_for(one.ranked.rows)[1] + _AROUND) for one in classes]
    models = [*dict.fromkeys(column for one in classes for column in one.ranked.columns)]
    numbered: list[tuple[Any, dict[str, tuple[float, float]]]] = []
    with drawn(path, (WIDTHS["page"], LEGEND + sum(heights))) as figure:
        lines = figure.subplots(len(classes), 3, height_ratios=heights, width_ratios=[1.3, 1, 1], squeeze=False)
        for (ranks, bits, seconds), one in zip(lines, classes, strict=True):
            _ranks(ranks, one, models)
            for axis, costs, what in ((bits, one.stored, "bits"), (seconds, one.seconds, "seconds")):
                points = _points(one, costs)
                _costs(axis, points, what)
                numbered.append((axis, points))
        marks = [entry(f"rank on {name}", OURS, marker=MARKS[place]) for place, name in enumerate(models)]
        marks.append(entry("KL divergence, mean over models: better than all that take less", OURS, marker="o"))
        legend(figure, [*marks, entry("others", LIGHT, marker="o")])
        figure.draw_without_rendering()  # places of the marks
        for axis, points in numbered:
            name_points(axis, points)


def _points(one: Class, costs: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Cost and mean divergence over models, by the row's number; none where nothing is stored, or made."""
    found = one.ranked
    return {
        str(number): (costs[row], fmean(found.standings[row, column].kl for column in found.columns))
        for number, row in enumerate(found.rows, start=1)
        if math.isfinite(costs[row]) and costs[row] > 0
    }


def _costs(axis: Any, points: Mapping[str, tuple[float, float]], what: str) -> None:
    """Draw divergence against a cost."""
    if not points:
        axis.set_axis_off()
        return
    best = _undominated(points)
    for number, point in points.items():
        axis.plot(*point, marker="o", markersize=4.5, color=OURS if number in best else LIGHT)
    axis.set(xlabel=what, ylabel="KL, nats")
    for which, values in zip("xy", zip(*points.values(), strict=True), strict=True):
        _scale(axis, which, values)


def _scale(axis: Any, which: Any, values: Sequence[float]) -> None:
    """Make an axis logarithmic where values differ much."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    scale = getattr(axis, f"{which}axis")
    if min(values) <= 0 or max(values) < _MUCH * min(values):
        scale.set_major_locator(MaxNLocator(4))
        return
    logarithmic(axis, which)
    if max(values) > _MUCH**3 * min(values):
        scale.set_major_locator(LogLocator())


def _undominated(points: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The points that no other beats in both."""
    least, found = float("inf"), {}
    for row, (cost, divergence) in sorted(points.items(), key=lambda point: point[1]):
        if divergence < least:
            least, found[row] = divergence, (cost, divergence)
    return found


def _ranks(axis: Any, one: Class, models: Sequence[str]) -> None:
    """Draw each row's ranks: a mark for each model, and the range over seeds."""
    from matplotlib.ticker import MaxNLocator

    found = one.ranked
    name_rows(axis, found.rows)
    axis.set_yticklabels([f"{row}  {number}" for number, row in enumerate(found.rows, start=1)])
    for place, row in enumerate(found.rows):
        axis.hlines(place, min(found.ranks[row]), max(found.ranks[row]), color=LINK, linewidth=1)
        for column in found.columns:
            mark = MARKS[models.index(column)]
            axis.plot(found.standings[row, column].rank, place, marker=mark, markersize=4.5, color=OURS)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set(xlim=(0.5, len(found.rows) + 0.5), xlabel="rank")
    axis.set_title(one.said.name, loc="left", fontweight="bold", color=NEUTRAL)
