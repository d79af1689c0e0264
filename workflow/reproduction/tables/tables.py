"""Tables as data: the common fields of all tables, and tables of runs, read from workflow/papers/<paper>/.

Everything is validated on reading, including names that refer to each other. Nothing here expands recipes (see
`project`), computes or imports torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from reproduction.metrics.settings import Metric
from reproduction.reading.written import Many, Written, by_name, parse, read_csv, read_yaml, some_of
from reproduction.tables.checks import Claim, Names, headline, named_by
from reproduction.tables.method_settings import MethodSettings
from reproduction.tables.shorthand import BITS, row_like, with_bits, written_out
from reproduction.tasks.settings import Normalization
from rotquant.foundation.data import first_problem, merge
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.foundation.files import file_inside
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, parse_recipe

P = TypeVar("P", bound="Column | Titled")
T = TypeVar("T", bound="Table")


class Printed(NamedTuple):
    """A number of the paper and its deviation over seeds, None where it prints a dash or none, and their file.

    text: the text of a cell that is no number; else None.
    """

    value: float | None
    deviation: float | None
    file: str
    text: str | None = None


Published = dict[tuple[str, str, str], Printed]
"""The paper's printed cells by (row, column, quantity)."""

Suite = Literal["paper", "shipped"]
BY_SUITE: dict[str, Any] = {
    "tasks": Many[str] | dict[Suite, Many[str]],
    "normalization": Normalization | dict[Suite, Normalization],
}
"""Fields that a table may set for each suite of zero-shot tasks, since suites differ."""

_CALLED = "How the table calls its main quantity, where it has two of a kind: mmlu next to an average of other tasks."
CALLED = {"called": Annotated[str, Field(pattern="^[a-z0-9_]+$", description=_CALLED)]}

METRICS = by_name("Metrics", {kind.model_fields["kind"].default: kind for kind in get_args(get_args(Metric)[0])})

Methods = Annotated[dict[str, dict[str, Any] | None], MethodSettings()]
_BITS = 'Bits of weights, inputs and KV cache, as "4-8-16"; 16 leaves a part as it is.'
Bits = Annotated[str, Field(pattern=BITS, description=_BITS)]
Changes = Annotated[dict[str, Any], some_of(Recipe, methods=Methods, also={"bits": Bits})]
"""Changes to a recipe, nested like the recipe; last those of `bits`."""


class Column(Written):
    """A column as printed, and the slot of the configuration it is computed on; a text in place of it is both."""

    name: str
    """As printed."""
    slot: str
    """The slot of the configuration that this column is computed on; default its name."""
    published: str | None = None
    """CSV of the paper's numbers where they stand in another table, relative to this file; else the table's own."""
    metrics: Names | None = None
    """Which of the table's metrics are measured in this column, by `called` or their kind; default all."""


class Row(Written):
    """A row as printed: its name, what stands next to it, and its recipe as a preset with changes."""

    name: str
    """As printed."""
    labels: Many[str | int | float] = ()
    """What stands in the label columns."""
    method: str | None = None
    """A preset, see `rotquant methods`; needed but in a row that is like another."""
    like: str | None = None
    """A row before it, or of the table that this one is like: its fields are those of this row, but for its own."""
    bits: Bits | None = None
    """Bits of weights, inputs and KV cache, as "4-8-16", where they are not the preset's."""
    recipe: Changes = Field(default_factory=dict)
    """Further changes to the method's recipe."""
    columns: dict[str, Changes] = Field(default_factory=dict)
    """Further changes to the recipe in single columns, by column."""
    metrics: Annotated[dict[str, dict[str, Any]], some_of(METRICS, **BY_SUITE)] = Field(default_factory=dict)
    """Changes to the table's metrics in this row, by kind."""

    @model_validator(mode="after")
    def _has_a_method(self) -> Self:
        if self.method is None and self.like is None:
            raise ValueError("a row has a method, or is like another")
        return self

    def changes(self, column: str | None = None) -> dict[str, Any]:
        """What the row says of its recipe, and of one column's, but for bits."""
        said = merge(self.recipe, self.columns.get(column or "", {}))
        return {name: value for name, value in said.items() if name != "bits"}

    def computed(self, where: str, column: str | None = None) -> Recipe:
        """The recipe of the row in one of its columns, or in none of them.

        Raises:
            RecipeError: an unknown preset, or changes that do not leave a valid recipe.
        """
        data = preset(str(self.method)).model_dump(mode="json")
        for said in ({"bits": self.bits, **self.recipe}, self.columns.get(column or "", {})):
            data = with_bits(merge(data, {name: one for name, one in said.items() if name != "bits"}), said.get("bits"))
        return parse_recipe(data, where)


class Figure(Written):
    """The figure that goes with a table."""

    kind: Literal[
        "relative_increase",
        "lines",
        "tasks",
        "magnitudes",
        "outliers",
        "distribution",
        "range_use",
        "learning",
        "token_maxima",
        "outlier_tokens",
        "scaling",
        "loss_curves",
        "weight_kurtosis",
        "hadamard_kurtosis",
    ]
    """What is drawn."""
    caption: str
    """What the figure shows."""
    x: str | None = None
    """Title of the horizontal axis of `lines`; default the last label column's."""
    over: str | None = None
    """Row that `relative_increase` draws changes against; default the table's baseline."""
    rows: Names | None = None
    """Rows that are drawn, by `relative_increase` and `tasks` next to the one they are compared with; else all."""
    own_scales: bool = False
    """Whether each panel of `magnitudes` has a scale of its own, where rows differ by powers of ten."""
    printed: dict[str, str] = Field(default_factory=dict)
    """What the paper says of a row's main quantity, next to its number in a `distribution`."""


class Titled(Written):
    """Fields of every table or figure."""

    id: Annotated[str, Field(pattern="^[a-z0-9]+_[a-z0-9]+$")]
    """`<paper>_table<N>`, `<paper>_figure<N>` or `<paper>_lemma<N>`; a report of our own has a word in its place."""
    title: str
    """As shown, in our words."""
    section: str
    """Where it stands in the paper."""
    caption: str
    """What it shows, in our own words."""
    notes: Many[str] = ()
    """Remarks printed under it, such as settings that the paper leaves open."""
    published: str | None = None
    """CSV of the paper's numbers, relative to this file; `{label}` stands for the id without the paper."""
    like: str | None = None
    """A table before it in the file: its metrics, columns, rows and notes are those of this table, but for its own."""

    @property
    def label(self) -> str:
        """The part after the paper's name: "table1", "figure1", "switches"."""
        return self.id.partition("_")[2]

    @property
    def is_printed(self) -> bool:
        """Whether the paper has it; the others are reports of our own."""
        return re.match(r"(table|figure|lemma)\d", self.label) is not None


class Table(Titled):
    """A table of any source, with its file's data about the paper; paths are relative to the project."""

    of: ClassVar[str]
    """The name of its source (`reproduction.sources`)."""
    paper: str
    """The paper's short name."""
    paper_title: str
    """The paper's title."""
    file: str = ""
    """The table's own file."""

    @property
    def drawn(self) -> str | None:
        """The caption of the table's figure; None without one."""
        return None

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns for claims about runs; empty for other tables."""
        return ()


class RunTableFields(Titled):
    """One table or figure of a paper, or a report of our own."""

    metrics: Annotated[Many[Annotated[dict[str, Any], some_of(Metric, also=CALLED, **BY_SUITE)]], Field(min_length=1)]
    """What is measured for each cell. The first one is the table's main metric."""
    columns: Annotated[Many[Column], Field(min_length=1)]
    """The columns; a text is a slot of the configuration and its own name."""
    label_columns: Many[str] = ()
    """Further columns printed between a row's name and its values, as in the paper."""
    baseline: str
    """The row that losses are relative to; default the first."""
    repeats: Literal["once", "seeds", "trials"] = "seeds"
    """How often what is random is repeated: `once`, with the configuration's first seed; with all its `seeds`; or
    `trials` times, for a distribution over seeds."""
    text_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(default=1.0, exclude_if=lambda share: share == 1.0)
    """Share of the samples of every text that methods read: .1 for a calibration with a tenth of the text."""
    rows: Annotated[Many[Row], Field(min_length=1)]
    """The rows; a text is a row of the table that this one is like."""
    claims: Many[Claim] = ()
    """What the paper says about the numbers; a table of your own needs none."""
    figure: Figure | None = None
    """The figure that goes with it."""
    transposed: bool = False
    """Whether pages show its columns below each other and its rows side by side, as the paper prints them."""

    @field_validator(
        "columns", mode="before", json_schema_input_type=Annotated[list[str | Column], Field(min_length=1)]
    )
    @classmethod
    def _names_are_slots(cls, columns: Any) -> Any:
        if not isinstance(columns, list | tuple):
            return columns
        named = ({"name": column} if isinstance(column, str) else column for column in columns)
        return [{"slot": one.get("name"), **one} if isinstance(one, dict) else one for one in named]

    @model_validator(mode="after")
    def _names_refer_to_something(self) -> Self:
        rows = {row.name: row for row in self.rows}
        columns = {column.name: column for column in self.columns}
        if len(rows) < len(self.rows):
            raise ValueError("rows: a row name occurs twice")
        if len(columns) < len(self.columns):
            raise ValueError("columns: a column name occurs twice")
        drawn: tuple[str, ...] = ()
        if self.figure:
            drawn = (self.figure.over or self.baseline, *(self.figure.rows or ()))
        for place, name in (("baseline", self.baseline), *(("figure", name) for name in drawn)):
            lookup(rows, name, f"{place}: unknown row")
        if len(set(map(str, self.metrics))) < len(self.metrics):
            raise ValueError("metrics: one metric occurs twice")
        kinds = {metric["kind"] for metric in self.metrics}
        names = dict.fromkeys(map(name_of, self.metrics), True)
        for column in self.columns:
            for name in column.metrics or ():
                lookup(names, name, f"columns.{column.name}.metrics: unknown metric")
        for row in self.rows:
            if len(row.labels) != len(self.label_columns):
                labels = f"{len(row.labels)} labels for {len(self.label_columns)} label columns"
                raise ValueError(f"rows.{row.name}: {labels}")
            for column in row.columns:
                lookup(columns, column, f"rows.{row.name}.columns: unknown column")
            for kind in row.metrics.keys() - kinds:
                raise ValueError(f"rows.{row.name}.metrics: the table measures no {kind!r}")
        headline(self.claims)
        for number, claim in enumerate(self.claims):
            for kind, name in named_by(claim):
                lookup(rows if kind == "row" else columns, name, f"claims.{number}: unknown {kind}")
        return self


def name_of(metric: dict[str, Any]) -> str:
    """The name by which columns refer to a metric of a table."""
    return metric.get("called") or metric["kind"]


class RunTable(RunTableFields, Table):
    """A table whose cells are runs."""

    of: ClassVar[str] = "runs"

    @property
    def drawn(self) -> str | None:
        """The caption of its figure."""
        return self.figure.caption if self.figure else None

    @property
    def column_names(self) -> tuple[str, ...]:
        """All columns."""
        return tuple(column.name for column in self.columns)

    def row(self, name: str) -> Row:
        """Find a row by name.

        Raises:
            ConfigError: for an unknown row; the sentence lists the nearest ones.
        """
        return lookup({row.name: row for row in self.rows}, name, f"table {self.id}: unknown row")

    def column(self, name: str) -> Column:
        """Find a column by name.

        Raises:
            ConfigError: for an unknown column; the sentence lists the nearest ones.
        """
        return lookup({column.name: column for column in self.columns}, name, f"table {self.id}: unknown column")


class OfPaper(Written):
    """The fields that every file of tables begins with."""

    paper: Annotated[str, Field(pattern="^[a-z0-9]+$")]
    """The paper's short name, with which the ids of its tables begin; of no paper, the subject."""
    title: str
    """The paper's title."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Fields of all tables of the file that do not say their own."""
    tables: Many[Any]


class TableFile(OfPaper):
    """A table is data: what each cell computes, what the paper printed there, and what the paper claims about it."""

    tables: Annotated[Many[RunTableFields], Field(min_length=1)]
    """The tables."""


def in_order(table: Table) -> tuple[Any, ...]:
    """Sort key of tables: by paper, then tables, figures, our own reports, and table 2 before table 10."""
    rank = next((i for i, kind in enumerate(("table", "figure")) if table.label.startswith(kind)), 2)
    return table.paper, rank, int(re.sub(r"\D", "", table.label) or 0), table.label


def tables_in(path: Path, root: Path, schema: type[OfPaper], kind: type[T]) -> Iterator[T]:
    """Load and validate the tables of a file, of any source.

    Raises:
        ConfigError: a problem with a key (the sentence names it), an unknown name in a claim, a wrong number of labels.
    """
    relative = path.relative_to(root) if path.is_relative_to(root) else path
    try:
        data = written_out(read_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{relative}: {error}") from None
    file = parse(schema, data, str(relative))
    for fields in file.tables:
        if fields.id.partition("_")[0] != file.paper:
            raise ConfigError(f"{relative}: tables.{fields.id}.id: it does not begin with the paper, {file.paper}_.")
    for fields in file.tables:
        said = dict(with_path(fields, relative.parent)) | {"paper": file.paper, "paper_title": file.title}
        if isinstance(fields, RunTableFields):
            said["columns"] = tuple(with_path(column, relative.parent) for column in fields.columns)
        yield kind.model_validate({**said, "file": str(relative)})


def with_rows(table: RunTable, rows: Sequence[Row], where: str) -> RunTable:
    """A table with further rows; what they leave out of the label columns is a dash.

    Raises:
        ConfigError: a row has the name of another, or names a column or a metric that the table lacks.
    """
    labels = ("-",) * len(table.label_columns)
    known = {row.name: row.model_dump(exclude_unset=True) for row in table.rows}
    try:
        written = [row_like(row.model_dump(exclude_unset=True), known, where) for row in rows]
        more = [{"labels": labels, **row} for row in written]
        return RunTable.model_validate({**dict(table), "rows": (*table.rows, *more)})
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error)}.") from None


def with_path(part: P, folder: Path) -> P:
    """A table or column with its path of published values relative to the project instead of its file.

    Raises:
        ConfigError: a path that leaves the folder of the file.
    """
    if part.published is None:
        return part
    name = part.id if isinstance(part, Titled) else part.name
    path = file_inside(folder, part.published, f"{folder}: published of {name}", ConfigError)
    return part.model_copy(update={"published": path.as_posix()})


def published_values(table: RunTable, root: Path) -> Published:
    """The paper's numbers of all quantities: the table's own, and those of columns printed in other tables.

    Raises:
        ConfigError: a missing file, a missing column, or a value that is neither a number nor a dash.
    """
    found = {} if table.published is None else read_published(table.published, root)
    rows = {row.name for row in table.rows}
    for column in table.columns:
        if column.published is not None:
            others = read_published(column.published, root)
            found |= {cell: number for cell, number in others.items() if cell[0] in rows and cell[1] == column.name}
    return found


def read_published(file: str, root: Path) -> Published:
    """Read the cells of a long-format CSV; deviations are optional.

    Raises:
        ConfigError: see `published_values`.
    """
    path = root / file
    lines = read_csv(path, ("row", "column", "metric", "value"), "published values")
    try:
        return {(line["row"], line["column"], line["metric"]): _printed(line, file) for line in lines}
    except ValueError as error:
        raise ConfigError(f"published values {path}: {error}; write a number, or - where the paper has none.") from None


def _printed(line: Mapping[str, str], file: str) -> Printed:
    """Parse a cell: a number, or a text if its unit says so."""
    if line.get("unit") == "text":
        return Printed(None, None, file, None if line["value"] == "-" else line["value"])
    return Printed(_number(line["value"]), _number(line.get("deviation", "-")), file)


def _number(text: str) -> float | None:
    if text.strip() in ("-", ""):
        return None
    value = float(text)
    if math.isnan(value) and text.strip().lower() != "nan":
        raise ValueError(f"{text!r} is not a number")
    return value


def check_published(table: RunTable, root: Path) -> None:
    """Check that the paper's numbers exist and refer to rows and columns of the table.

    Raises:
        ConfigError: they do not.
    """
    where = f"{table.file}: tables.{table.id}.published"
    rows, columns = ({part.name: part for part in parts} for parts in (table.rows, table.columns))
    try:
        published = published_values(table, root)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for (row, column, _), number in published.items():
        if number.file == table.published:
            lookup(rows, row, f"{where}: unknown row")
            lookup(columns, column, f"{where}: unknown column")
