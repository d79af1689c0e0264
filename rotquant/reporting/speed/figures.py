"""Figures of speed: bars of speedups, ours filled and the paper's hollow beside them."""

from pathlib import Path
from typing import Any

from rotquant.project import Project
from rotquant.reporting.speed.numbers import Numbers, collect, find_source, shown_ratio
from rotquant.reporting.speed.roofline import roofline
from rotquant.reporting.style import NEUTRAL, OURS, PUBLISHED, save_svg, styled
from rotquant.speed.definitions import Part, Row, SpeedTable, matches, rows


def draw(project: Project, table: SpeedTable, path: Path) -> None:
    """Draw a table's figure.

    Raises:
        ResultError: a record that it draws is damaged.
    """
    assert table.drawing is not None
    {"bars": bars, "roofline": roofline}[table.drawing.kind](project, table, path)


def bars(project: Project, table: SpeedTable, path: Path) -> None:
    """A panel per part; a group of bars per row: ours filled, the paper's hollow beside it, one pair per column."""
    assert table.drawing is not None
    parts = table.drawing.parts
    gpus, found = [], {}
    for part in parts:
        origin = project.speed_table(part.table)
        source = find_source(project, origin)
        gpus += [source.record.gpu] if source is not None else []
        found[part.title] = _bars_of(origin, part, collect(project, origin, source))
    across = min(2, len(parts))
    down = -(-len(parts) // across)
    with styled() as plt:
        size = (7.2 if across > 1 else 5.6, 0.5 + 2.3 * down)
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for axis, part in zip(grid.flat, parts, strict=True):
            _panel(axis, part, project.speed_table(part.table), found[part.title])
        ours = f"ours, {gpus[0].removeprefix('NVIDIA ')}" if gpus else "ours (not measured yet)"
        handles = [plt.Rectangle((0, 0), 1, 1, color=OURS, label=ours)]
        handles += [
            plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=PUBLISHED, label=f"published, {_short(gpu)}")
            for gpu in table.gpus
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        save_svg(figure, path)


Bars = list[tuple[Row, list[tuple[str, float | None, float, float | None]]]]
"""By row, for each column: its name, our ratio, its spread and the paper's ratio."""


def _bars_of(table: SpeedTable, part: Part, numbers: Numbers) -> Bars:
    grid = table.grid(part.grid)
    found: Bars = []
    for row in rows(grid):
        if matches(row.name, *part.rows):
            several = []
            for name in part.columns:
                number = numbers[grid.name, row.name, name]
                ours = None if number.ratio is None else shown_ratio(grid, number.ratio)
                papers = number.papers[0].ratio if number.papers else None
                several.append((name, ours, (number.ratio_spread or 0.0) * (ours or 0.0), papers))
            found.append((row, several))
    return found


def _panel(axis: Any, part: Part, table: SpeedTable, found: Bars) -> None:
    """One panel of bars."""
    grid = table.grid(part.grid)
    count = len(part.columns)
    width = 0.8 / (2 * count)
    for place, (_, several) in enumerate(found):
        for index, (_, ours, spread, papers) in enumerate(several):
            left = place - 0.4 + 2 * index * width
            if ours is not None:
                axis.bar(left, ours, width, align="edge", color=OURS, yerr=spread or None, ecolor=NEUTRAL)
                _label(axis, left + width / 2, ours)
            if papers is not None:
                axis.bar(left + width, papers, width, align="edge", facecolor="white", edgecolor=PUBLISHED, linewidth=1)
                _label(axis, left + 1.5 * width, papers)
    axis.axhline(1, color=NEUTRAL, linewidth=0.8)
    axis.set(xticks=range(len(found)), title=part.title)
    varying = [index for index in range(len(grid.axes)) if len({row.labels[index] for row, _ in found}) > 1] or [0]
    labels = ["\n".join(row.labels[index] for index in varying) for row, _ in found]
    if count > 1:
        names = "\n".join(f"{index + 1}: {name}" for index, name in enumerate(part.columns))
        axis.annotate(f"pairs from left:\n{names}", (0.01, 0.98), xycoords="axes fraction", va="top", fontsize=7)
        axis.margins(y=0.28)
    axis.set_xticklabels(labels)
    axis.set_xlabel(", ".join(grid.axes[index].name.lower() for index in varying))
    axis.set_ylabel(f"{grid.ratio} over {grid.baseline}")
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)


def _label(axis: Any, middle: float, height: float) -> None:
    where = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
    axis.annotate(f"{height:.2f}", (middle, height), **where)


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ")
