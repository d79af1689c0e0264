"""The figure of a ranking: each class's ranks on each model, and what its divergence costs in bits and in seconds."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.claims.ranking import Class
from reproduction.render.figures.axes import logarithmic
from reproduction.render.figures.panels import LEGEND, drawn, entry, legend, name_rows, note, room_for
from reproduction.render.figures.style import LIGHT, LINK, NEUTRAL, OURS, WIDTHS
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title

#: Marks of models, the size of all marks in points, and how many sizes apart they have numbers together.
MARKS, SIZE, NEAR = "osD^v<>ph*", 4.5, 1.25
#: Inches of the lowest line of panels, and of what stands around the rows of a line.
_LEAST, _AROUND = 1.7, 0.65
#: The ratio of two values from which on their axis is logarithmic.
_MUCH = 4.0
#: Most characters of the ticks of a linear axis of costs.
_CHARACTERS = 16
#: Most ticks of a logarithmic axis of costs or of divergence, and the factors of powers of ten that they may be at.
_TICKS, _FACTORS = {"x": 4, "y": 5}, ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
#: Sides of a mark in order of preference, and how far from it in points its name may be.
_SIDES = ((1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1), (0, 1), (0, -1))
_DISTANCES = (3, 6, 10, 15)

Point = tuple[float, float]


def draw(project: Project, classes: Sequence[Class], path: Path) -> None:
    """Draw a line for each class: ranks by row, then mean divergence over models against bits and against seconds.

    A point has its row's number; points that nearly touch have their numbers together. Dark blue are those that are
    better than all that take less.
    """
    heights = [max(_LEAST, room_for(one.ranked.rows)[1] + _AROUND) for one in classes]
    models = _models(project, classes)
    numbered: list[tuple[Any, dict[int, Point]]] = []
    with drawn(path, (WIDTHS["page"], LEGEND + sum(heights))) as figure:
        lines = figure.subplots(len(classes), 3, height_ratios=heights, width_ratios=[1.3, 1, 1], squeeze=False)
        for (ranks, bits, seconds), one in zip(lines, classes, strict=True):
            _ranks(ranks, one, [*models])
            for axis, costs, what in ((bits, one.stored, "bits"), (seconds, one.seconds, "seconds")):
                points = _points(one, costs)
                draw_costs(axis, points, what)
                numbered.append((axis, points))
        marks = [entry(f"rank on {name}", NEUTRAL, marker=MARKS[place]) for place, name in enumerate(models.values())]
        marks.append(entry("KL divergence, mean over models: better than all that take less", OURS, marker="o"))
        legend(figure, [*marks, entry("others", LIGHT, marker="o")])
        figure.draw_without_rendering()  # places of the marks
        for axis, points in numbered:
            write_numbers(axis, points)


def _models(project: Project, classes: Sequence[Class]) -> dict[str, str]:
    """The models of all classes, and each with the one that stands for it, as titles of panels have it."""
    found: dict[str, str] = {}
    for one in classes:
        for column in one.ranked.columns:
            title = panel_title(project, project.one(RunTable, one.said.table), column)
            found.setdefault(column, title.replace("\n", " "))
    return found


def _points(one: Class, costs: Mapping[str, float]) -> dict[int, Point]:
    """Cost and mean divergence over models, by the row's number; none where nothing is stored, or made."""
    found = one.ranked
    return {
        number: (costs[row], fmean(found.standings[row, column].kl for column in found.columns))
        for number, row in enumerate(found.rows, start=1)
        if math.isfinite(costs[row]) and costs[row] > 0
    }


def draw_costs(axis: Any, points: Mapping[int, Point], what: str) -> None:
    """Draw divergence against a cost."""
    if not points:
        axis.set_axis_off()
        return
    best = _undominated(points)
    for number, point in sorted(points.items(), key=lambda pair: pair[0] in best):  # the best on top
        axis.plot(*point, marker="o", markersize=SIZE, color=OURS if number in best else LIGHT)
    axis.set(xlabel=what, ylabel="KL, nats")
    axis.margins(0.15, 0.1)  # room for numbers
    for which, values in zip("xy", zip(*points.values(), strict=True), strict=True):
        _scale(axis, which, values)


def _scale(axis: Any, which: Any, values: Sequence[float]) -> None:
    """Make an axis logarithmic where values differ much."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    scale = getattr(axis, f"{which}axis")
    if min(values) <= 0 or max(values) < _MUCH * min(values):
        for ticks in (4, 3, 2, 1):
            scale.set_major_locator(MaxNLocator(ticks))
            shown = scale.get_major_formatter().format_ticks(scale.get_majorticklocs())
            if which == "y" or sum(map(len, shown)) <= _CHARACTERS:
                return
        return
    logarithmic(axis, which)
    low, high = getattr(axis, f"get_{which}lim")()
    for factors in _FACTORS:
        scale.set_major_locator(LogLocator(subs=factors))
        if sum(low <= tick <= high for tick in scale.get_major_locator().tick_values(low, high)) <= _TICKS[which]:
            return


def _undominated(points: Mapping[int, Point]) -> dict[int, Point]:
    """The points that no other beats in both."""
    least, found = float("inf"), {}
    for row, (cost, divergence) in sorted(points.items(), key=lambda point: point[1]):
        if divergence < least:
            least, found[row] = divergence, (cost, divergence)
    return found


def write_numbers(axis: Any, points: Mapping[int, Point]) -> None:
    """Write numbers next to points, those of a cluster together, without meeting another mark or number.

    The figure must have been laid out.
    """
    from matplotlib.transforms import Bbox

    size = SIZE * axis.figure.dpi / 72
    places = {number: tuple(axis.transData.transform(point)) for number, point in points.items()}
    marks = {number: Bbox.from_bounds(x - size / 2, y - size / 2, size, size) for number, (x, y) in places.items()}
    texts: list[Any] = []
    for cluster in clusters(places, NEAR * size):
        own, others = [], []
        for number, mark in marks.items():
            (own if number in cluster else others).append(mark)
        texts.append(_written(axis, numbers(cluster), own, others, texts))


def _written(axis: Any, text: str, own: Sequence[Any], others: Sequence[Any], texts: Sequence[Any]) -> Any:
    """Write a text beside its own marks, where it meets the fewest others and texts, and no mark of others is nearer.

    All are boxes in pixels, as the returned one of the text.
    """
    from matplotlib.transforms import Bbox

    around, points = Bbox.union(own), 72 / axis.figure.dpi
    middle = axis.transData.inverted().transform(((around.x0 + around.x1) / 2, (around.y0 + around.y1) / 2))
    best, least = None, math.inf
    for far, (x, y) in product(_DISTANCES, _SIDES):
        look = {"ha": ("right", "center", "left")[x + 1], "va": ("top", "center", "bottom")[y + 1]}
        away = far if not (x and y) else far / 2
        offset = (x * (around.width * points / 2 + away), y * (around.height * points / 2 + away))
        found = note(axis, text, middle, offset, color=NEUTRAL, **look)
        box = found.get_window_extent()
        met = sum(box.overlaps(other) for other in (*own, *others, *texts))
        nearest = min((_gap(box, other) for other in others), default=math.inf)
        met += 2 * (nearest <= min(_gap(box, other) for other in own)) + 4 * (not _is_inside(axis, box))
        if met >= least:
            found.remove()
            continue
        if best is not None:
            best.remove()
        best, least = found, met
        if not least:
            break
    assert best is not None  # the first is better than none
    return best.get_window_extent()


def _gap(one: Any, other: Any) -> float:
    """Distance of two boxes."""
    across = max(0.0, one.x0 - other.x1, other.x0 - one.x1)
    return math.hypot(across, max(0.0, one.y0 - other.y1, other.y0 - one.y1))


def _is_inside(axis: Any, box: Any) -> bool:
    """Whether a text is in a panel; at its right, where no axis is, it may be a little outside."""
    whole, beyond = axis.bbox, 0.15 * axis.bbox.width
    return whole.x0 < box.x0 and box.x1 < whole.x1 + beyond and whole.y0 < box.y0 and box.y1 < whole.y1


def clusters(places: Mapping[int, Sequence[float]], near: float) -> list[list[int]]:
    """The points in clusters, each linked by pairs that are less than `near` apart."""
    found: list[list[int]] = []
    for number, place in places.items():
        linked = [one for one in found if any(math.dist(place, places[other]) < near for other in one)]
        found = [one for one in found if one not in linked]
        found.append(sorted([number, *(other for one in linked for other in one)]))
    return sorted(found)


def numbers(cluster: Sequence[int]) -> str:
    """Numbers in order with those that follow each other as a range, such as "2, 4-7"."""
    runs: list[list[int]] = []
    for number in cluster:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs]
    return ", ".join(parts)


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
            axis.plot(found.standings[row, column].rank, place, marker=mark, markersize=SIZE, color=NEUTRAL)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set(xlim=(0.5, len(found.rows) + 0.5), xlabel="rank")
    axis.set_title(one.said.name, loc="left", fontweight="bold", color=NEUTRAL)
