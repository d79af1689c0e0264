"""Figures of tables, drawn from a table's CSV in the project's one style."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reproduction.frame.values import Values, main_quantities
from reproduction.render.figures import (
    accuracies,
    distributions,
    heatmaps,
    kurtosis,
    layers,
    learning,
    lines,
    ranges,
    scaling,
    tokens,
)
from reproduction.render.figures.axes import PercentAxis
from reproduction.render.figures.changes import Change, change_between
from reproduction.render.figures.panels import (
    GUTTER,
    LINE,
    beyond,
    broken,
    entry,
    legend,
    name_rows,
    panels,
    room_for,
    say,
)
from reproduction.render.figures.style import (
    LINK,
    NEUTRAL,
    OURS,
    OURS_MARK,
    PUBLISHED,
    PUBLISHED_MARK,
)
from reproduction.run.results import FIGURES
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title
from reproduction.words.numbers import loss_words


def figure_path(name: str, form: str = "svg") -> Path:
    """Path of a table's figure, as SVG or PDF."""
    return FIGURES / f"{name}.{form}"


def draw(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw the figure that the table requests, as SVG or PDF by the path's suffix.

    In place of one that needs a cell that is not possible here stands a sentence.

    Raises:
        ResultError: one of its run files is missing or damaged.
    """
    assert table.figure is not None
    try:
        KINDS[table.figure.kind](project, table, values, path)
    except KeyError as error:
        place, impossible = error.args[0], project.expanded(table.id).impossible
        if not isinstance(place, tuple) or place[:2] not in impossible:
            raise
        say(f"No figure without {', '.join(place)}: {impossible[place[:2]]}", path)


def relative_increase(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw the loss against one row, row by row: a panel per column and main quantity."""
    assert table.figure is not None
    lines = _panel_lines(project, table)
    over = table.figure.over or table.baseline
    rows = list(table.figure.rows or [row.name for row in table.rows if row.name != over])
    names, height = room_for(rows)
    drawn: list[Change] = []
    lost_of = {quantity: _losses(values, rows, over, lines, quantity) for line in lines for quantity, _ in line}
    broken_label = LINE * any(scale.words for _, scale in lost_of.values())  # below narrow panels it takes two lines
    panel = (1.9, 0.82 + broken_label + height)
    with panels(path, len(lines), len(lines[0]), panel, names=names, least=GUTTER + 0.8) as (figure, grid):
        for line, axes in zip(lines, grid, strict=True):
            for axis, (quantity, column) in zip(axes, line, strict=True):
                lost, scale = lost_of[quantity]
                found = [lost[row, column] for row in rows]
                _dots(axis, found, scale)
                drawn += found
                scale.apply(axis, "x")
                name_rows(axis, rows)
                axis.axvline(0, color=NEUTRAL, linewidth=0.8)
                axis.set_xlabel(f"{loss_words(quantity)}{scale.words}")
                if line is lines[0] or broken(axis, axes):
                    axis.set_title(panel_title(project, table, column))
        figure.supxlabel(f"relative to {over}")
        entries = [entry("computed here", OURS, **OURS_MARK)]
        if any(change.papers is not None for change in drawn):
            entries.append(entry("published", PUBLISHED, **PUBLISHED_MARK))
        if any(scale.any_beyond for _, scale in lost_of.values()):
            entries.append(beyond())
        legend(figure, entries)


Lines = list[list[tuple[Quantity, str]]]
"""Lines of panels, each of a quantity and a column."""


def _panel_lines(project: Project, table: RunTable) -> Lines:
    """Panels as (quantity, column): a line for each quantity, or one for all where their columns differ."""
    mains, columns = main_quantities(project, table), project.columns(table)
    places = {(quantity.name, cell.column) for cell in project.cells(table.id) for quantity in cell.quantities}
    blocks = [[(main, column) for column in columns if (main.name, column) in places] for main in mains]
    complete = all(len(block) == len(columns) for block in blocks)
    return blocks if complete else [[panel for block in blocks for panel in block]]


def _losses(
    values: Values, rows: Sequence[str], over: str, lines: Lines, quantity: Quantity
) -> tuple[dict[tuple[str, str], Change], PercentAxis]:
    """Losses of the rows in a quantity, by row and column, and the axis shared by all its panels."""
    columns = [column for line in lines for one, column in line if one == quantity]
    lost = {
        (row, column): change_between(values, (row, column), (over, column), quantity)
        for row in rows
        for column in columns
    }
    return lost, PercentAxis(lost.values())


KINDS: dict[str, Callable[[Project, RunTable, Values, Path], None]] = {
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
    "loss_curves": learning.loss_curves,
    "weight_kurtosis": kurtosis.weight_kurtosis,
    "hadamard_kurtosis": kurtosis.hadamard_kurtosis,
}


def _dots(axis: Any, losses: Sequence[Change], scale: PercentAxis) -> None:
    """Draw a panel's rows: the paper's numbers, ours with their deviations, and a line between the two of a row."""
    ours = {place: loss.ours for place, loss in enumerate(losses) if loss.ours is not None}
    papers = {place: loss.papers for place, loss in enumerate(losses) if loss.papers is not None}
    near = [{place: number for place, number in one.items() if not scale.beyond(number)} for one in (ours, papers)]
    both = sorted(near[0].keys() & near[1].keys())
    axis.hlines(both, [ours[row] for row in both], [papers[row] for row in both], color=LINK, linewidth=0.6)
    axis.plot(list(near[1].values()), list(near[1]), **_PAPERS)
    bars = [losses[place].spread for place in near[0]]
    axis.errorbar(list(near[0].values()), list(near[0]), xerr=bars, elinewidth=1, **_OURS)
    scale.mark(axis, "x", papers.items(), PUBLISHED, "white")
    scale.mark(axis, "x", ours.items(), OURS, OURS)


_OURS: dict[str, Any] = {"linestyle": "", "color": OURS, **OURS_MARK}
_PAPERS: dict[str, Any] = {"linestyle": "", "color": PUBLISHED, **PUBLISHED_MARK}
