"""Common parts of all figures: panels of a paper's width, rows by name, notes and the legend."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reproduction.render.figures.axes import fit_labels
from reproduction.render.figures.style import NEUTRAL, SMALL, WIDTHS, save, styled

#: Inches of a character, of a line of text and of the legend.
CHARACTER, LINE, LEGEND = 0.056, 0.115, 0.4

#: Inches between two adjacent panels.
GUTTER = 0.15

#: Characters of a row's name in one line.
NAME = 32


def inches(natural: float) -> float:
    """Width of a figure whose panels take `natural` inches: from a column of a paper to a page."""
    return min(max(natural, WIDTHS["column"]), WIDTHS["page"])


@contextmanager
def drawn(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield an empty figure of `size` inches, and write it to a file afterwards."""
    with styled() as plt:
        figure = plt.figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.07, h_pad=0.05)
        yield figure
        fit_labels(figure)
        save(figure, path)


def say(text: str, path: Path) -> None:
    """Write a sentence where a figure would be."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(WIDTHS["page"], 0.4))
        figure.text(0.5, 0.5, text, ha="center", va="center", color=NEUTRAL)
        save(figure, path)


@contextmanager
def panels(
    path: Path,
    down: int,
    across: int,
    panel: tuple[float, float],
    *,
    names: float = 0.4,
    least: float = 1.4,
    together: int = 1,
    heights: Sequence[float] | None = None,
    widths: Sequence[float] | None = None,
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes [down, across], and write it to a file afterwards.

    A line of panels that is too wide for a page is broken into several.

    Args:
        path: the file.
        down: lines of panels.
        across: panels of a line.
        panel: requested width and height of a panel in inches, with its labels; the height is a mean over the lines.
        names: inches at the left for names, once a line.
        least: minimum width of a panel in inches.
        together: number of lines that are broken as one.
        heights: relative heights of the lines.
        widths: relative widths of the panels of an unbroken line.
        options: further arguments of matplotlib's `Figure.subplots`.
    """
    import numpy as np

    width = inches(names + panel[0] * across)
    parts = math.ceil(across / max(1, int((width - names) / least)))
    beside = math.ceil(across / parts)
    lines = [start + line for start in range(0, down, together) for _ in range(parts) for line in range(together)]
    ratios = {"height_ratios": [heights[line] for line in lines]} if heights else {}
    ratios |= {"width_ratios": widths} if widths and parts == 1 else {}
    with drawn(path, (width, LEGEND + panel[1] * len(lines))) as figure:
        physical = figure.subplots(len(lines), beside, squeeze=False, **ratios, **options)
        split = physical.reshape(down // together, parts, together, beside).swapaxes(1, 2).reshape(down, -1)
        for axis in np.ravel(split[:, across:]):
            axis.remove()
        yield figure, split[:, :across]


def leftmost(axis: Any) -> bool:
    """Whether a panel is the leftmost one."""
    return axis.get_subplotspec().is_first_col()


def broken(axis: Any, axes: Sequence[Any]) -> bool:
    """Whether an axis's line of panels is broken into several."""
    return len({other.get_subplotspec().rowspan.start for other in (axis, *axes)}) > 1


def room_for(names: Sequence[str], rows: float = 1.0) -> tuple[float, float]:
    """Inches that names take next to a panel, and that so many rows of them take for each name."""
    lines = [textwrap.wrap(name, NAME) or [""] for name in names]
    longest = max((len(line) for parts in lines for line in parts), default=0)
    return 0.2 + CHARACTER * longest, rows * max(0.16, LINE * max(map(len, lines), default=1) + 0.03) * len(names)


def name_rows(axis: Any, names: Sequence[str], *, room: float = 0.5) -> None:
    """Draw one row per name from top to bottom, named at the leftmost panel; room: space above the first."""
    axis.set(ylim=(len(names) - 0.5, -room), yticks=range(len(names)))
    axis.set_yticklabels([textwrap.fill(name, NAME) for name in names] if leftmost(axis) else [])
    axis.tick_params(axis="y", length=0)


def note(axis: Any, text: str, place: Any, offset: tuple[float, float], **look: Any) -> Any:
    """Write a text at an offset in points from a place of the axis."""
    return axis.annotate(text, place, offset, textcoords="offset points", **{"fontsize": SMALL, **look})


def name_points(axis: Any, names: Mapping[str, tuple[float, float]]) -> None:
    """Write names next to points, each on the first side, or further away, without another name.

    The figure must have been laid out.
    """
    taken: list[Any] = []
    places = [(far * x, far * y, x, y) for far, (x, y) in itertools.product((4, 11, 18, 25), _SIDES)]
    for name, point in names.items():
        for right, up, x, y in places:
            look = {"ha": ("right", "center", "left")[x + 1], "va": ("top", "center", "bottom")[y + 1]}
            found = note(axis, name, point, (right, up), color=NEUTRAL, **look)
            box = found.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            if free or (right, up, x, y) == places[-1]:
                taken.append(box)
                break
            found.remove()


#: Sides of a point in order of preference.
_SIDES = ((1, 1), (-1, -1), (1, -1), (-1, 1), (0, 1), (0, -1))


def entry(label: str, color: str, **look: Any) -> Any:
    """A legend entry; one with a mark has no stroke unless it gives its `linestyle`."""
    from matplotlib.lines import Line2D

    if "marker" in look:
        look = {"linestyle": "", **look}
    return Line2D([], [], label=label, color=color, **look)


def beyond() -> Any:
    """The legend's entry for what lies beyond an axis."""
    return entry("beyond the axis, Inf or NaN", NEUTRAL, marker="X", markersize=7)


def legend(figure: Any, entries: Sequence[Any]) -> None:
    """Draw the legend above all panels, in as many lines as the figure's width requires."""
    for columns in range(len(entries), 0, -1):
        found = figure.legend(handles=entries, loc="outside upper center", ncols=columns)
        if columns == 1 or found.get_window_extent().width <= 0.98 * figure.bbox.width:
            break
        found.remove()
