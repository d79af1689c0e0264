"""One look for all figures: size, font, grid, and colours that colour-blind readers tell apart (Okabe and Ito 2008).

Ours is filled, published is hollow: the marks of every report. SVG output is the same for the same data.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation.files import write_text
from rotquant.reporting.figures.axes import fit_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rotquant.study.tables import Table

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
DASHED = (0, (4, 2))

_CLIP = re.compile(r"\bp[0-9a-f]{10}\b")

_SETTINGS: dict[Any, Any] = {
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
    """Write a figure as SVG atomically, so that equal data give equal files; labels that would meet are broken."""
    fit_labels(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    # Matplotlib names some clip paths by where they lie in memory; here by their order.
    names: dict[str, str] = {}
    write_text(path, _CLIP.sub(lambda match: names.setdefault(match[0], f"clip{len(names)}"), text.getvalue()))
