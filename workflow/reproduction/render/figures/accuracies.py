"""Figures of kind `tasks`: accuracy by task, the baseline next to the methods, with the level of chance.

The shipped suite's tasks are not the paper's: ours fill the upper panels and the paper's the lower ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.frame.values import Number, Place, Values, printed_accuracies
from reproduction.render.figures.panels import entry, leftmost, legend, name_rows, panels, room_for
from reproduction.render.figures.style import LINK, NEUTRAL, OURS_MARK, PUBLISHED_MARK, SERIES, SMALL, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title
from reproduction.words.numbers import show


@dataclass(frozen=True)
class Accuracies:
    """A line of panels: the tasks, and accuracies in percent."""

    title: str
    tasks: tuple[Quantity, ...]
    numbers: Mapping[Place, Number]
    mark: dict[str, Any]


def tasks(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw one panel per column, ours above the paper's; colours distinguish rows, the baseline is grey."""
    columns, blocks = project.columns(table), _blocks(project, table, values)
    titles = [[task.title for task in block.tasks] for block in blocks]
    names = 0.2 + max(room_for(found)[0] for found in titles)
    heights = [0.6 + room_for(found)[1] for found in titles]
    panel = (1.9, sum(heights) / len(heights))
    with panels(path, len(blocks), len(columns), panel, names=names, least=1.0, heights=heights) as (figure, grid):
        for block, names, axes in zip(blocks, titles, grid, strict=True):
            for axis, column in zip(axes, columns, strict=True):
                _panel(axis, table, block, column)
                name_rows(axis, names)
                axis.set_title(panel_title(project, table, column))
                axis.set_ylabel(block.title if leftmost(axis) else "")
        figure.supxlabel("accuracy in percent")
        entries = [entry(row, color, **OURS_MARK) for row, color in _colors(table).items()]
        chance = any(task.chance is not None for block in blocks for task in block.tasks)
        legend(figure, [*entries, *([entry("chance", "black", marker="|", markersize=8)] if chance else [])])


def _blocks(project: Project, table: RunTable, values: Values) -> list[Accuracies]:
    """Our accuracies, and the paper's where it prints any."""
    measured = tuple(quantity for quantity in project.quantities(table) if quantity.unit == "%")
    blocks = [Accuracies("computed here", measured, values.ours, OURS_MARK)]
    if printed := printed_accuracies(values):
        blocks.append(Accuracies("published", printed, values.published, PUBLISHED_MARK))
    return blocks


def _panel(axis: Any, table: RunTable, block: Accuracies, column: str) -> None:
    """Draw a column's tasks from top to bottom; non-finite values are named at the left end, where guesses are."""
    for place, task in enumerate(block.tasks):
        numbers = {row: block.numbers.get((row, column, task.name)) for row in _colors(table)}
        known = {row: number for row, number in numbers.items() if number is not None}
        means = [number.mean for number in known.values() if math.isfinite(number.mean)]
        if means:
            axis.plot([min(means), max(means)], [place, place], color=LINK, linewidth=0.6)
        broken = 0
        for row, number in known.items():
            color = _colors(table)[row]
            if math.isfinite(number.mean):
                axis.errorbar(number.mean, place, xerr=number.deviation, color=color, elinewidth=1, **block.mark)
            else:
                axis.text(1 + 25 * broken, place, show(number.mean), color=color, fontsize=SMALL, va="center")
                broken += 1
        if task.chance is not None:
            axis.plot(task.chance, place, "|", color="black", markersize=9)
    axis.set(xlim=(0, 100))


def _colors(table: RunTable) -> dict[str, str]:
    others = [row for row in drawn_rows(table) if row != table.baseline]
    return {table.baseline: NEUTRAL} | {row: SERIES[index % len(SERIES)] for index, row in enumerate(others)}
