"""Figures of kind `outliers`: kurtosis and quantization errors by layer, before and after rotation.

SpinQuant Figure 3, drawn from the arrays of the run files of metric `outliers`.
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.frame.values import Values
from reproduction.render.figures.arrays import array_of
from reproduction.render.figures.panels import entry, legend, note, panels
from reproduction.render.figures.style import DASHED, NEUTRAL, SERIES, SMALL, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable

#: The panels: an array, its title, and for kurtosis the value of a normal distribution.
PANELS = (
    ("kurtosis", "kurtosis of the input", 3.0),
    ("activation_error", "error of the input in %", None),
    ("weight_error", "error of the weight in %", None),
)

#: Marks of each input, and of the projections that read it.
_MARKS = {"attention_input": "o", "mlp_input": "s", "query": "o", "key": "o", "value": "o", "gate": "s", "up": "s"}
_LEGEND = {"o": "Q, K, V projection", "s": "gate, up projection"}


def outliers(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a line of panels per column: kurtosis, error of activations, error of weights; colours distinguish rows.

    A line goes through the means of each layer.

    Raises:
        ResultError: a run file is missing or has no statistics by layer.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    rows, columns = drawn_rows(table), project.columns(table)
    with panels(path, len(columns), len(PANELS), (2.2, 2.2)) as (figure, grid):
        for axes, column in zip(grid, columns, strict=True):
            for axis, (name, title, normal) in zip(axes, PANELS, strict=True):
                lists = [array_of(project, values[row, column, "kurtosis"].runs[0], name) for row in rows]
                for found, color in zip(lists, SERIES, strict=False):
                    _series(axis, found, color)
                _name_broken(axis, [float(value) for found in lists for places in found.values() for value in places])
                if normal is not None:
                    axis.axhline(normal, color=NEUTRAL, linewidth=0.8, linestyle=DASHED)
                    axis.set_yscale("log")
                    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
                    axis.yaxis.set_minor_formatter(NullFormatter())
                    note(axis, "normal: 3", (1, normal), (0, 2), color=NEUTRAL)
                else:
                    axis.set_ylim(bottom=0)
                axis.set(xlabel="layer", ylabel=title, title=column if len(columns) > 1 else "")
        entries = [entry(row, color) for row, color in zip(rows, SERIES, strict=False)]
        legend(figure, entries + [entry(text, NEUTRAL, marker=mark, markersize=4) for mark, text in _LEGEND.items()])


def _series(axis: Any, lists: dict[str, list[float]], color: str) -> None:
    """Draw one row of a panel: a point per layer and input or projection, their means joined."""
    numbers = pd.DataFrame(lists).astype(float)
    for name, found in numbers.items():
        axis.plot(
            1 + found.index, found, linestyle="", marker=_MARKS[str(name)], markersize=3.5, color=color, alpha=0.75
        )
    axis.plot(1 + numbers.index, numbers.mean(axis=1, skipna=False), color=color, linewidth=1.1)


def _name_broken(axis: Any, numbers: list[float]) -> None:
    """Write in a panel's corner how many of its numbers have no place in it."""
    count = sum(not math.isfinite(number) for number in numbers)
    if count:
        text = f"{count} of {len(numbers)} not finite"
        axis.annotate(text, (1, 1), xycoords="axes fraction", color=NEUTRAL, fontsize=SMALL, ha="right", va="top")
