"""Tables as data: rows, columns, metrics, the paper's numbers and its claims, read from workflow/papers/<paper>/.

Everything is validated on reading, by a JSON schema and by names that must refer to each other. Nothing here expands
recipes (see `rotquant.study.project`), computes or imports torch.
"""

import csv
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.study.configuration import read_yaml, validate

PAPERS = Path("workflow/papers")
TARGETS = Path("config/targets.yaml")

Published = dict[tuple[str, str, str], float | None]
"""The paper's numbers by (row, column, quantity); None where the paper prints a dash."""


class Column(Frozen):
    """A column as printed, and the slot of the configuration it is computed on.

    published: CSV of the paper's numbers where they stand in another table; None for the table's own.
    """

    name: str
    slot: str
    published: str | None = None


class Row(Frozen):
    """A row as printed: its name, what stands beside it, and its recipe as a preset with changes.

    not_computed: in place of a method, why the row holds the paper's numbers alone.
    columns: further changes to the recipe in single columns.
    metrics: changes to the table's metrics in this row, by kind.
    """

    name: str
    labels: tuple[str | int | float, ...] = ()
    method: str | None = None
    not_computed: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = Field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Claim(Frozen):
    """A statement of the paper about a table, with its section and the check that decides it (`reporting.claims`).

    note: where the check departs from the paper's words. if_it_fails: why a small model may differ.
    """

    text: str
    section: str
    note: str | None = None
    if_it_fails: str | None = None
    columns: tuple[str, ...] | None = None
    quantity: str | None = None
    check: dict[str, dict[str, Any]]


class Figure(Frozen):
    """The figure that goes with a table.

    x: title of the horizontal axis of `lines` (None: the last label column).
    over: row that `relative_increase` draws changes against (None: the table's baseline).
    rows: which are drawn, by `relative_increase` and `tasks` beside that one (None: all).
    """

    kind: str
    caption: str
    x: str | None = None
    over: str | None = None
    rows: tuple[str, ...] | None = None


class Table(Frozen):
    """One table or figure of a paper, or a report of our own.

    repeats: with which seeds what is random is computed: the configuration's first, all of them, or its `trials`.
    published: path of the paper's numbers.
    """

    id: str
    paper: str
    paper_title: str
    title: str
    section: str
    caption: str
    notes: tuple[str, ...] = ()
    metrics: tuple[dict[str, Any], ...]
    columns: tuple[Column, ...]
    label_columns: tuple[str, ...] = ()
    baseline: str
    repeats: Literal["once", "seeds", "trials"] = "seeds"
    rows: tuple[Row, ...]
    published: str | None = None
    claims: tuple[Claim, ...]
    figure: Figure | None = None

    @field_validator("columns", mode="before")
    @classmethod
    def _names_are_slots(cls, columns: Any) -> Any:
        return [{"name": column, "slot": column} if isinstance(column, str) else column for column in columns]

    @property
    def label(self) -> str:
        """The part after the paper's name: "table1", "figure1", "switches"."""
        return self.id.removeprefix(f"{self.paper}_")

    @property
    def computed_rows(self) -> tuple[Row, ...]:
        """The rows that have a recipe; the others hold the paper's numbers alone."""
        return tuple(row for row in self.rows if row.method is not None)

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            ConfigError: for an unknown row; the sentence lists the nearest ones.
        """
        return lookup({row.name: row for row in self.rows}, name, f"table {self.id}: unknown row")

    def column(self, name: str) -> Column:
        """The column of that name.

        Raises:
            ConfigError: for an unknown column; the sentence lists the nearest ones.
        """
        return lookup({column.name: column for column in self.columns}, name, f"table {self.id}: unknown column")


def load_tables(path: Path, root: Path) -> list[Table]:
    """Read and validate one paper's tables.yaml.

    Raises:
        ConfigError: a problem with a key (the sentence names it), an unknown name in a claim, a wrong number of labels.
    """
    data = read_yaml(path)
    relative = path.relative_to(root)
    validate(data, "tables", str(relative), root)
    tables = []
    for fields in data["tables"]:
        common = {"paper": data["paper"], "paper_title": data["title"]}
        table = Table.model_validate(_with_paths({**fields, **common}, relative.parent))
        _check(table, str(relative), root)
        tables.append(table)
    return tables


def published_values(table: Table, root: Path) -> Published:
    """The paper's numbers of all quantities, those of columns from other tables included.

    Raises:
        ConfigError: a missing file, a missing column, or a value that is neither a number nor a dash.
    """
    return _of_all_columns(table, root, "value")


def published_deviations(table: Table, root: Path) -> Published:
    """The paper's deviations over seeds, as `published_values`; None, or no entry, where the paper prints none."""
    return _of_all_columns(table, root, "deviation")


def read_published(path: Path, field: str = "value") -> Published:
    """Read published values, or another numeric `field` of theirs, from a long-format CSV; nothing without that field.

    Raises:
        ConfigError: a missing file, a missing column, or a value that is neither a number nor a dash.
    """
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        if field != "value" and rows and field not in rows[0]:
            return {}
        return {(row["row"], row["column"], row["metric"]): _number(row[field]) for row in rows}
    except FileNotFoundError:
        raise ConfigError(f"published values {path} do not exist.") from None
    except KeyError as error:
        raise ConfigError(f"published values {path} lack the column {error}.") from None
    except ValueError as error:
        raise ConfigError(f"published values {path}: {error}; write a number, or - where the paper has none.") from None


def load_targets(root: Path) -> dict[str, Any]:
    """config/targets.yaml: every table and figure of the papers, as {papers, kinds, targets}."""
    return read_yaml(root / TARGETS)


def _of_all_columns(table: Table, root: Path, field: str) -> Published:
    """A field of the table's own published values, and of the columns that stand in other tables."""
    values = {} if table.published is None else read_published(root / table.published, field)
    rows = {row.name for row in table.rows}
    for column in table.columns:
        if column.published is not None:
            others = read_published(root / column.published, field)
            values |= {cell: value for cell, value in others.items() if cell[0] in rows and cell[1] == column.name}
    return values


def _with_paths(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths of published values relative to the project instead of the table's file."""
    fields = dict(fields)
    if "published" in fields:
        fields["published"] = (folder / fields["published"]).as_posix()
    fields["columns"] = [
        {**column, "published": (folder / column["published"]).as_posix()}
        if isinstance(column, dict) and "published" in column
        else column
        for column in fields["columns"]
    ]
    return fields


def _number(text: str) -> float | None:
    if text.strip() in ("-", ""):
        return None
    value = float(text)
    if math.isnan(value) and text.strip().lower() != "nan":
        raise ValueError(f"{text!r} is not a number")
    return value


def _check(table: Table, where: str, root: Path) -> None:
    """What a schema cannot say: names that refer to each other, and as many labels as label columns."""
    where = f"{where}: tables.{table.id}"
    names = [row.name for row in table.rows]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}.rows: a row name occurs twice.")
    computed = [table.row(table.baseline)]
    if table.figure is not None:
        computed += [table.row(name) for name in (table.figure.over or table.baseline, *(table.figure.rows or ()))]
    for row in computed:
        if row.method is None:
            raise ConfigError(f"{where}: row {row.name!r} is not computed, so nothing can be relative to it or drawn.")
    kinds = [metric["kind"] for metric in table.metrics]
    for row in table.rows:
        if (row.method is None) == (row.not_computed is None):
            raise ConfigError(f"{where}.rows.{row.name}: a row has a method, or says why it is not computed.")
        if len(row.labels) != len(table.label_columns):
            raise ConfigError(
                f"{where}.rows.{row.name}: {len(row.labels)} labels for {len(table.label_columns)} label columns."
            )
        for column in row.columns:
            table.column(column)
        for kind in row.metrics:
            if kind not in kinds:
                raise ConfigError(f"{where}.rows.{row.name}.metrics: the table measures no {kind!r}.")
    for claim in table.claims:
        _check_claim(table, claim)
    if table.published is not None:
        for row, column, _ in read_published(root / table.published):
            table.row(row)
            table.column(column)
    published_values(table, root)


def _check_claim(table: Table, claim: Claim) -> None:
    """Rows and columns that a claim names exist."""
    ((kind, arguments),) = claim.check.items()
    columns_paired = kind == "loss_larger"
    for column in claim.columns or ():
        table.column(column)
    for key, value in arguments.items():
        if key in ("row", "over"):
            table.row(value)
        elif key == "column":
            table.column(value)
        elif key in ("than", "rows"):
            for name in value:
                table.row(name)
        elif key == "pairs":
            for name in (name for pair in value for name in pair):
                (table.column if columns_paired else table.row)(name)
