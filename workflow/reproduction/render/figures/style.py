"""One style for all figures: width, font, grid, and colours for colour-blind readers (Okabe and Ito 2008).

Ours is filled, published is hollow, in every report. SVG and PDF output is the same for the same data.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation.files import atomic_path, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reproduction.tables.tables import RunTable

OURS = "#0072B2"
PUBLISHED = "#D55E00"
NEUTRAL = "#595959"

#: Widths in inches of a paper's text and of one of its two columns.
WIDTHS = {"page": 7.0, "column": 3.3}

#: Sizes in points, as papers print figures: text, and the smallest one, for notes.
TEXT, SMALL = 7.5, 7.0

#: Colour of our single values in the background of their mean.
LIGHT = "#9ecae1"

#: Colour of lines between related marks.
LINK = "#9b9b9b"

#: Colours of series, the most different ones first.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

#: Marks of ours and published points, without their colour.
OURS_MARK: dict[str, Any] = {"marker": "o", "markersize": 5}
PUBLISHED_MARK: dict[str, Any] = {"marker": "D", "markersize": 4.5, "markerfacecolor": "white"}
DASHED = (0, (4, 2))

_CLIP = re.compile(r"\bp[0-9a-f]{10}\b")

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "figure.labelsize": TEXT,
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
    "pdf.fonttype": 42,
}


def drawn_rows(table: "RunTable") -> list[str]:
    """The rows of a table's figure: those it names, or all computed ones."""
    named = table.figure.rows if table.figure else None
    return list(named or [row.name for row in table.rows])


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


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as SVG or PDF, by the path's suffix, atomically; equal data give equal files.

    PDF embeds its fonts as TrueType (type 42), as publishers require.
    """
    if path.suffix == ".pdf":
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="pdf", metadata={"CreationDate": None})
        return
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # `savefig` would draw everything once more before
    # Matplotlib names some clip paths by their memory address; here by their order.
    names: dict[str, str] = {}
    write_text(path, _CLIP.sub(lambda match: names.setdefault(match[0], f"clip{len(names)}"), text.getvalue()))
