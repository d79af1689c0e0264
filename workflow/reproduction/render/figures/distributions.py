"""Figures of kind `distribution`: every seed's number, with median, quartiles and range (SpinQuant Figure 4)."""

import math
from pathlib import Path
from typing import Any

from reproduction.frame.values import Number, Values, main_quantities
from reproduction.render.figures.panels import entry, legend, name_rows, note, panels, room_for
from reproduction.render.figures.style import NEUTRAL, OURS, OURS_MARK, PUBLISHED, PUBLISHED_MARK, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title
from reproduction.words.numbers import words

#: Half the height over which a row's seeds are spread, so that equal numbers stay apart.
_SPREAD = 0.2

_SEED: dict[str, Any] = {"color": OURS, "alpha": 0.55, **OURS_MARK, "markersize": 3}
_MEDIAN: dict[str, Any] = {"color": OURS, "linewidth": 1.6}
_BOX: dict[str, Any] = {"color": NEUTRAL, "linewidth": 0.8}
_TEXT: dict[str, Any] = {"color": NEUTRAL, "ha": "center"}


def distribution(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a panel per column and main quantity. Ours and the paper's numbers have axes of their own.

    The models differ, so only the order of the rows and the width of each can be compared, not the numbers.
    """
    rows, mains, papers = drawn_rows(table), main_quantities(project, table), values.published
    said = table.figure.printed if table.figure else {}
    lines = [(column, ours) for column in project.columns(table) for ours in ((True, False) if papers else (True,))]
    names, height = room_for(rows, 3.0)
    panel = (2.8, 0.7 + height)
    with panels(path, len(lines), len(mains), panel, names=names, least=1.9) as (figure, grid):
        for axes, (column, ours) in zip(grid, lines, strict=True):
            for axis, quantity in zip(axes, mains, strict=True):
                for place, row in enumerate(rows):
                    if ours:
                        _seeds(axis, place, values[row, column, quantity.name], quantity)
                    else:
                        number = papers.get((row, column, quantity.name))
                        _published(axis, place, number, said.get(row, "") if quantity == mains[0] else "")
                name_rows(axis, rows, room=0.8)
                axis.margins(x=0.12)
                unit = f" in {quantity.unit}" if quantity.unit else ""
                low, high = axis.get_xlim()
                spans = f"this axis spans {high - low:.2g}{_unit(quantity)}" if papers else ""
                parts = [f"{words(quantity)}{unit}", *(() if ours else ("published",))]
                axis.set_xlabel(", ".join(parts) + (f"\n{spans}" if spans else ""))
            axes[0].set_title(panel_title(project, table, column) if ours else f"{column}, published", loc="left")
        entries = [
            entry("one seed", **_SEED),
            entry("median", **_MEDIAN),
            entry("quartiles, range", **_BOX),
            *([entry("published mean ± deviation", PUBLISHED, **PUBLISHED_MARK)] if papers else []),
        ]
        legend(figure, entries)


def _unit(quantity: Quantity) -> str:
    return " points" if quantity.unit == "%" else ""


def _seeds(axis: Any, place: int, value: Number, quantity: Quantity) -> None:
    """Draw one row: a box from quartile to quartile with the median, lines to the extremes, a dot for each seed."""
    finite = [number for number in value.values if math.isfinite(number)]
    broken = f"{len(value.values) - len(finite)} of {len(value.values)} seeds not finite"
    if not finite:
        note(axis, broken, (0.5, place), (0, -2), xycoords=("axes fraction", "data"), **_TEXT)
        return
    axis.boxplot(
        finite,
        positions=[place],
        orientation="horizontal",
        widths=0.5,
        whis=(0, 100),
        showcaps=False,
        boxprops=_BOX,
        whiskerprops=_BOX,
        medianprops=_MEDIAN,
        manage_ticks=False,
    )
    heights = [place - _SPREAD + 2 * _SPREAD * ((index * 0.618) % 1) for index in range(len(finite))]
    axis.plot(finite, heights, linestyle="", **_SEED)
    spread = max(finite) - min(finite)
    apart = f"{spread:.2g}{_unit(quantity)} apart{f', {broken}' if len(finite) < len(value.values) else ''}"
    note(axis, apart, ((min(finite) + max(finite)) / 2, place), (0, 12), **_TEXT)


def _published(axis: Any, place: int, number: Number | None, text: str) -> None:
    """Draw one row: the paper's mean and deviation, and its statement of the range."""
    if number is not None:
        look = {"color": PUBLISHED, "elinewidth": 1, "capsize": 2, **PUBLISHED_MARK}
        axis.errorbar(number.mean, place, xerr=number.deviation, **look)
        note(axis, text, (number.mean, place), (0, 8), **_TEXT)
