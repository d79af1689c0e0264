"""Figures that go with the tables, drawn from a table's CSV in the project's one style."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rotquant.reporting.figures import (
    accuracies,
    distributions,
    heatmaps,
    kurtosis,
    layers,
    learning,
    lines,
    losses,
    ranges,
    scaling,
    tokens,
)
from rotquant.reporting.figures.axes import PercentAxis, change_label
from rotquant.reporting.figures.changes import Change, change_between
from rotquant.reporting.figures.panels import entry, legend, name_rows, note, panels
from rotquant.reporting.figures.style import NEUTRAL, OURS, OURS_MARK, PUBLISHED, PUBLISHED_MARK
from rotquant.reporting.words.describe import panel_title
from rotquant.reporting.words.numbers import loss_words
from rotquant.study.project import Project
from rotquant.study.quantities import Quantity
from rotquant.study.results import FIGURES
from rotquant.study.tables import Table
from rotquant.study.values import Values, main_quantities

#: Panels that stand beside each other; with more columns a quantity takes several lines.
BESIDE = 4


def figure_path(name: str) -> Path:
    """The figure of a table."""
    return FIGURES / f"{name}.svg"


def draw(project: Project, table: Table, values: Values, path: Path) -> None:
    """Draw the figure that the table asks for."""
    assert table.figure is not None
    KINDS[table.figure.kind](project, table, values, path)


def relative_increase(project: Project, table: Table, values: Values, path: Path) -> None:
    """Loss on one row, row by row: a panel per column and main quantity; ours filled, published hollow.

    Where each column has quantities of its own, the panels stand in one line.
    """
    assert table.figure is not None
    over = table.figure.over or table.baseline
    rows = list(table.figure.rows or [row.name for row in table.computed_rows if row.name != over])
    lines = _panel_lines(project, table)
    width = max(map(len, lines))
    titled = len({quantity.name for quantity, _ in lines[0]}) > 1 or len(lines) > len(main_quantities(project, table))
    names = max(1.4, 0.075 * max(map(len, rows)))
    size = (names + min(2.2 * width, 7.2), (1.1 + 0.3 * len(rows)) * len(lines))
    with panels(path, len(lines), width, size) as (figure, grid):
        for line, axes in zip(lines, grid, strict=True):
            for axis, (quantity, column) in zip(axes, line, strict=False):
                lost, scale = _losses(values, rows, over, lines, quantity)
                for place, row in enumerate(rows):
                    _dots(axis, place, lost[row, column], scale)
                scale.apply(axis, "x")
                name_rows(axis, rows, shown=axis is axes[0])
                axis.axvline(0, color=NEUTRAL, linewidth=0.8)
                axis.set_xlabel(f"{loss_words(quantity)}\nrelative to {over}")
                if line is lines[0] or titled:
                    axis.set_title(panel_title(project, table, column))
            for axis in axes[len(line) :]:
                axis.remove()
        entries = [entry("computed here", OURS, **OURS_MARK)]
        if any(place[0] in rows and place[0] != over and place in values.published for place in values):
            entries.append(entry("published", PUBLISHED, **PUBLISHED_MARK))
        legend(figure, entries, "right", columns=2)


def _panel_lines(project: Project, table: Table) -> list[list[tuple[Quantity, str]]]:
    """The panels as (quantity, column) line by line: each quantity's columns, or all in one where columns differ."""
    mains, columns = main_quantities(project, table), project.columns(table)
    places = {(quantity.name, cell.column) for cell in project.cells(table.id) for quantity in cell.quantities}
    blocks = [[(main, column) for column in columns if (main.name, column) in places] for main in mains]
    if any(len(block) < len(columns) for block in blocks):
        blocks = [[panel for block in blocks for panel in block]]
    return [block[start : start + BESIDE] for block in blocks for start in range(0, len(block), BESIDE)]


def _losses(
    values: Values, rows: Sequence[str], over: str, lines: list[list[tuple[Quantity, str]]], quantity: Quantity
) -> tuple[dict[tuple[str, str], Change], PercentAxis]:
    """What the rows lose in a quantity, by row and column, and the axis that all its panels share."""
    columns = [column for line in lines for one, column in line if one == quantity]
    lost = {
        (row, column): change_between(values, (row, column), (over, column), quantity)
        for row in rows
        for column in columns
    }
    return lost, PercentAxis(lost.values())


KINDS: dict[str, Callable[[Project, Table, Values, Path], None]] = {
    "relative_increase": relative_increase,
    "lines": lines.lines,
    "tasks": accuracies.tasks,
    "magnitudes": heatmaps.magnitudes,
    "outliers": layers.outliers,
    "distribution": distributions.distribution,
    "range_use": ranges.range_use,
    "learning": learning.learning,
    "token_maxima": tokens.token_maxima,
    "outlier_tokens": tokens.outlier_tokens,
    "scaling": scaling.scaling,
    "loss_curves": losses.loss_curves,
    "weight_kurtosis": kurtosis.weight_kurtosis,
    "hadamard_kurtosis": kurtosis.hadamard_kurtosis,
}


def _dots(axis: Any, place: int, loss: Change, scale: PercentAxis) -> None:
    """One row of a panel: the paper's number, ours with its deviation, and a line between them.

    What lies at the end of the axis has its number above it.
    """
    if loss.ours is not None and loss.papers is not None:
        ends = [scale.place(loss.ours), scale.place(loss.papers)]
        axis.plot(ends, [place, place], color=NEUTRAL, linewidth=0.6, alpha=0.6)
    if loss.papers is not None:
        axis.plot(scale.place(loss.papers), place, color=PUBLISHED, **PUBLISHED_MARK)
    if loss.ours is not None:
        bar = None if scale.beyond(loss.ours) else loss.spread or None
        axis.errorbar(scale.place(loss.ours), place, xerr=bar, color=OURS, elinewidth=1, **OURS_MARK)
    for number, color, side in ((loss.ours, OURS, -1), (loss.papers, PUBLISHED, 1)):
        if number is not None and scale.beyond(number):
            align = {"ha": "left" if number < 0 else "right", "va": "bottom" if side > 0 else "top"}
            where = (scale.place(number), place)
            note(axis, change_label(number), where, (0, 3 * side), fontsize=6.5, color=color, **align)
