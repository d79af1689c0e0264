"""One look for all figures: size, font, grid, and colours that colour-blind readers tell apart (Okabe and Ito 2008).

Ours is filled and dark, published is hollow: the marks of every report. SVG output is the same for the same data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "#0072B2"
PUBLISHED = "#D55E00"
NEUTRAL = "#595959"

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
    """Write a figure as SVG atomically, without a date, so that equal data give equal files."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="svg", bbox_inches="tight", metadata={"Date": None})
