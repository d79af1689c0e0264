"""Figures of speed: bars of speedups, ours filled and the paper's hollow beside them."""

import math
from pathlib import Path
from typing import Any

from rotquant.reporting.figures.style import NEUTRAL, OURS, PUBLISHED, save_svg, styled
from rotquant.reporting.speed.numbers import Numbers, read_numbers, short_gpu, shown_ratio
from rotquant.reporting.speed.roofline import roofline
from rotquant.study.project import Project
from rotquant.study.speed.definitions import Part, SpeedTable, matches, rows


def draw(project: Project, table: SpeedTable, path: Path) -> None:
    """Draw a table's figure.

    Raises:
        ResultError: a record that it draws is damaged.
    """
    assert table.drawing is not None
    {"bars": bars, "roofline": roofline}[table.drawing.kind](project, table, path)


def bars(project: Project, table: SpeedTable, path: Path) -> None:
    """A panel per part; a pair of bars per row: ours filled, the paper's hollow beside it."""
    assert table.drawing is not None
    parts = table.drawing.parts
    measured = {part.table: read_numbers(project, project.speed_table(part.table)) for part in parts}
    across = len(parts) if len(parts) <= 3 else 2
    down = -(-len(parts) // across)
    with styled() as plt:
        size = (1.6 + 2.8 * across, 0.5 + 2.3 * down)
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for axis, part in zip(grid.flat, parts, strict=True):
            _panel(axis, project.speed_table(part.table), part, measured[part.table].numbers)
        gpus = [short_gpu(source.record.gpu) for source, _ in measured.values() if source is not None]
        ours = f"ours, {gpus[0]}" if gpus else "ours (not measured yet)"
        handles = [plt.Rectangle((0, 0), 1, 1, color=OURS, label=ours)]
        for gpu in table.gpus:
            look = {"facecolor": "white", "edgecolor": PUBLISHED}
            handles.append(plt.Rectangle((0, 0), 1, 1, **look, label=f"published, {short_gpu(gpu)}"))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        save_svg(figure, path)


def _panel(axis: Any, table: SpeedTable, part: Part, numbers: Numbers) -> None:
    """One panel of bars."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    for place, row in enumerate(chosen):
        number = numbers[grid.name, row.name, part.column]
        if number.ratio is not None and not math.isfinite(number.ratio):
            axis.annotate(
                "not finite", (place - 0.2, 0), rotation=90, ha="center", va="bottom", fontsize=6.5, color=OURS
            )
        elif number.ratio is not None:
            ratio = shown_ratio(grid, number.ratio)
            bar = (number.ratio_spread or 0.0) * ratio
            axis.bar(place - 0.2, ratio, 0.38, color=OURS, yerr=bar, ecolor=NEUTRAL)
            _label(axis, place - 0.2, ratio, ratio + bar)
        for paper in number.papers[:1]:
            if paper.ratio is not None:
                ratio = shown_ratio(grid, paper.ratio)
                axis.bar(place + 0.2, ratio, 0.38, facecolor="white", edgecolor=PUBLISHED, linewidth=1)
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
    """A bar's number, above its error bar."""
    where = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
    axis.annotate(f"{ratio:.2f}", (middle, top), **where)
