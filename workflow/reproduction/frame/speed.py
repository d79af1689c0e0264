"""A speed table's numbers: each cell of its record, the paper's numbers, and the ratio to the baseline.

A record is in results/speed/ when this machine measured it, in results/bench/<gpu>/ when it was committed from
another. The first has priority over the second, and the newest of several comes first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from reproduction.benchmarks.records import SPEED, CellRecord, Measurement, Record, Sitting, read_record, record_path
from reproduction.frame.lines import COMPUTED, PUBLISHED, RECORDED, to_frame
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedGrid, SpeedTable, rows
from reproduction.tables.speed.published import Reference, references

SpeedPlace = tuple[str, str, str]
"""Grid, row and column."""

NAMES = (
    *("grid", "row", "column", "device", "origin", "unit"),
    *("value", "low", "high", "published", "ratio", "note"),
)
"""Columns of the frame."""


@dataclass(frozen=True)
class ShownRecord:
    """The record shown on a page. path: relative to the project; recorded: measured on another machine."""

    record: Record
    path: Path
    recorded: bool

    @property
    def sittings(self) -> list[tuple[Sitting, list[CellRecord]]]:
        """The sittings that cells come from, in order, each with its cells."""
        used = sorted({cell.sitting for cell in self.record.cells})
        return [(self.record.sittings[n], [cell for cell in self.record.cells if cell.sitting == n]) for n in used]

    @property
    def days(self) -> list[str]:
        """The days of the sittings."""
        return sorted({str(sitting.environment.get("date", "-"))[:10] for sitting, _ in self.sittings})

    @property
    def of_cpu(self) -> bool:
        """Whether a CPU was measured: its state names the instructions that it was given."""
        return all("instructions" in sitting.gpu_before for sitting, _ in self.sittings)


@dataclass(frozen=True)
class SpeedNumber:
    """One cell: our measurement or why there is none, its ratio to the baseline, and the paper's number on each GPU.

    spread: relative, of the measurement. ratio_spread: relative, of the ratio.
    """

    ours: Measurement | None
    missing: str | None
    ratio: float | None
    ratio_spread: float | None
    papers: tuple[Reference, ...]
    record: CellRecord | None = None

    def paper(self, gpu: str) -> Reference | None:
        """The paper's number on one GPU."""
        return next((paper for paper in self.papers if paper.gpu == gpu), None)


SpeedNumbers = dict[SpeedPlace, SpeedNumber]
"""The numbers of a table by place."""


class Measured(NamedTuple):
    """A measured table: the record shown on its page, None without one, and all its numbers."""

    shown: ShownRecord | None
    numbers: SpeedNumbers

    @property
    def frame(self) -> pd.DataFrame:
        """Every cell, measured or not, in SI units, with the paper's number on each of its GPUs."""
        device = self.shown and self.shown.record.gpu
        origin = self.shown and (RECORDED if self.shown.recorded else COMPUTED)
        lines = []
        for place, number in self.numbers.items():
            one = number.ours
            unit, amounts = (None, (None,) * 3) if one is None else (one.unit, (one.value, one.low, one.high))
            lines.append((*place, device, origin, unit, *amounts, None, number.ratio, number.missing))
            for paper in number.papers:
                lines.append((*place, paper.gpu, PUBLISHED, unit, *[None] * 3, paper.value, paper.ratio, None))
        return to_frame(lines, NAMES)


def read_numbers(project: Project, table: SpeedTable) -> Measured:
    """Read the record and the numbers of a table; a figure has no cells of its own and gives none.

    Raises:
        ResultError: the record is damaged.
    """
    shown = find_record(project, table) if table.grids else None
    return Measured(shown, collect(project, table, shown))


def find_record(project: Project, table: SpeedTable) -> ShownRecord | None:
    """Find the record of a table; None without one.

    Raises:
        ResultError: the record is damaged.
    """
    path = record_path(project.root, table.id)
    if path is None:
        return None
    return ShownRecord(read_record(project.root / path, table.id), path, path.parent != SPEED)


def collect(project: Project, table: SpeedTable, shown: ShownRecord | None) -> SpeedNumbers:
    """Collect every cell of a table, measured or not."""
    printed = references(table, project.root)
    known = {} if shown is None else shown.record.by_key
    records = {(cell.grid, cell.row, cell.column): known.get(cell.key) for cell in table.cells}
    return {place: _number(table.grid(place[0]), place, records, printed.get(place, ())) for place in records}


def shown_ratio(grid: SpeedGrid, speedup: float) -> float:
    """A ratio as the grid shows it: a cost is the inverse of a speedup."""
    return 1 / speedup if grid.ratio == "cost" else speedup


def _number(
    grid: SpeedGrid, place: SpeedPlace, records: Mapping[SpeedPlace, CellRecord | None], papers: tuple[Reference, ...]
) -> SpeedNumber:
    record, over = records[place], grid.over(grid.column(place[2]))
    ours = _measurement(record, grid, place[2])
    base = _measurement(records[place[0], place[1], over], grid, over) if over else None
    ratio = spread = missing = None
    if ours and ours.value and base:
        ratio, spread = base.value / ours.value, math.hypot(base.spread or 0.0, ours.spread or 0.0)
    if ours is None:
        missing = "not measured" if record is None else record.missing or "the benchmark returns no such quantity"
    return SpeedNumber(ours, missing, ratio, spread, papers, record)


def _measurement(record: CellRecord | None, grid: SpeedGrid, column: str) -> Measurement | None:
    return None if record is None else record.quantities.get(grid.quantity_of(grid.column(column)))


def short_gpu(gpu: str) -> str:
    """A GPU's name for a column header."""
    return gpu.removeprefix("NVIDIA ")


def row_names(grid: SpeedGrid) -> list[str]:
    """A grid's row names in order."""
    return [row.name for row in rows(grid)]
