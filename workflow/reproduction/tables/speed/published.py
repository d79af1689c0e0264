"""The papers' printed numbers for the cells of a speed table, on their GPUs; never our numbers."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reproduction.reading.written import read_csv
from reproduction.tables.speed.definitions import PrintedAt, SpeedColumn, SpeedGrid, SpeedRow, SpeedTable, rows
from rotquant.foundation.errors import ConfigError

#: Factors from printed units to SI. QuaRot's Table 17 says GB and counts 2^30 bytes: 0.392 GB with all weights is less
#: than the 0.405 * 10^9 bytes of the weights alone. RCP's Table 6 says GB too and counts 10^9: 13.48 are the 6.74e9
#: weights of Llama-2-7B in 16 bits.
UNITS = {"ms": 1e-3, "ms/token": 1e-3, "min": 60.0, "h": 3600.0, "GB": 2.0**30, "10^9 B": 1e9, "x": 1.0}


@dataclass(frozen=True)
class Reference:
    """The paper's printed numbers for a cell on one GPU.

    value: in SI units; ratio: the baseline's number by this one, as printed or from two printed numbers. Either may be
    missing. text: the number as printed, or a word such as OOM; unit: the factor from it to SI.
    """

    gpu: str
    value: float | None
    ratio: float | None
    text: str
    unit: float


References = Mapping[tuple[str, str, str], tuple[Reference, ...]]
"""References by (grid, row, column), GPU by GPU."""


@dataclass(frozen=True)
class PrintedText:
    """A printed cell and its unit."""

    text: str
    unit: str

    @property
    def value(self) -> float | None:
        """The number in SI units; None for a word."""
        try:
            return float(self.text) * UNITS[self.unit]
        except ValueError:
            return None


Printout = Mapping[tuple[str, str, str, str | None], PrintedText]
"""Printed cells by (row, column, metric, GPU); the GPU is None where the paper has one for all."""


def references(table: SpeedTable, root: Path) -> References:
    """The paper's printed numbers for each cell, GPU by GPU; nothing for cells that it does not have.

    Raises:
        ConfigError: a published file that is missing or damaged.
    """
    if table.published is None:
        return {}
    printout = read_printed(root / table.published)
    found = {}
    for grid in table.grids:
        for row, column in itertools.product(rows(grid), grid.columns):
            several = (_reference(printout, grid, row, column, gpu) for gpu in table.gpus)
            found[grid.name, row.name, column.name] = tuple(one for one in several if one is not None)
    return {place: several for place, several in found.items() if several}


@functools.cache
def read_printed(path: Path) -> Printout:
    """The cells of a published file, as printed.

    Raises:
        ConfigError: it is missing, lacks a column, or has an unknown unit.
    """
    found = {
        (line["row"], line["column"], line["metric"], line.get("gpu")): PrintedText(line["value"], line["unit"])
        for line in read_csv(path, ("row", "column", "metric", "value", "unit"), "published values")
    }
    if unknown := {text.unit for text in found.values()} - set(UNITS):
        raise ConfigError(f"published values {path} have the unknown unit {min(unknown)!r}.")
    return found


def place(grid: SpeedGrid, row: SpeedRow, column: SpeedColumn) -> tuple[str, str, PrintedAt]:
    """Row and column of a cell in the published file, and the metrics to look for."""
    printed = column.printed or grid.printed
    names = {axis.name: label for axis, label in zip(grid.axes, row.labels, strict=True)}
    names |= {"row": row.name, "column": column.name}
    return printed.row.format(**names), printed.column.format(**names), printed


def _reference(printout: Printout, grid: SpeedGrid, row: SpeedRow, column: SpeedColumn, gpu: str) -> Reference | None:
    number, ratio = _texts(printout, grid, row, column, gpu)
    if number is None and ratio is None:
        return None
    over = grid.over(column)
    value, speedup = number and number.value, ratio and ratio.value
    if speedup is None and value and over is not None:
        base, _ = _texts(printout, grid, row, grid.column(over), gpu)
        speedup = base.value / value if base is not None and base.value is not None else None
    return Reference(gpu, value, speedup, *(("-", 1.0) if number is None else (number.text, UNITS[number.unit])))


def _texts(
    printout: Printout, grid: SpeedGrid, row: SpeedRow, column: SpeedColumn, gpu: str
) -> tuple[PrintedText | None, PrintedText | None]:
    """The printed number of a cell and the printed ratio over its baseline."""
    where, heading, printed = place(grid, row, column)

    def text(metric: str | None) -> PrintedText | None:
        if metric is None:
            return None
        return printout.get((where, heading, metric, gpu)) or printout.get((where, heading, metric, None))

    return text(printed.metric), text(printed.ratio)
