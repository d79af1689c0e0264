"""One look for all figures: size, font, grid, and colours that colour-blind readers tell apart (Okabe and Ito 2008).

Ours is filled, published is hollow: the marks of every report. SVG output is the same for the same data.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rotquant.tables import Table

OURS = "#0072B2"
PUBLISHED = "#D55E00"
NEUTRAL = "#595959"

#: Ours in the background of its mean.
LIGHT = "#9ecae1"

#: Colours of series, the most different ones first.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

#: How ours and published points look, beside their colour.
OURS_MARK: dict[str, Any] = {"marker": "o", "markersize": 5}
PUBLISHED_MARK: dict[str, Any] = {"marker": "D", "markersize": 4.5, "markerfacecolor": "white"}

_CLIP = re.compile(r"\bp[0-9a-f]{10}\b")

#: Up to this many percent an axis of relative changes is linear.
LINEAR = 8.0

#: About as many labels as fit below a panel.
_X_TICKS = 4

#: Beyond this many percent the labels of 0 and 1 would meet below a panel.
_CROWDED = 1e3

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": NEUTRAL,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "rotquant",
}


def drawn_rows(table: "Table") -> list[str]:
    """The rows that a table's figure shows: those it names, or all that are computed."""
    named = table.figure.rows if table.figure else None
    return list(named or [row.name for row in table.computed_rows])


@contextmanager
def styled() -> Iterator[Any]:
    """Yield `matplotlib.pyplot` with the project's settings and a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(_SETTINGS):
        try:
            yield plt
        finally:
            plt.close("all")


def save_svg(figure: "Figure", path: Path) -> None:
    """Write a figure as SVG atomically, so that equal data give equal files."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    # Matplotlib names some clip paths by where they lie in memory; here by their order.
    names: dict[str, str] = {}
    write_text(path, _CLIP.sub(lambda match: names.setdefault(match[0], f"clip{len(names)}"), text.getvalue()))


class PercentAxis:
    """An axis of relative changes, in percent: linear about zero and logarithmic beyond, with a place for Inf and NaN.

    Perplexities rise by half a percent or by ten thousand in one table, and some rows gain. Where all changes are small
    the axis is linear throughout.
    """

    def __init__(self, changes: Iterable[float | None]) -> None:
        numbers = [change for change in changes if change is not None]
        finite = [change for change in numbers if math.isfinite(change)]
        self.broken = len(finite) < len(numbers)
        self.low, self.high = min([0.0, *finite]), max([0.0, *finite])
        self.linear = max(-self.low, self.high) <= LINEAR and not self.broken

    @property
    def limits(self) -> tuple[float, float]:
        """Both ends of the axis."""
        if self.linear:
            margin = 0.08 * max(self.high - self.low, 0.1)
            return self.low - margin, self.high + margin
        low = min(-0.3, self.low * 2)
        return low, max(self.high, 1.0) * (8 if self.broken else 2)

    def place(self, change: float) -> float:
        """Where a change is drawn: what is not finite near the upper end."""
        return change if math.isfinite(change) else self.limits[1] / 1.6

    def apply(self, axis: "Axes", which: str) -> None:
        """Set scale, limits and tick labels of the x or y axis of a panel."""
        from matplotlib.ticker import SymmetricalLogLocator

        ticks = getattr(axis, f"{which}axis")
        if not self.linear:
            getattr(axis, f"set_{which}scale")("symlog", linthresh=1.0, linscale=0.5)
            locator = SymmetricalLogLocator(base=10.0, linthresh=1.0)
            if which == "x":
                locator.set_params(numticks=_X_TICKS)
            ticks.set_major_locator(locator)
        axis.set(**{f"{which}lim": self.limits})
        crowded = which == "x" and self.high > _CROWDED
        ticks.set_major_formatter(lambda value, _: "" if crowded and abs(value) == 1 else _percent(value))


def _percent(value: float) -> str:
    """A tick label; powers of ten from ten thousand on are written as such."""
    if abs(value) < 1e4:
        return f"{value:g} %"
    digits = str(round(math.log10(abs(value)))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{'-' if value < 0 else ''}10{digits} %"
