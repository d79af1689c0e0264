"""What figures of every kind do alike: a grid of panels that becomes a file, rows by name, notes and the legend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rotquant.reporting.figures.style import save_svg, styled


@contextmanager
def drawn(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield an empty figure of `size` inches; what is drawn on it is written to `path`."""
    with styled() as plt:
        figure = plt.figure(figsize=size, layout="constrained")
        yield figure
        save_svg(figure, path)


@contextmanager
def panels(path: Path, down: int, across: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes [down, across]; what is drawn on them is written to `path`."""
    with drawn(path, size) as figure:
        yield figure, figure.subplots(down, across, squeeze=False, **options)


def name_rows(axis: Any, names: Sequence[str], *, shown: bool, room: float = 0.5) -> None:
    """One row per name from top to bottom, with the names where they are `shown`; room: what is above the first."""
    axis.set(ylim=(len(names) - 0.5, -room), yticks=range(len(names)))
    axis.set_yticklabels(names if shown else [])
    axis.tick_params(axis="y", length=0)


def note(axis: Any, text: str, place: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """A text so many points from a place of the axis."""
    axis.annotate(text, place, offset, textcoords="offset points", **look)


def entry(label: str, color: str, **look: Any) -> Any:
    """A line of a legend; one with a mark has no stroke unless it gives its `linestyle`."""
    from matplotlib.lines import Line2D

    if "marker" in look:
        look = {"linestyle": "", **look}
    return Line2D([], [], label=label, color=color, **look)


def legend(figure: Any, entries: Sequence[Any], side: str = "center", columns: int | None = None) -> None:
    """The legend above all panels, in one line unless it has fewer columns."""
    figure.legend(handles=entries, loc=f"outside upper {side}", ncols=columns or len(entries))
