"""Figures of speed: bars of speedups, ours filled and the paper's hollow next to them."""

import math
from pathlib import Path
from typing import Any

from reproduction.frame.speed import SpeedNumbers, read_numbers, short_gpu, shown_ratio
from reproduction.render.figures.panels import Sheet, legend, note, panels
from reproduction.render.figures.style import NEUTRAL, OURS, PUBLISHED, SMALL
from reproduction.render.speed.roofline import roofline
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import DrawnPart, SpeedTable, matches, rows

#: The paper's bars are hollow.
_PUBLISHED: dict[str, Any] = {"facecolor": "white", "edgecolor": PUBLISHED}


def draw(project: Project, table: SpeedTable, path: Path, width: str | None = None) -> list[Path]:
    """Draw a table's figure and return the files, with the width described in `reproduction.render.figures.draw.draw`.

    Raises:
        ResultError: a record that it draws is damaged, or the figure is higher than a paper's page.
    """
    assert table.drawing is not None
    sheet = Sheet(path, width)
    {"bars": bars, "roofline": roofline}[table.drawing.kind](project, table, sheet)
    return sheet.written


def bars(project: Project, table: SpeedTable, sheet: Sheet) -> None:
    """Draw a panel per part; a pair of bars per row: ours filled, the paper's hollow next to it."""
    from matplotlib.patches import Patch

    assert table.drawing is not None
    parts = table.drawing.parts
    measured = {part.table: read_numbers(project, project.one(SpeedTable, part.table)) for part in parts}
    with panels(sheet, 1, len(parts), (3.1, 2.1), least=2.1) as (figure, grid):
        for axis, part in zip(grid[0], parts, strict=True):
            _panel(axis, project.one(SpeedTable, part.table), part, measured[part.table].numbers)
        gpus = [short_gpu(source.record.gpu) for source, _ in measured.values() if source is not None]
        ours = Patch(color=OURS, label=f"ours, {gpus[0]}" if gpus else "ours (not measured yet)")
        theirs = (Patch(**_PUBLISHED, label=f"published, {short_gpu(gpu)}") for gpu in table.gpus)
        legend(figure, [ours, *theirs])


def _panel(axis: Any, table: SpeedTable, part: DrawnPart, numbers: SpeedNumbers) -> None:
    """Draw one panel of bars."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    for place, row in enumerate(chosen):
        number = numbers[grid.name, row.name, part.column]
        if number.ratio is not None and not math.isfinite(number.ratio):
            axis.text(place - 0.2, 0, "not finite", rotation=90, ha="center", va="bottom", fontsize=SMALL, color=OURS)
        elif number.ratio is not None:
            ratio = shown_ratio(grid, number.ratio)
            bar = (number.ratio_spread or 0.0) * ratio
            axis.bar(place - 0.2, ratio, 0.38, color=OURS, yerr=bar, ecolor=NEUTRAL)
            _label(axis, place - 0.2, ratio, ratio + bar)
        for paper in number.papers[:1]:
            if paper.ratio is not None:
                ratio = shown_ratio(grid, paper.ratio)
                axis.bar(place + 0.2, ratio, 0.38, **_PUBLISHED, linewidth=1)
                _label(axis, place + 0.2, ratio, ratio)
    axis.axhline(1, color=NEUTRAL, linewidth=0.8)
    varying = [place for place in range(len(grid.axes)) if len({row.labels[place] for row in chosen}) > 1] or [0]
    axis.set(xticks=range(len(chosen)), title=part.title, ylabel=f"{grid.ratio} over {grid.baseline}")
    axis.set_xticklabels(["\n".join(row.labels[place] for place in varying) for row in chosen])
    axis.set_xlabel(", ".join(grid.axes[place].name.lower() for place in varying))
    axis.margins(y=0.1)
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)


def _label(axis: Any, middle: float, ratio: float, top: float) -> None:
    """Write a bar's number above its error bar."""
    note(axis, f"{ratio:.2f}", (middle, top), (0, 2), ha="center")
