"""Axes of relative changes, and labels that stay next to their own panel."""

import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from reproduction.render.figures.changes import Change

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Our changes up to this multiple of their upper quartile are usual; above this multiple of the largest they are far.
USUAL, FAR = 100.0, 15.0

#: An axis is logarithmic if our median change would be within this share of a linear one.
HIDDEN = 0.15

#: Up to this many percent, an axis of relative changes is always linear.
LINEAR = 8.0

#: Inches between two labels.
_GAP = 0.05

#: Margin beyond the last number, as a share of the axis's length.
_MARGIN = 0.1

#: Length of a logarithmic axis from zero to 1 %, in powers of ten.
LINEAR_PART = 0.5


class PercentAxis:
    """An axis of relative changes in percent, linear, or linear about zero and logarithmic beyond 1 %.

    Perplexities rise by ten percent in all rows of one table, by one to a thousand in another, and by a million where a
    network broke down. An axis with room for a million would hide the other changes. Changes that are far beyond the
    others or not finite are therefore drawn at the end of the axis. Our numbers set the limit.
    """

    def __init__(self, changes: Iterable[Change]) -> None:
        known = list(changes)
        numbers = [number for change in known for number in (change.ours, change.papers) if number is not None]
        sizes = _sizes(change.ours for change in known) or _sizes(numbers) or [0.1]
        usual = [size for size in sizes if size <= USUAL * sizes[3 * (len(sizes) - 1) // 4]]
        self.far = FAR * usual[-1]
        self.far = max(self.far, 2 * max((size for size in _sizes(numbers) if size <= self.far), default=0.0))
        near = [0.0, *(end for change in known for end in change.extent if not self.beyond(end))]
        extent = max(map(abs, near))
        self.linear = extent <= LINEAR or usual[len(usual) // 2] >= HIDDEN * extent
        self.any_beyond = any(map(self.beyond, numbers))
        low, high = self._along(min(near)), self._along(max(near))
        margin = _MARGIN * max(high - low, 0.1)
        self.limits = self._back(low - margin), self._back(high + margin)

    def beyond(self, change: float) -> bool:
        """Whether a change is drawn at the end of the axis instead of its own place."""
        return not abs(change) <= self.far  # also nan

    def place(self, change: float) -> float:
        """The place of a change on the axis."""
        if not self.beyond(change):
            return change
        return self.limits[0] if change < 0 else self.limits[1]

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
        """Set scale, limits and tick labels of the x or y axis of a panel."""
        from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

        ticks, (low, high) = getattr(axis, f"{which}axis"), self.limits
        if self.linear:
            ticks.set_major_locator(MaxNLocator(4 if which == "x" else 6))
        else:
            getattr(axis, f"set_{which}scale")("symlog", linthresh=1.0, linscale=LINEAR_PART * 0.9)
            ticks.set_minor_locator(NullLocator())
            powers = [10.0**power for power in range(16) if low <= -(10**power) or 10**power <= high]
            powers = powers[::-2] if len(powers) > 3 else powers
            if len(powers) > 1 and (which == "x" or low < -1):
                powers = [power for power in powers if power > 1]  # it is too near to zero
            ticks.set_major_locator(FixedLocator([0.0, *powers, *(-power for power in powers)]))
        axis.set(**{f"{which}lim": self.limits})
        ticks.set_major_formatter(lambda value, _: f"{value:g} %")

    def mark(
        self, axis: "Axes", which: Literal["x", "y"], numbers: Iterable[tuple[float, float]], color: str, face: str
    ) -> None:
        """Draw a cross for each number beyond the axis. numbers: by their place on the other axis."""
        for other, number in numbers:
            if self.beyond(number):
                place = (self.place(number), other) if which == "x" else (other, self.place(number))
                axis.plot(*place, marker="X", markersize=7, color=color, markerfacecolor=face, clip_on=False, zorder=4)


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


def logarithmic(axis: "Axes", which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ticks at 1, 2 and 5 times powers of ten, written as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axis, f"set_{which}scale")("log")
    scale = getattr(axis, f"{which}axis")
    scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())
