"""Figures that go with the tables, drawn from a table's CSV in the project's one style."""

import math
from collections.abc import Callable
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
    ranges,
    tokens,
)
from rotquant.reporting.figures.axes import PercentAxis, change_label
from rotquant.reporting.figures.changes import Change, change_between
from rotquant.reporting.figures.panels import entry, legend, name_rows, note, panels
from rotquant.reporting.figures.style import NEUTRAL, OURS, OURS_MARK, PUBLISHED, PUBLISHED_MARK
from rotquant.reporting.words.describe import panel_title
from rotquant.reporting.words.numbers import loss_words
from rotquant.study.project import Project
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
    """Loss on one row, row by row: a panel per column and main quantity; ours filled, published hollow."""
    assert table.figure is not None
    columns, mains = project.columns(table), main_quantities(project, table)
    over = table.figure.over or table.baseline
    rows = list(table.figure.rows or [row.name for row in table.computed_rows if row.name != over])
    width = min(len(columns), BESIDE)
    height = math.ceil(len(columns) / width)
    size = (1.4 + min(2.2 * width, 7.2), (1.1 + 0.3 * len(rows)) * height * len(mains))
    with panels(path, height * len(mains), width, size) as (figure, grid):
        for quantity, axes in zip(mains, grid.reshape(len(mains), -1), strict=True):
            lost = {
                (row, column): change_between(values, (row, column), (over, column), quantity)
                for row in rows
                for column in columns
            }
            scale = PercentAxis(lost.values())
            for index, (axis, column) in enumerate(zip(axes, columns, strict=False)):
                for place, row in enumerate(rows):
                    _dots(axis, place, lost[row, column], scale)
                scale.apply(axis, "x")
                name_rows(axis, rows, shown=index % width == 0)
                axis.axvline(0, color=NEUTRAL, linewidth=0.8)
                axis.set_xlabel(f"{loss_words(quantity)}\nrelative to {over}")
                if quantity is mains[0] or height > 1:
                    axis.set_title(panel_title(project, table, column))
            for axis in axes[len(columns) :]:
                axis.remove()
        entries = [entry("computed here", OURS, **OURS_MARK)]
        if any(place[0] in rows and place[0] != over and place in values.published for place in values):
            entries.append(entry("published", PUBLISHED, **PUBLISHED_MARK))
        legend(figure, entries, "right", columns=2)


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
