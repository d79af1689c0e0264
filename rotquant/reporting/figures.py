"""Figures that go with the tables, drawn from a table's CSV in the project's one style."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rotquant.reporting.style import NEUTRAL, OURS, PUBLISHED, save_svg, styled
from rotquant.reporting.tables import Values, increases
from rotquant.results import FIGURES
from rotquant.project import Project
from rotquant.tables import Table

#: Increases below this many percent are drawn at it: a logarithmic axis has no zero.
FLOOR = 0.3


def figure_path(name: str) -> Path:
    """The figure of a table."""
    return FIGURES / f"{name}.svg"


def draw(project: Project, table: Table, values: Values, path: Path) -> None:
    """Draw the figure that the table asks for."""
    assert table.figure is not None
    KINDS[table.figure.kind](project, table, values, path)


def relative_increase(project: Project, table: Table, values: Values, path: Path) -> None:
    """Increase over the baseline per row, one panel per column, logarithmic; ours filled, published hollow."""
    columns = project.columns(table)
    rows = [row.name for row in table.rows if row.name != table.baseline]
    rises = {(row, column): increases(values, table.baseline, (row, column)) for row in rows for column in columns}
    finite = [rise for pair in rises.values() for rise in pair if rise is not None and math.isfinite(rise)]
    right = max([10.0, *finite]) * 3
    with styled() as plt:
        size = (1.4 + 2.2 * len(columns), 0.9 + 0.3 * len(rows))
        figure, axes = plt.subplots(1, len(columns), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axis, column in zip(axes[0], columns, strict=True):
            for place, row in enumerate(rows):
                _dots(axis, place, rises[row, column], values[row, column].deviation, values, table, column, right)
            axis.set(
                xscale="log", xlim=(FLOOR * 0.8, right), ylim=(len(rows) - 0.5, -0.5), title=_title(project, column)
            )
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g} %" if x < 1e4 else f"{x:.0e} %")
            axis.tick_params(axis="y", length=0)
        axes[0][0].set_yticks(range(len(rows)), rows)
        figure.supxlabel("increase of perplexity over the unquantized model", fontsize=8.5)
        handles = [
            plt.Line2D([], [], marker="o", linestyle="", color=OURS, label="computed here"),
            plt.Line2D([], [], marker="D", linestyle="", color=PUBLISHED, markerfacecolor="white", label="published"),
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
        save_svg(figure, path)


KINDS: dict[str, Callable[[Project, Table, Values, Path], None]] = {"relative_increase": relative_increase}


def _dots(
    axis: Any,
    place: int,
    rises: tuple[float | None, float | None],
    deviation: float | None,
    values: Values,
    table: Table,
    column: str,
    right: float,
) -> None:
    ours, papers = (None if rise is None else _clamped(rise, right) for rise in rises)
    if ours is not None and papers is not None:
        axis.plot([ours, papers], [place, place], color=NEUTRAL, linewidth=0.6, alpha=0.6, zorder=1)
    if papers is not None:
        axis.plot(papers, place, "D", color=PUBLISHED, markerfacecolor="white", markersize=4.5, zorder=2)
    if ours is not None:
        spread = (
            100.0 * deviation / values[table.baseline, column].mean if deviation and math.isfinite(deviation) else None
        )
        bar = None if spread is None else [[min(spread, ours - FLOOR * 0.8)], [spread]]
        axis.errorbar(ours, place, xerr=bar, fmt="o", color=OURS, markersize=5, elinewidth=1, zorder=3)
        if rises[0] is not None and not math.isfinite(rises[0]):
            axis.annotate(
                str(rises[0]), (ours, place), textcoords="offset points", xytext=(-8, -2.5), ha="right", color=OURS
            )


def _title(project: Project, column: str) -> str:
    """A column's name, and below it the checkpoint that stands for it."""
    checkpoint = project.config.slot(column).checkpoint.rstrip("/").split("/")[-1]
    return f"{column}\n(here: {checkpoint})"


def _clamped(rise: float, right: float) -> float:
    """The place of an increase on the axis: not finite at its right end, tiny or negative at its left."""
    return right * 0.8 if not math.isfinite(rise) else max(rise, FLOOR)
