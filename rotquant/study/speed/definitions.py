"""Speed tables as data: a cell is a benchmark applied to arguments.

A table holds one or more grids. The rows of a grid are the product of its axes (layer by batch), its columns are
implementations, and one column is the baseline that speedups are over. Nothing here measures or imports torch.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rotquant.bench.records import cell_key
from rotquant.bench.registry import Device, find
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import lookup

Units = Literal["ms", "us", "min", "GiB"]

#: What a unit is in the records' SI units.
FACTORS: dict[str, float] = {"ms": 1e-3, "us": 1e-6, "min": 60.0, "GiB": 2.0**30}


class Axis(Frozen):
    """One part of a row's name, such as the layer: its values as printed, each with the arguments it stands for."""

    name: str
    values: dict[str, dict[str, Any]]

    @field_validator("values", mode="before")
    @classmethod
    def _names_are_text(cls, values: Any) -> Any:
        return {str(name): fields for name, fields in values.items()} if isinstance(values, dict) else values


class Printed(Frozen):
    """Where a cell's numbers stand in the published file; {row}, {column} and axis names are filled in.

    metric: of the number itself; ratio: of the printed speedup, None where it follows from two printed numbers.
    """

    row: str = "{row}"
    column: str = "{column}"
    metric: str = "milliseconds"
    ratio: str | None = None


class Column(Frozen):
    """One implementation.

    benchmark, quantity, printed: its own, where they differ from the grid's. over: the column that its speedup is over,
    where that is not the grid's baseline.
    """

    name: str
    benchmark: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    over: str | None = None
    quantity: str | None = None
    printed: Printed | None = None


class Grid(Frozen):
    """A benchmark over rows and columns.

    arguments: what all cells share. rows: template of a row's name. unit: in which our numbers are shown.
    ratio: how a column compares with its baseline: speedup and saving divide the baseline's number by the column's,
        cost the other way round.
    """

    name: str
    benchmark: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    axes: tuple[Axis, ...] = Field(min_length=1)
    rows: str
    columns: tuple[Column, ...] = Field(min_length=1)
    baseline: str
    quantity: str = "seconds"
    unit: Units = "ms"
    ratio: Literal["speedup", "saving", "cost"] = "speedup"
    printed: Printed = Printed()

    def column(self, name: str) -> Column:
        """The column of that name.

        Raises:
            ConfigError: for an unknown one.
        """
        return lookup({column.name: column for column in self.columns}, name, f"grid {self.name}: unknown column")

    def quantity_of(self, column: Column) -> str:
        """The quantity that a column shows."""
        return column.quantity or self.quantity

    def over(self, column: Column) -> str | None:
        """The column that a column is compared with; None for a baseline."""
        over = column.over or self.baseline
        return None if over == column.name else over


class Check(Frozen):
    """A bound on how two columns compare, or on a column's own numbers.

    compare: speedup is the number of `over` by that of `column`, cost its inverse; amount is the number of `column`
        itself, in the grid's unit. Of several columns each is compared.
    of: what is held against the bound; `best` is the largest. increasing: that it grows from row to row.
    """

    compare: Literal["speedup", "cost", "amount"] = "speedup"
    column: str | tuple[str, ...]
    over: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    increasing: bool = False
    of: Literal["every", "best", "mean"] = "every"

    @model_validator(mode="after")
    def _asks_one_thing(self) -> "Check":
        if (self.at_least is not None) + (self.at_most is not None) + self.increasing != 1:
            raise ValueError("a check asks one of at_least, at_most and increasing")
        if (self.over is None) != (self.compare == "amount"):
            raise ValueError("a check of speedup or cost names the column over which, and one of an amount names none")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are held against `over`."""
        return (self.column,) if isinstance(self.column, str) else self.column


class Claim(Frozen):
    """A statement about a table's numbers, or a goal, with the check that decides it (`reporting.speed.claims`).

    grid, rows: patterns with * of where it applies. note: where the check departs from the words. if_it_fails: why it
    may fail on another GPU than the paper's.
    """

    text: str
    section: str
    note: str | None = None
    if_it_fails: str | None = None
    grid: str = "*"
    rows: tuple[str, ...] = ("*",)
    check: Check


class Part(Frozen):
    """One panel of a figure: a column of a table's grid, in the rows that match."""

    table: str
    title: str
    grid: str
    rows: tuple[str, ...] = ("*",)
    column: str


class Drawing(Frozen):
    """The figure of a table: bars of speedups, or the roofline."""

    kind: Literal["bars", "roofline"]
    caption: str
    parts: tuple[Part, ...] = ()


class SpeedTable(Frozen):
    """A table; without grids of its own a figure, which shows parts of other tables.

    timing: how times are taken, where not by replays of CUDA graphs on a GPU. gpus: what the paper measured on.
    published: the paper's numbers; where it has several GPUs, with a column `gpu`.
    ceilings: operations per second by number format that were measured elsewhere, where they are above the table's own.
    see: files to read beside it, relative to the project.
    """

    id: str
    paper: str
    paper_title: str
    title: str
    section: str
    caption: str
    timing: str | None = None
    notes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    published: str | None = None
    ceilings: dict[str, float] = Field(default_factory=dict)
    see: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    drawing: Drawing | None = None

    @property
    def label(self) -> str:
        """The part after the paper's name: "table14"."""
        return self.id.removeprefix(f"{self.paper}_")

    @property
    def sources(self) -> tuple[str, ...]:
        """The tables whose records it shows: itself, or of a figure those that it draws."""
        return (
            (self.id,)
            if self.drawing is None or self.grids
            else tuple(dict.fromkeys(part.table for part in self.drawing.parts))
        )

    def grid(self, name: str) -> Grid:
        """The grid of that name.

        Raises:
            ConfigError: for an unknown one.
        """
        return lookup({grid.name: grid for grid in self.grids}, name, f"table {self.id}: unknown grid")

    @property
    def device(self) -> Device:
        """What its benchmarks measure, all of them the same (`loading`)."""
        return find(self.cells[0].benchmark, f"table {self.id}").device if self.cells else "gpu"

    @functools.cached_property
    def cells(self) -> tuple["Cell", ...]:
        """All cells that are measured, grid by grid and row by row.

        Raises:
            ConfigError: an unknown benchmark or an impossible argument.
        """
        return tuple(cell for grid in self.grids for row in rows(grid) for cell in _cells(self, grid, row))


@dataclass(frozen=True)
class Row:
    """A row: its name, the value of each axis, and what these give to the arguments."""

    name: str
    labels: tuple[str, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One measurement of a table: the benchmark and its complete arguments."""

    grid: str
    row: str
    column: str
    benchmark: str
    arguments: Frozen

    @property
    def key(self) -> str:
        """What identifies the measurement on one machine."""
        return cell_key(self.benchmark, self.arguments.model_dump(mode="json"))


def rows(grid: Grid) -> tuple[Row, ...]:
    """The rows of a grid: the product of its axes, the last one running fastest."""
    found = []
    for combination in itertools.product(*(axis.values.items() for axis in grid.axes)):
        labels = tuple(label for label, _ in combination)
        names = {axis.name: label for axis, label in zip(grid.axes, labels, strict=True)}
        arguments = {key: value for _, fields in combination for key, value in fields.items()}
        found.append(Row(grid.rows.format(**names), labels, arguments))
    return tuple(found)


def matches(name: str, *patterns: str) -> bool:
    """Whether a name matches one of several patterns with *."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _cells(table: SpeedTable, grid: Grid, row: Row) -> Iterator[Cell]:
    for column in grid.columns:
        where = f"table {table.id}, row {row.name}, column {column.name}"
        name = column.benchmark or grid.benchmark
        fields = {**grid.arguments, **row.arguments, **column.arguments}
        yield Cell(grid.name, row.name, column.name, name, find(name, where).parse(fields, where))
