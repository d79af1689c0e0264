"""Tables as data and their expansion into runs: a cell of a table is one run per seed.

workflow/papers/<paper>/tables.yaml says what a table asks for; a slot of the configuration says which checkpoint a
column stands for and scales the papers' group sizes and outlier counts to it. Equal cells of different tables give
equal runs, which are computed once. Nothing here computes and nothing here imports torch.
"""

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rotquant.checkpoints import checkpoint_digest
from rotquant.configuration import Config, Slot, find_root, load_config, read_yaml, validate
from rotquant.corpora import CorpusSpec
from rotquant.errors import ConfigError, RotquantError, nearest
from rotquant.presets import preset
from rotquant.recipes import Recipe, Run, first_problem, override
from rotquant.schemes import Frozen

PAPERS = Path("workflow/papers")
TARGETS = Path("config/targets.yaml")


class Row(Frozen):
    """A row as printed: its name, what stands beside it, and its recipe as a preset with changes."""

    name: str
    labels: tuple[str | int, ...] = ()
    method: str
    recipe: dict[str, Any] = Field(default_factory=dict)


class Claim(Frozen):
    """A statement of the paper about a table, with its section and the check that decides it (`reporting.claims`)."""

    text: str
    section: str
    note: str | None = None
    columns: tuple[str, ...] | None = None
    check: dict[str, dict[str, Any]]


class Figure(Frozen):
    """The figure that goes with a table."""

    kind: str
    caption: str


class Table(Frozen):
    """One table or figure of a paper. `published` is the path of the paper's numbers."""

    id: str
    paper: str
    paper_title: str
    title: str
    section: str
    caption: str
    notes: tuple[str, ...] = ()
    metric: dict[str, Any]
    columns: tuple[str, ...]
    label_columns: tuple[str, ...] = ()
    baseline: str
    rows: tuple[Row, ...]
    published: str
    claims: tuple[Claim, ...]
    figure: Figure | None = None

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            ConfigError: for an unknown row; the sentence lists the nearest ones.
        """
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise ConfigError(f"table {self.id}: unknown row {name!r}{nearest(name, list(rows))}.")
        return rows[name]


@dataclass(frozen=True)
class Cell:
    """One printed number: the runs whose mean it is, one per seed (one alone where nothing is random)."""

    table: str
    row: str
    column: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Project:
    """The configuration and all tables, expanded on demand. Paths inside are relative to `root`."""

    root: Path
    config: Config
    tables: dict[str, Table]

    def table(self, name: str) -> Table:
        """The table of that id.

        Raises:
            ConfigError: for an unknown table; the sentence lists the nearest ones.
        """
        if name not in self.tables:
            raise ConfigError(f"unknown table {name!r}{nearest(name, list(self.tables))}.")
        return self.tables[name]

    def columns(self, table: Table) -> tuple[str, ...]:
        """The columns of a table that this configuration computes."""
        return tuple(name for name in table.columns if self.config.slot(name).compute)

    @functools.cache  # noqa: B019 - a project lives as long as the process
    def cells(self, name: str) -> tuple[Cell, ...]:
        """The cells of a table, row by row.

        Raises:
            ConfigError, RecipeError, CheckpointError: an unknown slot or method, an impossible recipe, a bad
            checkpoint.
        """
        table = self.table(name)
        return tuple(
            Cell(table.id, row.name, column, self._runs(table, row, self.config.slot(column)))
            for row in table.rows
            for column in self.columns(table)
        )

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Every run of every table by key."""
        return {run.key: run for name in self.tables for cell in self.cells(name) for run in cell.runs}

    @cached_property
    def batches(self) -> dict[str, dict[str, tuple[Run, ...]]]:
        """The runs that need stored weights, as {batch: {weights key: runs}}, in the order of the tables.

        A batch holds the weights that differ by their seed alone. One job makes them, since starting a process costs
        several seconds; its key is the weights key that seed 0 has.
        """
        batches: dict[str, dict[str, tuple[Run, ...]]] = {}
        for run in self.runs.values():
            batch = self.batch_of(run)
            if batch is not None:
                members = batches.setdefault(batch, {})
                members[run.weights_key] = (*members.get(run.weights_key, ()), run)
        return batches

    def batch_of(self, run: Run) -> str | None:
        """The batch of a run's weights, None for a run that needs none."""
        return None if run.weights_key is None else Run.model_validate({**run.model_dump(), "seed": 0}).weights_key

    @cached_property
    def cells_of_runs(self) -> dict[str, tuple[str, str]]:
        """The first (row, column) that each run belongs to."""
        places: dict[str, tuple[str, str]] = {}
        for name in self.tables:
            for cell in self.cells(name):
                for run in cell.runs:
                    places.setdefault(run.key, (cell.row, cell.column))
        return places

    def run(self, key: str) -> Run:
        """The run with that key.

        Raises:
            ConfigError: when no cell of any table has it under this configuration.
        """
        if key not in self.runs:
            raise ConfigError(
                f"no table asks for a run {key!r} under this configuration; `rotquant runs list` prints all keys."
            )
        return self.runs[key]

    def batch(self, key: str) -> dict[str, tuple[Run, ...]]:
        """The weights of a batch: their keys and the runs that use each.

        Raises:
            ConfigError: when no run uses them under this configuration.
        """
        if key not in self.batches:
            raise ConfigError(
                f"no run uses weights {key!r} under this configuration; `rotquant runs list` prints all keys."
            )
        return self.batches[key]

    def published(self, table: Table) -> dict[tuple[str, str], float | None]:
        """The paper's numbers by (row, column); None where the paper prints a dash."""
        return read_published(self.root / table.published, table.metric["kind"])

    @functools.cache  # noqa: B019
    def digest(self, slot: str) -> str:
        """Digest of the checkpoint that a slot names."""
        return checkpoint_digest(self.checkpoint_path(self.config.slot(slot).checkpoint))

    def checkpoint_path(self, checkpoint: str) -> str:
        """A local checkpoint folder as a path that is valid from anywhere; a hub id as it is."""
        local = self.root / checkpoint
        looks_local = checkpoint.count("/") != 1 or checkpoint.startswith((".", "/", "~"))
        return str(local) if local.exists() or looks_local else checkpoint

    def _runs(self, table: Table, row: Row, slot: Slot) -> tuple[Run, ...]:
        where = f"table {table.id}, row {row.name}, column {slot.name}"
        recipe = resolve(override(preset(row.method), row.recipe, where), slot, where)
        data = {
            "checkpoint": slot.checkpoint,
            "checkpoint_digest": self.digest(slot.name),
            "recipe": recipe,
            "metric": {**slot.evaluation, **table.metric},
            "corpora": self._corpora(where),
            "dtype": self.config.dtype,
        }
        try:
            runs = [Run.model_validate({**data, "seed": seed}) for seed in self.config.seeds]
        except ValidationError as error:
            raise ConfigError(f"{where}: {first_problem(error)}.") from None
        return tuple({run.key: run for run in runs}.values())

    def _corpora(self, where: str) -> dict[str, CorpusSpec]:
        try:
            return {name: CorpusSpec.model_validate(fields) for name, fields in self.config.corpora.items()}
        except ValidationError as error:
            raise ConfigError(f"{where}: corpora.{first_problem(error)}.") from None


def load_project(
    overrides: Sequence[str | Path] = (), root: Path | None = None, config: Config | None = None
) -> Project:
    """The project around the working folder: its configuration (unless given) and the tables of all papers.

    Raises:
        ConfigError: no project here, or a file that does not satisfy its schema.
    """
    root = root or find_root()
    tables: dict[str, Table] = {}
    for path in sorted((root / PAPERS).glob("*/tables.yaml")):
        for table in load_tables(path, root):
            if table.id in tables:
                raise ConfigError(f"{path}: table {table.id!r} is defined twice.")
            tables[table.id] = table
    return Project(root, config or load_config(overrides, root), tables)


def load_tables(path: Path, root: Path) -> list[Table]:
    """Read and validate one paper's tables.yaml.

    Raises:
        ConfigError: a problem with a key (the sentence names it), an unknown row in a claim, a wrong number of labels.
    """
    data = read_yaml(path)
    relative = path.relative_to(root)
    validate(data, "tables", str(relative), root)
    tables = []
    for fields in data["tables"]:
        published = str((relative.parent / fields["published"]).as_posix())
        common = {"paper": data["paper"], "paper_title": data["title"], "published": published}
        table = Table.model_validate({**fields, **common})
        _check(table, str(relative), root)
        tables.append(table)
    return tables


def resolve(recipe: Recipe, slot: Slot, where: str) -> Recipe:
    """A paper's recipe for one slot: group sizes and outlier counts scaled, amounts of data and work from the slot.

    Raises:
        ConfigError, RecipeError: a number that the slot does not map, or a value that the recipe refuses.
    """
    changes: dict[str, Any] = {}
    try:
        for part in ("activations", "keys", "values"):
            scheme = getattr(recipe, part)
            if scheme is not None and scheme.group_size is not None:
                changes[part] = {"group_size": slot.scaled("group_sizes", scheme.group_size)}
        if recipe.weights is not None and recipe.weights.scheme.group_size is not None:
            size = slot.scaled("group_sizes", recipe.weights.scheme.group_size)
            changes["weights"] = {"scheme": {"group_size": size}}
        if recipe.outliers is not None:
            changes["outliers"] = {"features": slot.scaled("outlier_features", recipe.outliers.features)}
    except RotquantError as error:
        raise ConfigError(f"{where}: {error}") from None
    if recipe.calibration is not None:
        changes["calibration"] = slot.calibration
    if recipe.omniquant is not None:
        changes["omniquant"] = slot.omniquant
    return override(recipe, changes, where)


def read_published(path: Path, metric: str) -> dict[tuple[str, str], float | None]:
    """The paper's values of one metric by (row, column) from a long-format CSV; None where the paper prints a dash.

    Raises:
        ConfigError: a missing file, a missing column, or a value that is neither a number nor a dash.
    """
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if row["metric"] == metric]
        return {(row["row"], row["column"]): _number(row["value"]) for row in rows}
    except FileNotFoundError:
        raise ConfigError(f"published values {path} do not exist.") from None
    except KeyError as error:
        raise ConfigError(f"published values {path} lack the column {error}.") from None
    except ValueError as error:
        raise ConfigError(f"published values {path}: {error}; write a number, or - where the paper has none.") from None


def load_targets(root: Path) -> dict[str, Any]:
    """config/targets.yaml: every table and figure of the papers, as {papers, kinds, targets}."""
    return read_yaml(root / TARGETS)


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
    table.row(table.baseline)
    for row in table.rows:
        if len(row.labels) != len(table.label_columns):
            raise ConfigError(
                f"{where}.rows.{row.name}: {len(row.labels)} labels for {len(table.label_columns)} label columns."
            )
    for claim in table.claims:
        for arguments in claim.check.values():
            for name in [arguments["row"], *arguments.get("than", []), *filter(None, [arguments.get("over")])]:
                table.row(name)
        for column in claim.columns or ():
            if column not in table.columns:
                raise ConfigError(f"{where}.claims: unknown column {column!r}{nearest(column, list(table.columns))}.")
    published = read_published(root / table.published, table.metric["kind"])
    for name, column in published:
        table.row(name)
        if column not in table.columns:
            raise ConfigError(f"{where}.published: unknown column {column!r}{nearest(column, list(table.columns))}.")
