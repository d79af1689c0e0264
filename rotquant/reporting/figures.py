"""Figures that go with the tables, drawn from a table's CSV in the project's one style."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rotquant.project import Project
from rotquant.quantities import Quantity
from rotquant.reporting import accuracies, heatmaps, lines
from rotquant.reporting.describe import panel_title
from rotquant.reporting.numbers import loss_words, show
from rotquant.reporting.style import NEUTRAL, OURS, OURS_MARK, PUBLISHED, PUBLISHED_MARK, PercentAxis, save_svg, styled
from rotquant.reporting.tables import Values, losses, main_quantities, percent_of
from rotquant.results import FIGURES
from rotquant.tables import Table


def figure_path(name: str) -> Path:
    """The figure of a table."""
    return FIGURES / f"{name}.svg"


def draw(project: Project, table: Table, values: Values, path: Path) -> None:
    """Draw the figure that the table asks for."""
    assert table.figure is not None
    KINDS[table.figure.kind](project, table, values, path)


def relative_increase(project: Project, table: Table, values: Values, path: Path) -> None:
    """Loss on the baseline row by row: a panel per column and main quantity; ours filled, published hollow."""
    columns, mains = project.columns(table), main_quantities(project, table)
    rows = [row.name for row in table.rows if row.name != table.baseline]
    with styled() as plt:
        size = (1.4 + min(2.2 * len(columns), 7.2), (1.1 + 0.3 * len(rows)) * len(mains))
        figure, grid = plt.subplots(len(mains), len(columns), figsize=size, squeeze=False, layout="constrained")
        for line, (quantity, axes) in enumerate(zip(mains, grid, strict=True)):
            lost = {
                (row, column): losses(values, table.baseline, row, column, quantity)
                for row in rows
                for column in columns
            }
            scale = PercentAxis(loss for pair in lost.values() for loss in pair)
            for axis, column in zip(axes, columns, strict=True):
                for place, row in enumerate(rows):
                    spread = _spread(values, table.baseline, row, column, quantity)
                    _dots(axis, place, *lost[row, column], spread, scale)
                scale.apply(axis, "x")
                axis.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)))
                axis.set_yticklabels(rows if axis is axes[0] else [])
                axis.tick_params(axis="y", length=0)
                axis.axvline(0, color=NEUTRAL, linewidth=0.8)
                axis.set_xlabel(f"{loss_words(quantity)}\nrelative to {table.baseline}")
                axis.set_title("" if line else panel_title(project, table, column))
        handles = [plt.Line2D([], [], linestyle="", color=OURS, **OURS_MARK, label="computed here")]
        if any(value.published is not None for value in values.values()):
            handles.append(plt.Line2D([], [], linestyle="", color=PUBLISHED, **PUBLISHED_MARK, label="published"))
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
        save_svg(figure, path)


KINDS: dict[str, Callable[[Project, Table, Values, Path], None]] = {
    "relative_increase": relative_increase,
    "lines": lines.lines,
    "tasks": accuracies.tasks,
    "magnitudes": heatmaps.magnitudes,
}


def _dots(
    axis: Any, place: int, ours: float | None, papers: float | None, spread: float | None, scale: PercentAxis
) -> None:
    """One row of a panel: the paper's number, ours with its deviation, and a line between them."""
    if ours is not None and papers is not None:
        axis.plot([scale.place(ours), scale.place(papers)], [place, place], color=NEUTRAL, linewidth=0.6, alpha=0.6)
    if papers is not None:
        axis.plot(scale.place(papers), place, color=PUBLISHED, **PUBLISHED_MARK)
    if ours is not None:
        axis.errorbar(scale.place(ours), place, xerr=spread, color=OURS, elinewidth=1, **OURS_MARK)
    for change, color in ((ours, OURS), (papers, PUBLISHED)):
        if change is not None and not math.isfinite(change):
            where = {"xytext": (-8, -2.5), "textcoords": "offset points", "ha": "right"}
            axis.annotate(show(change), (scale.place(change), place), color=color, **where)


def _spread(values: Values, baseline: str, row: str, column: str, quantity: Quantity) -> float | None:
    """Deviation of a row over the seeds in percent of the baseline; None where there is none to draw."""
    deviation = values[row, column, quantity.name].deviation
    if deviation is None or not math.isfinite(deviation):
        return None
    return percent_of(deviation, values[baseline, column, quantity.name].mean)
