"""The roofline of all kernels: their distance from the limits of the GPU's memory and arithmetic.

Operations per second over operations per byte (Williams et al. 2009), each number format below its own measured roof.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from reproduction.frame.speed import read_numbers
from reproduction.render.figures.panels import Sheet, legend, panels
from reproduction.render.figures.style import NEUTRAL, OURS, PUBLISHED, SERIES
from reproduction.render.speed.limits import Point, ceilings, points
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedTable

_MARKS = ("o", "s", "^", "D", "v", "P", "X")
#: Names of grids in the figure.
_SHORT = {
    "Hadamard transform": "transform",
    "Hadamard transform and quantization": "with quantization",
    "Quantization without a transform": "quantization",
}
#: Columns from others.
_OTHERS = ("FP16", "BF16", "FP8", "INT8", "SDPA FP16", "Eager PyTorch", "fast-hadamard-transform", "hadacore")


def roofline(project: Project, table: SpeedTable, sheet: Sheet) -> None:
    """Draw kernels that multiply below their roof; on the left those that only move bytes, against a copy."""
    numbers = read_numbers(project, table).numbers
    known, found = ceilings(table, numbers), points(numbers)
    multiplying = [point for point in found if point.operations and point.arithmetic in known]
    moving = [point for point in found if not point.operations]
    with panels(sheet, 1, 2, (3.4, 3.6), least=2.9) as (figure, ((left, right),)):
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
        color = PUBLISHED if name.endswith(_OTHERS) else OURS
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
        ours = point.place[2] not in _OTHERS
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
