"""Figures of speed: bars of speedups, ours filled and the paper's hollow next to them, and the roofline of all kernels.

The roofline shows operations per second over operations per byte (Williams et al. 2009), each number format below its
own measured roof.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.frame.limits import Point, ceilings, points
from reproduction.frame.speed import SpeedNumbers, read_numbers, short_gpu, shown_ratio
from reproduction.render.figures.panels import legend, note, panels
from reproduction.render.figures.style import NEUTRAL, OURS, PUBLISHED, SERIES, SMALL
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import DrawnPart, SpeedTable, matches, rows

#: The paper's bars are hollow.
_PUBLISHED: dict[str, Any] = {"facecolor": "white", "edgecolor": PUBLISHED}
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
#: Names of grids in the figure.
_SHORT = {
    "Hadamard transform": "transform",
    "Hadamard transform and quantization": "with quantization",
    "Hadamard transform to floats of low bits": "with quantization",
    "RMSNorm, Hadamard transform and quantization": "with norm",
    "Quantization without a transform": "quantization",
}
#: What columns from others begin with: of products and attention, and of what only moves bytes.
_OTHERS = (
    *("FP16", "BF16", "FP8", "INT8", "INT4 pack", "SDPA", "flex_attention"),
    *("CUTLASS", "Marlin", "Machete", "Humming"),
)
_OTHER_TRANSFORMS = ("fast-hadamard-transform", "hadacore", "Eager PyTorch")
#: Characters of the labels below a panel of bars that fit beside each other.
_FITTING = 26


def draw(project: Project, table: SpeedTable, path: Path) -> None:
    """Draw a table's figure and return the files, with the width described in `reproduction.render.figures.draw.draw`.

    Raises:
        ResultError: a record that it draws is damaged, or the figure is higher than a paper's page.
    """
    assert table.drawing is not None
    {"bars": bars, "roofline": roofline}[table.drawing.kind](project, table, path)


def bars(project: Project, table: SpeedTable, path: Path) -> None:
    """Draw a panel per part; a pair of bars per row: ours filled, the paper's hollow next to it."""
    from matplotlib.patches import Patch

    assert table.drawing is not None
    parts = table.drawing.parts
    measured = {part.table: read_numbers(project, project.one(SpeedTable, part.table)) for part in parts}
    with panels(path, 1, len(parts), (3.1, 2.1), least=2.1) as (figure, grid):
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
    labels = ["\n".join(row.labels[place] for place in varying) for row in chosen]
    crowded = sum(max(map(len, label.split("\n"))) for label in labels) > _FITTING
    axis.set_xticklabels(labels, **({"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if crowded else {}))
    axis.set_xlabel(", ".join(grid.axes[place].name.lower() for place in varying))
    axis.margins(y=0.1)
    axis.grid(axis="x", visible=False)
    axis.tick_params(axis="x", length=0)


def _label(axis: Any, middle: float, ratio: float, top: float) -> None:
    """Write a bar's number above its error bar."""
    note(axis, f"{ratio:.2f}", (middle, top), (0, 2), ha="center")


def roofline(project: Project, table: SpeedTable, path: Path) -> None:
    """Draw kernels that multiply below their roof; on the left those that only move bytes, against a copy."""
    numbers = read_numbers(project, table).numbers
    known, found = ceilings(table, numbers), points(table, numbers)
    multiplying = [point for point in found if point.operations and point.arithmetic in known]
    moving = [point for point in found if not point.operations]
    with panels(path, 1, 2, (3.4, 3.6), least=2.9) as (figure, ((left, right),)):
        _bandwidth(left, moving, known)
        _roof(right, multiplying, known)
        legend(figure, right.get_legend_handles_labels()[0])


def _bandwidth(axis: Any, found: Sequence[Point], known: dict[str, float]) -> None:
    """Draw kernels that only move bytes, as a share of a large copy's speed, or of reading where they write little."""
    groups: dict[str, list[float]] = {}
    for point in found:
        grid, _, column = point.place
        if "copy" in known and column != "Copy":
            share = 100 * point.bytes / point.seconds / known.get(point.memory, known["copy"])
            groups.setdefault(f"{_SHORT.get(grid, grid)}: {column}", []).append(share)
    for place, (name, shares) in enumerate(groups.items()):
        color = PUBLISHED if name.endswith(_OTHER_TRANSFORMS) else OURS
        axis.plot(shares, [place] * len(shares), "o", color=color, markersize=4, alpha=0.8)
    axis.axvline(100, color=NEUTRAL, linewidth=0.8)
    axis.set(yticks=range(len(groups)), xlim=(0, 115), xlabel="bytes per second, % of copying or reading")
    axis.set_yticklabels(list(groups))
    axis.invert_yaxis()
    axis.set_title("What only moves bytes")


def _roof(axis: Any, found: Sequence[Point], known: dict[str, float]) -> None:
    """Draw kernels that multiply: ceilings as lines, a colour per number format, a mark per grid."""
    formats = [name for name in ("fp16", "fp8", "int8") if name in known]
    colors: dict[str | None, str] = {**dict(zip(formats, SERIES, strict=False)), "bf16": SERIES[0]}
    if formats and "copy" in known:
        for name in formats:
            memory = known.get("read", known["copy"])
            corner = known[name] / memory
            xs, ys = [1.0, corner, 2e4], [memory, known[name], known[name]]
            axis.plot(xs, [y / 1e12 for y in ys], color=colors[name], linewidth=1, alpha=0.7)
            axis.plot([], [], color=colors[name], label=f"{name}: {known[name] / 1e12:.0f} TOP/s")
    marks = dict(zip(dict.fromkeys(point.place[0] for point in found), itertools.cycle(_MARKS), strict=False))
    for point in found:
        ours = not point.place[2].startswith(_OTHERS)
        look = {"markerfacecolor": colors[point.arithmetic] if ours else "white", "markersize": 4.5}
        place = point.operations / point.bytes, point.operations / point.seconds / 1e12
        axis.plot(*place, marks[point.place[0]], color=colors[point.arithmetic], **look)
    for name, mark in marks.items():
        axis.plot([], [], mark, color=NEUTRAL, label=name)
    for name, text in (("full", "ours"), ("none", "others")):
        axis.plot([], [], "o", color=NEUTRAL, fillstyle=name, label=text)
    rates = [point.operations / point.seconds / 1e12 for point in found] or [1.0]
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10¹² operations per second")
    axis.set(xlim=(0.5, 2e4), ylim=(min(rates) / 2, 3e3))
    axis.set_title("What multiplies")
