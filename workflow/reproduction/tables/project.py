"""The tables expanded into runs: a cell of a table is one run per seed and metric; equal cells are computed once.

A slot of the configuration names the checkpoint for a column and scales the papers' group sizes and outlier counts to
it. Nothing here computes or imports torch.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from reproduction import tasks
from reproduction.identity.names import DIGITS, RESULTS, Results, names_of
from reproduction.identity.run import Portion, Run, corpora_of, named
from reproduction.metrics.settings import Metric
from reproduction.tables.configuration import Config, Slot
from reproduction.tables.fitting import Fitting, Known, fit, model_of, settings_folder
from reproduction.tables.quantities import Quantity, called, endpoints
from reproduction.tables.resolution import resolve, resolve_metric, with_less_text
from reproduction.tables.tables import Column, Published, Row, RunTable, Table, name_of, published_values
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import (
    CheckpointError,
    ConfigError,
    CorpusError,
    RecipeError,
    TaskError,
    UnsupportedArchitectureError,
    lookup,
    nearest,
)
from rotquant.foundation.files import canonical_json, folder_size, short_hash
from rotquant.models.architectures import Architecture
from rotquant.models.digests import checkpoint_digest
from rotquant.models.gguf.importing import described
from rotquant.models.limits import ModelLimits
from rotquant.recipes.corpus import portion as text_portion
from rotquant.recipes.recipe import Recipe
from rotquant.text import UNREAD, load_text, text_digest

T = TypeVar("T", bound=Table)

#: Checkpoints with fewer bytes are small: a cluster's job of one needs little.
SMALL = 500_000_000

#: Kinds of figures that show only runs, no printed numbers, and do not name a single column.
NAMELESS = ("magnitudes", "outliers", "token_maxima", "outlier_tokens")


@dataclass(frozen=True)
class Cell:
    """One measurement of a table: the runs whose mean it is, one per seed (only one where nothing is random).

    A cell whose metric yields several quantities (an accuracy per task) prints as many numbers, unless the table gives
    the main one its own name.
    """

    table: str
    row: str
    column: str
    runs: tuple[Run, ...]
    called: str | None = None

    @property
    def metric(self) -> Metric:
        """The metric of its runs."""
        return self.runs[0].metric

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The printed quantities, the main one first."""
        return called(self.metric, self.called)

    @property
    def endpoints(self) -> tuple[Quantity, ...]:
        """Finer quantities of its runs, if their files have them."""
        return endpoints(self.metric, self.called)


class SlotError(ConfigError):
    """A slot is wrong; the message names the configuration's file and key."""


class ImpossibleCellError(Exception):
    """A cell cannot be computed under this configuration, for this reason."""


class NotComputedError(ImpossibleCellError):
    """Nothing of a cell is computed, and its checkpoint is not here."""


@dataclass(frozen=True)
class Cells:
    """The cells of a table of runs.

    impossible: why there is none, by row and column. adapted: what a recipe became on its column's model, where that
    has no such layers or sizes. fewer: the seeds that are there, where only some are. unmeasured: names of metrics
    without a number. The last two are of checkpoints that are only shown.
    """

    cells: tuple[Cell, ...] = ()
    impossible: Mapping[tuple[str, str], str] = field(default_factory=dict)
    adapted: Mapping[tuple[str, str], str] = field(default_factory=dict)
    fewer: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Project:
    """The configuration and the tables of all sources, expanded on demand. Paths inside are relative to `root`.

    left_out: tables that have no column under this configuration, by id, and why.
    fits, named: of a plan, how recipes fit their models (what is not in it fits) and the names of results. None finds
        them out. With names, cells of a checkpoint that is only shown have the runs that are computed.
    known: what earlier projects found out. place: the folder of results, by default `results`.
    """

    root: Path
    config: Config
    tables: dict[str, Table]
    left_out: Mapping[str, str] = field(default_factory=dict)
    fits: Mapping[str, Fitting] | None = None
    named: Mapping[str, str] | None = None
    known: Known = field(default_factory=Known)
    place: Path | None = None

    def table(self, name: str) -> Table:
        """Find a table by id.

        Raises:
            ConfigError: for an unknown table; the sentence lists the nearest ones, or says why it is left out.
        """
        if name in self.left_out:
            raise ConfigError(f"{name}: {self.left_out[name]}")
        return lookup(self.tables, name, "unknown table")

    def of(self, kind: type[T]) -> dict[str, T]:
        """The tables of a kind by id."""
        return {name: table for name, table in self.tables.items() if isinstance(table, kind)}

    def one(self, kind: type[T], name: str) -> T:
        """Find a table of a kind by id.

        Raises:
            ConfigError: there is none; the message lists the nearest ones.
        """
        return lookup(self.of(kind), name, "unknown table")

    def columns(self, table: RunTable) -> tuple[str, ...]:
        """The columns of a table that are computed under this configuration.

        A checkpoint that is only shown has one where a result on it is of more than the unquantized model.
        """
        asked = self.asked(table)
        if not any(self._lists_results_alone(table, name) for name in asked):
            return asked
        there = {cell.column for cell in self.cells(table.id)}
        return tuple(name for name in asked if name in there or not self._lists_results_alone(table, name))

    def asked(self, table: RunTable) -> tuple[str, ...]:
        """The columns of a table that the configuration asks for."""
        slots = self.config.slots
        return tuple(one.name for one in table.columns if one.slot in slots and slots[one.slot].compute)

    def _lists_results_alone(self, table: RunTable, column: str) -> bool:
        """Whether a column's cells are those with results, which a plan says of a checkpoint that is only shown."""
        return self.named is not None and self.is_only_shown(self.slot(table, column).name)

    def slot(self, table: RunTable, column: str) -> Slot:
        """The slot that a table's column is computed on."""
        return self.config.slot(table.column(column).slot)

    def quantities(self, table: RunTable) -> tuple[Quantity, ...]:
        """The quantities of a table's cells, in the order of its metrics, each metric's main quantity first."""
        found = (quantity for cell in self.cells(table.id) for quantity in cell.quantities)
        return tuple({quantity.name: quantity for quantity in found}.values())

    def endpoints(self, table: RunTable) -> tuple[Quantity, ...]:
        """Finer quantities of a table's runs (`quantities.endpoints`)."""
        found = (quantity for cell in self.cells(table.id) for quantity in cell.endpoints)
        return tuple({quantity.name: quantity for quantity in found}.values())

    def picture(self, table: RunTable) -> str | None:
        """The table whose figure a table shows: its own, or an earlier table's where both are the same.

        They are the same if both are drawn alike from the same runs of one column, whose name is not in the figure.
        """
        found = self._drawn_from(table)
        first = (other.id for other in self.of(RunTable).values() if found and self._drawn_from(other) == found)
        return next(first, table.id) if table.figure else None

    def _drawn_from(self, table: RunTable) -> tuple[Any, ...] | None:
        """The data that decides a figure of runs; None if the figure has column names or printed numbers."""
        if table.figure is None or table.figure.kind not in NAMELESS or len(self.columns(table)) != 1:
            return None
        looks = table.figure.model_copy(update={"caption": ""})
        return looks, *((cell.row, [run.key for run in cell.runs]) for cell in self.cells(table.id))

    def cells(self, name: str) -> tuple[Cell, ...]:
        """The cells of a table, metric by metric and row by row; empty where they are no runs. Raises as `expanded`."""
        return self.expanded(name).cells

    @functools.cache  # noqa: B019 - a project lives as long as the process
    def expanded(self, name: str) -> Cells:
        """The cells of a table of runs, with those that are not possible and why; empty for other tables.

        Raises:
            ConfigError, RecipeError, CheckpointError: an unknown slot or method, an impossible recipe, a bad
            checkpoint.
        """
        table = self.table(name)
        if not isinstance(table, RunTable):
            return Cells()
        cells: list[Cell] = []
        found: dict[bool, dict[tuple[str, str], str]] = {True: {}, False: {}}
        fewer: dict[tuple[str, str], str] = {}
        absent: dict[tuple[str, str, str], str] = {}
        added = {row.name for row in self.config.rows.get(name, ())}
        for metric, row, place in itertools.product(table.metrics, table.rows, self.asked(table)):
            column = table.column(place)
            if name_of(metric) not in (column.metrics or (name_of(metric),)):
                continue
            try:
                with _written_in(self.config.where("rows", name) if row.name in added else table.file):
                    asked, runs, sentence = self._runs(table, metric, row, column)
                cells.append(Cell(table.id, row.name, place, runs, metric.get("called")))
                if len(runs) < asked:
                    fewer[row.name, place] = ", ".join(str(run.seed) for run in runs)
            except NotComputedError as reason:
                absent[name_of(metric), row.name, place] = str(reason)
                continue
            except ImpossibleCellError as reason:
                runs, sentence = (), str(reason)
            if sentence:
                found[bool(runs)][row.name, place] = sentence
        there = {(cell.row, cell.column) for cell in cells}
        found[False] |= {(row, place): why for (_, row, place), why in absent.items() if (row, place) not in there}
        bare = {place for *_, place in absent} - {cell.column for cell in cells if not cell.runs[0].recipe.is_baseline}
        cells = [cell for cell in cells if cell.column not in bare]
        unmeasured = {name for name, *_ in absent} - {cell.called or cell.metric.kind for cell in cells}
        return Cells(tuple(cells), found[False], found[True], fewer, tuple(sorted(unmeasured)))

    def remarks(self, table: RunTable) -> tuple[str, ...]:
        """Sentences on a table's cells that are not possible or not computed here, on rows that run otherwise than
        written, and on texts that are not what their names say."""
        expanded, columns = self.expanded(table.id), self.asked(table)
        read = {name for cell in expanded.cells for run in cell.runs for name, *_ in run.portions}
        return (
            *(f"Not possible here: {rows}: {why}" for rows, why in _by_sentence(expanded.impossible, columns)),
            *(f"Not computed for any row: {name}." for name in expanded.unmeasured),
            *(
                f"Fewer seeds than other rows: {rows}: {seeds}."
                for rows, seeds in _by_sentence(expanded.fewer, columns)
            ),
            *(f"Adapted to the model: {rows}: {how}" for rows, how in _by_sentence(expanded.adapted, columns)),
            *(
                f"Text {name}: {self.config.corpora[name].about}"
                for name in sorted(read)
                if self.config.corpora[name].about
            ),
        )

    def lacking(self, table: RunTable) -> tuple[str, ...]:
        """Sentences on columns of a table that the configuration has no slot for."""
        slots = {column.slot: column.name for column in table.columns if column.slot not in self.config.slots}
        return tuple(f"Left out: column {name}: {no_slot(self.config, slot)}" for slot, name in slots.items())

    @cached_property
    def fittings(self) -> dict[str, Fitting | None]:
        """How the recipes expanded so far fit their models; None where they fit as they are."""
        return {}

    @cached_property
    def models(self) -> dict[str, tuple[Architecture, ModelLimits]]:
        """Layers and limits of the checkpoints that were asked for that, by digest."""
        return {}

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Every run of every table by key."""
        return {run.key: run for name in self.tables for cell in self.cells(name) for run in cell.runs}

    @cached_property
    def weights(self) -> dict[str, tuple[Run, ...]]:
        """The runs on each set of stored weights, by the weights' key."""
        return _by_key(self.runs.values(), lambda run: run.weights_key)

    @cached_property
    def rotations(self) -> dict[str, tuple[Run, ...]]:
        """The runs on each learned rotation, by the rotation's key."""
        return _by_key(self.runs.values(), lambda run: run.rotation_key)

    @functools.cache  # noqa: B019
    def is_small(self, checkpoint: str) -> bool:
        """Whether a checkpoint is a folder here of less than `SMALL`."""
        place = self.checkpoint_path(checkpoint)
        local = place != checkpoint or Path(checkpoint).is_absolute()
        return local and folder_size(described(place), "*.safetensors") < SMALL

    @cached_property
    def task_sets(self) -> dict[str, Run]:
        """The first run of each set of zero-shot tasks, by the set's key."""
        found: dict[str, Run] = {}
        for run in self.runs.values():
            key = task_set(run)
            if key is not None:
                found.setdefault(key, run)
        return found

    @cached_property
    def results(self) -> Results:
        """Where this project's results lie."""
        return Results(self.place or self.root / RESULTS, self.names)

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of each result by its key, from the plan or else the present code and tasks."""
        if self.named is not None:
            return dict(self.named)
        contents = {key: _content(cast(ZeroShot, run.metric)) for key, run in self.task_sets.items()}
        names = {key: f"{key}-{short_hash(content, DIGITS)}" for key, content in contents.items()}
        of_runs = {key: names[tasks] for key, run in self.runs.items() if (tasks := task_set(run))}
        return names | names_of(self.runs, self.weights, self.rotations, of_runs)

    @cached_property
    def places(self) -> dict[str, Cell]:
        """The first cell that each run belongs to, by the run's key."""
        found: dict[str, Cell] = {}
        for name in self.tables:
            for cell in self.cells(name):
                for run in cell.runs:
                    found.setdefault(run.key, cell)
        return found

    def published(self, table: RunTable) -> Published:
        """The paper's numbers by (row, column, quantity)."""
        return published_values(table, self.root)

    @functools.cache  # noqa: B019
    def digest(self, slot: str) -> str:
        """Digest of the checkpoint that a slot names.

        Raises:
            SlotError: it does not exist and the slot has no digest, it is no checkpoint, or its digest differs from
                the slot's.
        """
        told = self.config.slot(slot)
        if told.digest is not None and self.is_only_shown(slot):
            return told.digest
        place = self.checkpoint_path(told.checkpoint)
        try:
            found = checkpoint_digest(place)
        except (CheckpointError, UnsupportedArchitectureError) as error:
            raise SlotError(f"{self.config.where('slots', slot, 'checkpoint')}: {error}") from None
        if told.digest not in (None, found):
            raise SlotError(f"{self.config.where('slots', slot, 'digest')}: the digest of {place} is {found}.")
        return found

    @functools.cache  # noqa: B019
    def is_only_shown(self, slot: str) -> bool:
        """Whether a slot's checkpoint is known by its digest alone: results on it are shown, none is computed."""
        told = self.config.slot(slot)
        if told.digest is None:
            return False
        place = Path(self.checkpoint_path(told.checkpoint))
        return not (place.is_file() or any(place.glob("*.safetensors")))

    @functools.cache  # noqa: B019
    def text(self, portion: Portion) -> str:
        """Digest of a text, or of its beginning; where it cannot be read now what the corpus says, or `unread`."""
        corpus, split, characters = portion
        spec = self.config.corpora[corpus]
        found = text_digest(spec, split, characters)
        return dict(spec.digests).get(text_portion(split, characters), UNREAD) if found == UNREAD else found

    @functools.cache  # noqa: B019
    def unreadable(self, portion: Portion) -> str:
        """Why a text of this machine cannot be read; empty for one that can be, and for the hub's.

        Texts lie relative to the working folder, so nothing is said where that is not the project's.
        """
        corpus, split, _ = portion
        spec = self.config.corpora[corpus]
        away = Path.cwd() != self.root.resolve() or any(part.source == "hub" for part in spec.sources)
        if away or self.text(portion) != UNREAD:
            return ""
        try:
            load_text(spec, split, max_characters=1)
        except CorpusError as error:
            return str(error)
        return ""

    def run_of(self, data: dict[str, Any]) -> Run:
        """A run with the digests of the texts that it reads.

        Raises:
            ValidationError: it is not valid.
        """
        run = Run.model_validate(data)
        return run.model_copy(update={"texts": {named(*portion): self.text(portion) for portion in run.portions}})

    def fitted(self, recipe: Recipe, metric: Metric, slot: Slot, fixed: Collection[str]) -> Fitting:
        """A recipe as it runs on a slot's model (`tables.fitting.fit`).

        Raises:
            ConfigError: the model's config.json is damaged, or no adapter knows its family.
        """
        if self.fits == {}:
            return Fitting(recipe=recipe)
        digest = self.digest(slot.name)
        data = [digest, recipe.model_dump(mode="json"), metric.model_dump(mode="json"), *fixed]
        name = short_hash(canonical_json(data))
        if self.fits is not None:
            return self.fits.get(name) or Fitting(recipe=recipe)
        place = self.checkpoint_path(slot.checkpoint)
        try:
            if settings_folder(place, digest) is None:  # the next plan asks again
                return Fitting(recipe=recipe)
            if name in self.known.fits:
                found = self.known.fits[name]
            else:
                found = fit(recipe, metric, self.model(place, digest), fixed)
        except (CheckpointError, UnsupportedArchitectureError) as error:
            raise ConfigError(f"{self.config.where('slots', slot.name, 'checkpoint')}: {error}") from None
        self.fittings[name] = found if found and found.sentence else None
        return found or Fitting(recipe=recipe)

    def model(self, place: str, digest: str) -> tuple[Architecture, ModelLimits] | None:
        """Layers and limits of a checkpoint at a place, remembered from plan to plan; None where it is not here.

        Raises:
            CheckpointError, UnsupportedArchitectureError: as `model_of`.
        """
        model = self.known.models.get(digest) or model_of(place, digest)
        self.models.update({digest: model} if model else {})
        return model

    def checkpoint_path(self, checkpoint: str) -> str:
        """A local checkpoint folder as an absolute path; a hub id unchanged.

        A missing path is a hub id only if it has the form of one; if a folder has the owner's name, it also needs a
        revision, since it may be a mistyped path.
        """
        local = self.root / checkpoint
        looks_local = checkpoint.count("/") != 1 or checkpoint.startswith((".", "/", "~"))
        mistyped = local.parent.is_dir() and "@" not in checkpoint
        return str(local) if local.exists() or looks_local or mistyped else checkpoint

    @functools.cache  # noqa: B019 - the same for each metric of a table
    def _recipe(self, table_name: str, row_name: str, column_name: str) -> Recipe:
        """The recipe of a row in a column, with the sizes and amounts of the column's slot."""
        table = self.one(RunTable, table_name)
        where = f"table {table.id}, row {row_name}, column {column_name}"
        (row,) = (one for one in table.rows if one.name == row_name)
        slot = self.config.slot(table.column(column_name).slot)
        recipe = resolve(row.computed(where, column_name), slot, where, row.changes(column_name))
        return recipe if table.text_share == 1 else with_less_text(recipe, table.text_share, where)

    def _runs(
        self, table: RunTable, metric: dict[str, Any], row: Row, column: Column
    ) -> tuple[int, tuple[Run, ...], str]:
        """How many runs a cell has, those that are asked for, and what its recipe became on the model, if anything.

        Raises:
            ImpossibleCellError: there can be none.
        """
        where = f"table {table.id}, row {row.name}, column {column.name}"
        slot = self.config.slot(column.slot)
        said = row.changes(column.name)
        recipe = self._recipe(table.id, row.name, column.name)
        fields = {name: value for name, value in metric.items() if name != "called"}
        if metric["kind"] == "zero_shot" and not slot.zero_shot:
            raise ImpossibleCellError("this configuration has no section zero_shot.")
        measured = resolve_metric({**fields, **row.metrics.get(metric["kind"], {})}, slot, where)
        lacking = sorted(corpora_of(recipe, measured) - self.config.corpora.keys())
        if lacking:
            raise ImpossibleCellError(
                f"corpus {lacking[0]!r} is not defined under corpora{nearest(lacking[0], [*self.config.corpora])}."
            )
        found = self.fitted(recipe, measured, slot, sorted(said.get("rotation") or ()))
        if found.recipe is None:
            raise ImpossibleCellError(found.sentence)
        dtypes = self.config.dtypes
        data = {
            "checkpoint": slot.checkpoint,
            "checkpoint_digest": self.digest(slot.name),
            "recipe": found.recipe,
            "metric": measured,
            "corpora": self.config.corpora,
            "dtype": dtypes.get(table.id, dtypes.get(table.paper, self.config.dtype)),
        }
        try:
            runs = self._repeated(self.run_of(data), self.seeds(table))
        except ValidationError as error:
            raise ConfigError(f"{where}: {first_problem(error)}.") from None
        for portion in runs[0].portions:
            if problem := self.unreadable(portion):
                raise ImpossibleCellError(problem)
        once = {run.key: run for run in runs}
        every = len(once)
        if self._lists_results_alone(table, column.name):
            once = {key: run for key, run in once.items() if self.results.run(key).exists()}
            if not once:
                raise NotComputedError("not computed, and the checkpoint is not here.")
        return every, tuple(once.values()), found.sentence

    @staticmethod
    def _repeated(run: Run, seeds: Collection[int]) -> list[Run]:
        """A run with each seed; once, with seed 0, where nothing is random."""
        return [run.model_copy(update={"seed": seed}) for seed in seeds] if run.recipe.is_random else [run]

    def seeds(self, table: RunTable) -> tuple[int, ...]:
        """The seeds of a table's random runs."""
        if (own := self.config.table_seeds.get(table.id)) is not None:
            return tuple(range(own))
        if table.repeats == "trials" and self.config.trials is not None:
            return tuple(range(self.config.trials))
        return self.config.seeds[:1] if table.repeats == "once" else self.config.seeds


@contextmanager
def _written_in(where: str) -> Iterator[None]:
    """Put the place where a row is written before the message of an error in it, but not before an error in a slot."""
    try:
        yield
    except SlotError:
        raise
    except (ConfigError, RecipeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def no_slot(config: Config, name: str) -> str:
    """Why a column is left out whose slot the configuration lacks."""
    return f"this configuration has no slot {name!r}{nearest(name, [*config.slots])}."


def _by_sentence(found: Mapping[tuple[str, str], str], columns: Collection[str]) -> Iterator[tuple[str, str]]:
    """Rows that a sentence is about, with their columns where it is not about all, and the sentence."""
    places: dict[str, dict[str, list[str]]] = {}
    for (row, column), sentence in found.items():
        places.setdefault(sentence, {}).setdefault(row, []).append(column)
    for sentence, rows in places.items():
        named = []
        for row, where in rows.items():
            name = f'"{row}"' if "," in row else row
            named.append(name if len(where) == len(columns) else f"{name} ({', '.join(where)})")
        yield ", ".join(named), sentence


def _by_key(runs: Iterable[Run], key: Callable[[Run], str | None]) -> dict[str, tuple[Run, ...]]:
    """Group runs by a key that some of them have."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if (name := key(run)) is not None:
            found.setdefault(name, []).append(run)
    return {name: tuple(members) for name, members in found.items()}


def _content(metric: ZeroShot) -> str:
    """What a set of tasks is, as far as this machine has it."""
    try:
        return tasks.folder_name(metric)
    except TaskError:
        return "not here"  # the job that makes them says what is missing


def task_set(run: Run) -> str | None:
    """The key of the tasks that a run is measured on; None for other metrics."""
    return short_hash(canonical_json(run.metric.model_dump(mode="json"))) if run.metric.kind == "zero_shot" else None
