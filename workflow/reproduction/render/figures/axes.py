"""Axes on which every number of a figure has a place, and labels that stay next to their own panel."""

import itertools
import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from reproduction.render.figures.changes import Change
from reproduction.words.numbers import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Our changes up to this multiple of their upper quartile are usual; above this multiple of the largest they are far.
USUAL, FAR = 100.0, 15.0

#: An axis is logarithmic if our median change would be within this share of a linear one.
HIDDEN = 0.15

#: Up to this many percent, an axis of relative changes is always linear.
LINEAR = 8.0

#: Labels that fit next to a panel.
_BESIDE = 7

#: Inches of a label's character, of the gap between two labels, and of a mark at the end of an axis.
_CHARACTER, _GAP, _MARK = 0.056, 0.05, 0.15

#: Margin beyond the last number where nothing is far, as a share of the axis's length.
_MARGIN = 0.1

#: Length of a logarithmic axis from zero to 1 %, in powers of ten.
LINEAR_PART = 0.5


class PercentAxis:
    """An axis of relative changes in percent, linear, or linear about zero and logarithmic beyond 1 %.

    Perplexities rise by ten percent in all rows of one table, by one to a thousand in another, and by a million where a
    network broke down. An axis with room for a million would hide the other changes. Changes that are far beyond the
    others or not finite are therefore drawn at the end of the axis, with their numbers. Our numbers set the limit.

    inches: approximate length of the axis, which sets the room for numbers at its ends and for labels below it.
    """

    def __init__(self, changes: Iterable[Change]) -> None:
        self.inches = 1.6
        known = list(changes)
        numbers = [number for change in known for number in (change.ours, change.papers) if number is not None]
        sizes = _sizes(change.ours for change in known) or _sizes(numbers) or [0.1]
        usual = [size for size in sizes if size <= USUAL * sizes[3 * (len(sizes) - 1) // 4]]
        self.far = FAR * usual[-1]
        self.far = max(self.far, 2 * max((size for size in _sizes(numbers) if size <= self.far), default=0.0))
        near = [end for change in known for end in change.extent if not self.beyond(end)]
        self.low, self.high = min([0.0, *near]), max([0.0, *near])
        self.below, self.above = (
            max((self._room(one, negative) for one in known), default=0.0) for negative in (True, False)
        )
        extent = max(-self.low, self.high)
        self.linear = extent <= LINEAR or usual[len(usual) // 2] >= HIDDEN * extent

    def beyond(self, change: float) -> bool:
        """Whether a change is drawn at the end of the axis instead of its own place."""
        return not abs(change) <= self.far  # also nan

    def _room(self, change: Change, negative: bool) -> float:
        """Inches of a row's number and mark at an end of the axis."""
        numbers = [number for number in (change.ours, change.papers) if number is not None and self.beyond(number)]
        texts = [change_label(number) for number in numbers if (number < 0) == negative]
        return _MARK * bool(texts) + sum(_GAP + _CHARACTER * len(text) for text in texts)

    @property
    def least(self) -> float:
        """Inches of the axis that leave room for the changes between the numbers at its ends."""
        return 0.5 + self.below + self.above

    @property
    def limits(self) -> tuple[float, float]:
        """Both ends of the axis, with room for the marks and numbers of changes beyond them."""
        low, high = (self._along(end) for end in (self.low, self.high))
        span = max(high - low, 0.1)
        shares = [room / max(self.inches, self.least) for room in (self.below, self.above)]
        below, above = (span * (share / (1 - sum(shares)) if share else _MARGIN) for share in shares)
        return self._back(low - below), self._back(high + above)

    @property
    def _usual(self) -> tuple[float, float]:
        """The part of the axis where numbers have their own places."""
        low, high = (self._along(end) for end in (self.low, self.high))
        margin = _MARGIN * max(high - low, 0.1)
        return self._back(low - margin), self._back(high + margin)

    def place(self, change: float) -> float:
        """The place of a change on the axis."""
        if not self.beyond(change):
            return change
        low, high = (self._along(end) for end in self.limits)
        inset = 0.04 * (high - low)
        return self._back(low + inset if change < 0 else high - inset)

    def _along(self, change: float) -> float:
        """The distance of a change from zero along the axis; beyond 1 % it is counted in powers of ten."""
        if self.linear or abs(change) <= 1:
            return change
        return math.copysign(1 + math.log10(abs(change)) / LINEAR_PART, change)

    def _back(self, distance: float) -> float:
        """The change at a distance."""
        if self.linear or abs(distance) <= 1:
            return distance
        return math.copysign(10 ** (LINEAR_PART * (abs(distance) - 1)), distance)

    @property
    def words(self) -> str:
        """What a label adds where the axis is not linear."""
        return "" if self.linear else " (logarithmic beyond 1 %)"

    def apply(self, axis: "Axes", which: Literal["x", "y"]) -> None:
        """Set scale, limits and tick labels of the x or y axis of a panel, and mark where its scale changes or ends."""
        from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

        ticks = getattr(axis, f"{which}axis")
        if self.linear:
            low, high = self._usual
            found = MaxNLocator(min(4, max(2, int(self.inches / 0.33))) if which == "x" else 6).tick_values(low, high)
            ticks.set_major_locator(FixedLocator([value for value in found if low <= value <= high]))
        else:
            getattr(axis, f"set_{which}scale")("symlog", linthresh=1.0, linscale=LINEAR_PART * 0.9)
            ticks.set_minor_locator(NullLocator())
            ticks.set_major_locator(FixedLocator(self._ticks(below=which == "x")))
        axis.set(**{f"{which}lim": self.limits})
        ticks.set_major_formatter(lambda value, _: _percent(value))
        low, high = self._usual
        for end, beyond in ((low, self.below), (high, self.above)):
            if beyond:
                _mark_break(axis, which, (self._along(end) - self._start) / self._span)

    @property
    def _start(self) -> float:
        """Where the axis starts, as a distance from zero along it."""
        return self._along(self.limits[0])

    @property
    def _span(self) -> float:
        """Length of the axis in the same unit."""
        return self._along(self.limits[1]) - self._start

    def _ticks(self, *, below: bool) -> list[float]:
        """Zero and powers of ten, and next to a panel also their midpoints; fewer without room."""
        low, high = self._usual
        crowded = [value for value in (1.0, -1.0) if below and self._meet([0.0, value])]
        found = [0.0]
        for steps, stride in (((1,) if below else (1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            up = [step * 10.0**power for power in range(1 if 1.0 in crowded else 0, 16, stride) for step in steps]
            both = [*(-value for value in reversed(up)), 0.0, *up]
            found = [value for value in both if low <= value <= high and value not in crowded]
            if not self._meet(found) if below else len(found) <= _BESIDE:
                break
        return found

    def _meet(self, values: list[float]) -> bool:
        """Whether labels of some of these numbers would touch below a panel."""
        low, high = (self._along(end) for end in self.limits)
        scale = self.inches / (high - low)
        ends = sorted(
            (scale * self._along(value) - half, scale * self._along(value) + half)
            for value in values
            for half in [_CHARACTER / 2 * len(_percent(value)) + _GAP / 2]
        )
        return any(one[1] > other[0] for one, other in itertools.pairwise(ends))


def _mark_break(axis: "Axes", which: Literal["x", "y"], share: float) -> None:
    """Two strokes across a panel's axis at a share of its length: what follows is not to scale."""
    place = {"x": ([share - 0.01, share + 0.01], [0, 0]), "y": ([0, 0], [share - 0.01, share + 0.01])}[which]
    stroke = [(-0.4, -1), (0.4, 1)] if which == "x" else [(-1, -0.4), (1, 0.4)]
    look = {"marker": stroke, "linestyle": "", "color": "black", "markersize": 6, "markeredgewidth": 0.9}
    axis.plot(*place, transform=axis.transAxes, clip_on=False, zorder=5, **look)


def change_label(change: float) -> str:
    """A change's number where it cannot be read from the axis: "3,000 %", from ten thousand on "5.7·10⁴ %"."""
    if not math.isfinite(change):
        return show(change)
    if abs(change) < 1e4:
        return f"{float(f'{change:.1e}'):,.0f} %"
    digits, _, power = f"{change:.1e}".partition("e")
    return f"{digits}·10{_raised(int(power))} %"


def fit_labels(figure: "Figure") -> None:
    """Lay a figure out, breaking labels that leave it or meet others."""
    figure.draw_without_rendering()
    whole = figure.bbox
    around = (getattr(figure, name, None) for name in ("_supxlabel", "_supylabel"))
    labels = [(label, whole) for label in around if label is not None]
    labels += [(label, axis.bbox) for axis in figure.axes for label in (axis.xaxis.label, axis.yaxis.label, axis.title)]
    boxes = {label: label.get_window_extent() for label, _ in labels if label.get_text()}
    changed = False
    for label, room in labels:
        if label not in boxes:
            continue
        box, upright = boxes[label], label.get_rotation() == 90
        length, space = (box.height, room.height) if upright else (box.width, room.width)
        outside = box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1
        near = box.padded(2 * _GAP * figure.dpi, 0)
        if outside or any(near.overlaps(other) for another, other in boxes.items() if another is not label):
            longest = max(map(len, label.get_text().split("\n")))
            width = max(8, int(longest * space / length))
            lines = [textwrap.wrap(line, width) or [""] for line in label.get_text().split("\n")]
            label.set_text("\n".join(part for parts in lines for part in parts))
            changed = True
    if changed:
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # lays it out


def _sizes(numbers: Iterable[float | None]) -> list[float]:
    """The sorted magnitudes of the finite non-zero numbers."""
    return sorted(abs(number) for number in numbers if number and math.isfinite(number))


def _percent(value: float) -> str:
    """A tick label; from ten thousand on, powers of ten are written as such."""
    if abs(value) < 1e4:
        return f"{value:g} %"
    return f"{'-' if value < 0 else ''}10{_raised(round(math.log10(abs(value))))} %"


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def logarithmic(axis: "Axes", which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ticks at 1, 2 and 5 times powers of ten, written as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axis, f"set_{which}scale")("log")
    scale = getattr(axis, f"{which}axis")
    scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())
