"""Speed tables as data: a cell is a benchmark applied to arguments.

A table holds one or more grids. The rows of a grid are the product of its axes (layer by batch), its columns are
implementations, and one column is the baseline that speedups are over. Nothing here measures or imports torch.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from reproduction.benchmarks.records import cell_key
from reproduction.benchmarks.registry import BENCHMARKS, Device, find
from reproduction.reading.written import Many, Written
from reproduction.tables.checks import CheckedClaim, OneCheck, headline
from reproduction.tables.tables import OfPaper, Table, Titled
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import lookup

Units = Literal["ms", "us", "min", "h", "GiB", "GB", "mJ", "MHz"]

#: Factors from units to the records' SI units.
FACTORS: dict[str, float] = {
    "ms": 1e-3,
    "us": 1e-6,
    "min": 60.0,
    "h": 3600.0,
    "GiB": 2.0**30,
    "GB": 1e9,
    "mJ": 1e-3,
    "MHz": 1e6,
}


Benchmarked = Annotated[str, Field(json_schema_extra={"enum": [*sorted(BENCHMARKS)]})]
"""The name of a benchmark, see `benchmarks.registry`."""

Arguments = dict[str, Any]
"""Some of a benchmark's arguments; those of grid, row and column together are checked as the benchmark's own."""

Values = dict[str, Arguments | list[int | str]]
"""Arguments by printed values of an axis, in full or as lists, see `Axis`."""


class Axis(Written):
    """One part of a row's name, such as the layer."""

    name: str
    """What varies, as in the template of the rows' names."""
    values: dict[str, Arguments]
    """The values as printed, each with the arguments it stands for. Values that are printed as they are may be a list
    below the name of the argument, or below names in the form of the values: `"{heads} x {head_dim}": [32 x 128]`."""

    @field_validator("values", mode="before", json_schema_input_type=Values)
    @classmethod
    def _names_are_text(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found: dict[str, Any] = {}
        for name, given in values.items():
            found |= _printed(str(name), given) if isinstance(given, list) else {str(name): given}
        return found


def _printed(form: str, values: list[Any]) -> dict[str, Arguments]:
    """The arguments in printed values of a form, such as {rows} x {features}; a name alone is the form of one."""
    braced = form if "{" in form else f"{{{form}}}"
    names = re.findall(r"{(\w+)}", braced)
    if len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
        raise ValueError(f"{form!r} is no form of values: each argument has a name of its own in braces")
    pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(braced))
    found = {str(value): re.fullmatch(pattern, str(value)) for value in values}
    if wrong := [value for value, match in found.items() if match is None]:
        raise ValueError(f"{wrong[0]!r} has not the form {form!r}")
    return {
        value: {name: int(size) for name, size in match.groupdict().items()} for value, match in found.items() if match
    }


class PrintedAt(Written):
    """Where a cell's numbers stand in the published file; {row}, {column} and names of axes are filled in."""

    row: str = "{row}"
    """The row."""
    column: str = "{column}"
    """The column."""
    metric: str = "milliseconds"
    """The metric of the number itself."""
    ratio: str | None = None
    """The metric of the printed speedup; without it, it follows from two printed numbers."""


class SpeedColumn(Written):
    """One implementation."""

    name: str
    """As shown."""
    benchmark: Benchmarked | None = None
    """Its own benchmark, where it differs from the grid's."""
    arguments: Arguments = Field(default_factory=dict)
    """What the column gives to the arguments."""
    over: str | None = None
    """The column that its speedup is over, where that is not the grid's baseline."""
    quantity: str | None = None
    """Its own quantity, where it differs from the grid's."""
    printed: PrintedAt | None = None
    """Its own place in the published file, where it differs from the grid's."""


class SpeedGrid(Written):
    """A benchmark over rows and columns; the rows are the product of the axes."""

    name: str
    """As shown above the grid."""
    benchmark: Benchmarked
    """What is measured."""
    arguments: Arguments = Field(default_factory=dict)
    """What all cells share."""
    axes: Annotated[Many[Axis], Field(min_length=1)]
    """What varies from row to row, the last one fastest; a mapping is of their names to their values."""
    rows: str = Field(default_factory=lambda data: ", ".join(f"{{{axis.name}}}" for axis in data["axes"]))
    """Template of a row's name, with the names of axes in braces; by default all of them, separated by commas."""
    columns: Annotated[Many[SpeedColumn], Field(min_length=1)]
    """The implementations; a mapping is of their names to what they give to the arguments."""
    baseline: str = Field(default_factory=lambda data: data["columns"][0].name)
    """The column that speedups are over, by default the first."""
    quantity: str = "seconds"
    """The quantity that is shown."""
    unit: Units = "ms"
    """In which our numbers are shown."""
    ratio: Literal["speedup", "saving", "cost"] = "speedup"
    """How a column compares with its baseline: speedup and saving divide the baseline's number by the column's, cost
    the other way round."""
    printed: PrintedAt = PrintedAt()
    """Where the paper's numbers stand."""

    @field_validator("axes", mode="before", json_schema_input_type=dict[str, Values] | list[Axis])
    @classmethod
    def _axes_are_a_list(cls, axes: Any) -> Any:
        return [{"name": name, "values": values} for name, values in axes.items()] if isinstance(axes, dict) else axes

    @field_validator("columns", mode="before", json_schema_input_type=dict[str, Arguments] | list[SpeedColumn])
    @classmethod
    def _columns_are_a_list(cls, columns: Any) -> Any:
        named = columns.items() if isinstance(columns, dict) else ()
        return [{"name": name, "arguments": arguments} for name, arguments in named] or columns

    @model_validator(mode="after")
    def _names_refer_to_something(self) -> Self:
        named = self._by_name
        for column in self.columns:
            self._found(named, column.over or self.baseline)
        try:
            names = [row.name for row in rows(self)]
        except (KeyError, IndexError) as error:
            axes = ", ".join(axis.name for axis in self.axes)
            raise ValueError(f"rows: the template names the unknown axis {error}; known: {axes}") from None
        if len(set(names)) != len(names):
            raise ValueError(f"two rows of grid {self.name} have one name")
        return self

    @property
    def timeless(self) -> bool:
        """Whether it shows bytes, energy or clocks, not time."""
        return self.unit in ("GiB", "GB", "mJ", "MHz")

    def column(self, name: str) -> SpeedColumn:
        """Find a column by name.

        Raises:
            ConfigError: for an unknown one.
        """
        return self._found(self._by_name, name)

    @property
    def _by_name(self) -> dict[str, SpeedColumn]:
        return {column.name: column for column in self.columns}

    def _found(self, named: dict[str, SpeedColumn], name: str) -> SpeedColumn:
        return lookup(named, name, f"grid {self.name}: unknown column")

    def quantity_of(self, column: SpeedColumn) -> str:
        """The quantity that a column shows."""
        return column.quantity or self.quantity

    def over(self, column: SpeedColumn) -> str | None:
        """The column that a column is compared with; None for a baseline."""
        over = column.over or self.baseline
        return None if over == column.name else over


class SpeedCompared(Written):
    """How two columns compare, or a column's own numbers."""

    compare: Literal["speedup", "cost", "amount"] = "speedup"
    """speedup is the number of `over` by that of `column`, cost its inverse; amount is the number of `column` itself,
    in the grid's unit."""
    column: str | Many[str]
    """The column; of several each is compared."""
    over: str | None = None
    """The column that they are compared with; none for an amount."""

    @model_validator(mode="after")
    def _names_what_it_compares(self) -> Self:
        if (self.over is None) != (self.compare == "amount"):
            raise ValueError("a check of speedup or cost names the column over which, and one of an amount names none")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are compared with `over`."""
        return (self.column,) if isinstance(self.column, str) else self.column


class SpeedBound(SpeedCompared):
    """A bound on how two columns compare, or on a column's own numbers."""

    value: float
    """The bound."""
    of: Literal["every", "best", "mean"] = "every"
    """What is held against the bound; `best` is the largest."""


class SpeedCheck(OneCheck):
    """One check of how columns compare (`claims.replays`)."""

    at_least: SpeedBound | None = None
    """It is at least this value."""
    at_most: SpeedBound | None = None
    """It is at most this value."""
    increasing: SpeedCompared | None = None
    """It grows from row to row."""

    @property
    def asked(self) -> SpeedCompared:
        """What is compared."""
        return next(one for one in (self.at_least, self.at_most, self.increasing) if one is not None)


class SpeedClaim(CheckedClaim):
    """A statement about a table's numbers, or a goal, with the check that decides it (`claims.replays`)."""

    grid: str = "*"
    """Pattern with * of the grids that it is about."""
    rows: Many[str] = ("*",)
    """Patterns with * of the rows that it is about."""
    mechanism: SpeedCheck | None = None
    """A direction, asked on any GPU; goals are judged anywhere."""
    setting: SpeedCheck | None = None
    """The paper's number, judged on its GPU."""
    fact: SpeedCheck | None = None
    """What cannot fail: shown with its numbers, without a verdict."""

    @model_validator(mode="after")
    def _compares_in_one_way(self) -> Self:
        if len({(one.compare, one.over) for one in self.asked}) > 1:
            raise ValueError("the checks of a claim compare in one way, with one column")
        return self

    @property
    def asked(self) -> list[SpeedCompared]:
        """What its checks compare."""
        return [check.asked for check in self.checks.values()]


class DrawnPart(Written):
    """One panel of a figure: a column of a table's grid, in the rows that match."""

    table: str
    """The id of the table."""
    title: str
    """As shown above the panel."""
    grid: str
    """The grid."""
    rows: Many[str] = ("*",)
    """Patterns with * of the rows."""
    column: str
    """The column."""


class Drawing(Written):
    """The figure of a table: bars of speedups, or the roofline."""

    kind: Literal["bars", "roofline"]
    """What is drawn."""
    caption: str
    """What the figure shows."""
    parts: Many[DrawnPart] = ()
    """The panels."""


class SpeedFields(Titled):
    """A table of time or memory; without grids of its own a figure, which shows parts of other tables."""

    timing: str | None = None
    """How times are taken, where not by replays of CUDA graphs on a GPU."""
    gpus: Many[str] = ()
    """What the paper measured on; where these are several, the published file has a column `gpu`."""
    ceilings: dict[str, float] = Field(default_factory=dict)
    """Operations per second by number format that were measured elsewhere, where they are above the table's own."""
    see: Many[str] = ()
    """Further files to read, relative to the project."""
    grids: Many[SpeedGrid] = ()
    """The grids."""
    claims: Many[SpeedClaim] = ()
    """What the paper says about the numbers, or goals of our own."""
    drawing: Drawing | None = None
    """The figure that goes with it."""

    @model_validator(mode="after")
    def _claims_are_about_something(self) -> Self:
        headline(self.claims)
        for claim in self.claims:
            named = [grid for grid in self.grids if matches(grid.name, claim.grid)]
            if not any(matches(row.name, *claim.rows) for grid in named for row in rows(grid)):
                raise ValueError(f"no grid and row is what the claim {claim.text!r} is about")
            for grid in named:
                for asked in claim.asked:
                    for column in filter(None, (*asked.columns, asked.over)):
                        grid.column(column)
        return self


class SpeedFile(OfPaper):
    """Tables of time and memory: a cell is a benchmark applied to arguments."""

    tables: Annotated[Many[SpeedFields], Field(min_length=1)]
    """The tables."""


class SpeedTable(SpeedFields, Table):
    """A table whose cells are benchmarks."""

    of: ClassVar[str] = "benchmarks"

    @property
    def drawn(self) -> str | None:
        """The caption of its figure."""
        return self.drawing.caption if self.drawing else None

    @property
    def recorded(self) -> tuple[str, ...]:
        """The tables whose records it shows: itself, or for a figure those that it draws."""
        return (
            (self.id,)
            if self.drawing is None or self.grids
            else tuple(dict.fromkeys(part.table for part in self.drawing.parts))
        )

    def grid(self, name: str) -> SpeedGrid:
        """Find a grid by name.

        Raises:
            ConfigError: for an unknown one.
        """
        return lookup({grid.name: grid for grid in self.grids}, name, f"table {self.id}: unknown grid")

    @property
    def device(self) -> Device:
        """The device that all of its benchmarks measure (`loading`)."""
        return find(self.cells[0].benchmark, f"table {self.id}").device if self.cells else "gpu"

    @functools.cached_property
    def cells(self) -> tuple["SpeedCell", ...]:
        """All cells that are measured, grid by grid and row by row.

        Raises:
            ConfigError: an unknown benchmark or an impossible argument.
        """
        return tuple(cell for grid in self.grids for row in rows(grid) for cell in _cells(self, grid, row))


@dataclass(frozen=True)
class SpeedRow:
    """A row: its name, the value of each axis, and what these give to the arguments."""

    name: str
    labels: tuple[str, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class SpeedCell:
    """One measurement of a table: the benchmark and its complete arguments."""

    grid: str
    row: str
    column: str
    benchmark: str
    arguments: Frozen

    @property
    def key(self) -> str:
        """The key of the measurement on one machine."""
        return cell_key(self.benchmark, self.arguments.model_dump(mode="json"))


def rows(grid: SpeedGrid) -> tuple[SpeedRow, ...]:
    """The rows of a grid: the product of its axes, the last one running fastest."""
    found = []
    for combination in itertools.product(*(axis.values.items() for axis in grid.axes)):
        labels = tuple(label for label, _ in combination)
        names = {axis.name: label for axis, label in zip(grid.axes, labels, strict=True)}
        arguments = {key: value for _, fields in combination for key, value in fields.items()}
        found.append(SpeedRow(grid.rows.format(**names), labels, arguments))
    return tuple(found)


def matches(name: str, *patterns: str) -> bool:
    """Whether a name matches one of several patterns with *."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _cells(table: SpeedTable, grid: SpeedGrid, row: SpeedRow) -> Iterator[SpeedCell]:
    for column in grid.columns:
        where = f"table {table.id}, row {row.name}, column {column.name}"
        name = column.benchmark or grid.benchmark
        fields = {**grid.arguments, **row.arguments, **column.arguments}
        yield SpeedCell(grid.name, row.name, column.name, name, find(name, where).parse(fields, where))
