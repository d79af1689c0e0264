"""MLflow's view of a paper's tables: a run for each, and below it the runs and the learned parts for them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reproduction.frame.values import collect
from reproduction.identity.names import HISTORY_FILE
from reproduction.identity.run import Run
from reproduction.render.tracking.experiments import writer
from reproduction.render.tracking.runs import NOTE, PARENT, Logged, LoggedEntry, ShownExperiment
from reproduction.render.tracking.store import Store, opened
from reproduction.render.tracking.views import PERCENT, TABLE, by_model, by_row
from reproduction.run.results import RunResult, read_result, rotations_of
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity, endpoints, quantities
from reproduction.tables.tables import RunTable
from reproduction.tables.targets import load_targets
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_json
from rotquant.foundation.progress import task, track
from rotquant.recipes.recipe import Recipe

Results = Mapping[str, RunResult]
"""The run results of a table by key."""


def log_tables(project: Project, tables: Sequence[RunTable], read: Mapping[str, Results] | None = None) -> list[Logged]:
    """Make MLflow show the runs of computed tables: each once, those of an older result deleted.

    Args:
        read: the run results of these tables by the tables' ids, if read already.

    Raises:
        ResultError: a run is not computed yet, or its file is damaged.
        TrackingError: the store cannot be reached or written.
    """
    found = read or {table.id: collect(project, table)[1] for table in tables}
    with task("MLflow"), opened(project.root, writer(project)) as store:
        papers = {name: Paper(store, project, name) for name in dict.fromkeys(table.paper for table in tables)}
        for table in tables:
            papers[table.paper].show_table(table, found[table.id])
        for paper in papers.values():
            paper.finish()
        return [
            papers[table.paper].logged(table.id, found[table.id], rotations_of(found[table.id].values()))
            for table in tables
        ]


class Paper(ShownExperiment):
    """The experiment of a paper with tables of accuracy.

    cells: where its tables print each run, and use its rotations and weights, from `_cells`.
    references: scores of unquantized models, by the key of their run.
    """

    def __init__(self, store: Store, project: Project, paper: str) -> None:
        super().__init__(store, project, paper)
        self.cells = _cells(project, paper)
        self.references: dict[str, float] = {}

    def show_table(self, table: RunTable, results: Results) -> None:
        """Show a table: its own run, the runs of its cells, and their learned parts step by step."""
        self._parent(table)
        for key, result in track(results.items(), table.id, "run"):
            if key not in self.shown:
                self.show(self._run(key, result))
        places, rotations = self.project.results, rotations_of(results.values())
        learned = {key: (record, places.rotation(key)) for key, record in rotations.items()}
        trained = {one.run.weights_key: one for one in results.values() if one.run.weights_key}
        learned |= {key: (_of_weights(one), places.weights(key)) for key, one in trained.items()}
        for key, (record, folder) in learned.items():
            path = folder / HISTORY_FILE
            if key not in self.shown and path.exists() and (history := read_json(path, "history of a training")):
                self.show(self._training(key, record, history))

    def _parent(self, table: RunTable) -> str:
        """The table's own MLflow run, the same for all renderings."""
        if table.id in self.shown:
            return self.shown[table.id]
        note = (
            f"{table.caption}\n\nAll runs of this table, those shown under other tables included: "
            f"search for ``tags.`{TABLE}.{table.id}` != ''``."
        )
        tags = {"paper": self.paper, "title": table.title, NOTE: note}
        return self.show(LoggedEntry(table.id, "table", table.id, tags))

    def _run(self, key: str, result: RunResult) -> LoggedEntry:
        run = result.run
        short = {"bits": _bits(run.recipe), "online": _online(run.recipe)}
        fields = {**self._short(key), **short, **run.model_dump(mode="json")}
        fields["source"] = {"checkpoint": fields.pop("checkpoint"), "digest": fields.pop("checkpoint_digest")}
        main, *more = (*quantities(run.metric), *endpoints(run.metric))
        numbers = {one.key: result.metrics[one.key] for one in (main, *more) if one.key in result.metrics}
        numbers |= self._headline(main, result, str(fields["model"]))
        return LoggedEntry(
            key,
            "run",
            f"{' / '.join(self._first_cell(key))} / {run.metric.kind} / seed {run.seed}",
            {
                **self._tags(key, run.seed),
                **short,
                "metric": run.metric.kind,
                "better": main.better,
                "weights_key": run.weights_key,
                "rotation_key": run.rotation_key,
            },
            [
                read_json(self.project.results.run(key), "run file"),
                fields,
                {name: str(one) for name, one in numbers.items()},
            ],
            result.provenance,
            numbers,
            notes={
                **{name: one for name, one in result.metrics.items() if name not in numbers},
                "seconds": result.seconds,
            },
            fields=fields,
        )

    def _headline(self, main: Quantity, result: RunResult, model: str) -> dict[str, float]:
        """Headline metrics of runs: how much worse than the unquantized model in percent, where that is computed.

        They have a name for all models, and one of this model alone. A quantity that is compared in its own unit, and
        one without a reference, has only the second.
        """
        value, reference = result.value, self._unquantized(result.run)
        if not (main.relative and math.isfinite(reference) and reference):
            return {by_model(main.name, model): value}
        name = f"{main.name} {'rise' if main.better == 'lower' else 'drop'}{PERCENT}"
        percent = 100 * main.loss(value, reference) / abs(reference)
        return {name: percent, by_model(name, model): percent}

    def _unquantized(self, run: Run) -> float:
        """The same metric of the same model unquantized; nan without a file."""
        key = run.unquantized.key
        if key not in self.references:
            try:
                self.references[key] = read_result(self.project.results.run(key)).value
            except ResultError:
                self.references[key] = math.nan
        return self.references[key]

    def _training(self, key: str, record: dict[str, Any], history: list[dict[str, Any]]) -> LoggedEntry:
        """A learned rotation or trained weights, with the numbers of every step."""
        kind, what = ("rotation", "learned rotations") if "learning" in record else ("weights", "trained weights")
        short = self._short(key)
        source = {"checkpoint": record["checkpoint"], "digest": record["checkpoint_digest"]}
        settings = {name: record[name] for name in ("seed", "learning", "methods", "digest") if name in record}
        return LoggedEntry(
            key,
            kind,
            f"{what} / {' / '.join(self._first_cell(key))} / seed {record['seed']}",
            self._tags(key, record["seed"]),
            [record, history, short],
            record,
            history=[{**step, **_single(step, str(short["model"]))} for step in history],
            notes={"seconds": record["seconds"]},
            fields={**short, **settings, "source": source},
        )

    def _first_cell(self, key: str) -> tuple[str, str]:
        """Row and column of the first cell, in the first table, that uses a key."""
        return next(iter(self.cells[key].values()))[0]

    def _tags(self, key: str, seed: int) -> dict[str, object]:
        """The tags of a run or of its learned parts: its kind, and its places in tables."""
        first = self.project.one(RunTable, next(iter(self.cells[key])))
        cells = {f"{TABLE}.{table}": "; ".join(map(" / ".join, cells)) for table, cells in self.cells[key].items()}
        rows = {by_row(name): "; ".join(dict(cells)) for name, cells in self.cells[key].items()}
        return {**cells, **rows, PARENT: self._parent(first), "paper": self.paper, "seed": seed, **self._short(key)}

    def _short(self, key: str) -> dict[str, object]:
        """Short labels of runs for a table's column or an axis, where paths and recipes are too long."""
        first = self.project.one(RunTable, next(iter(self.cells[key])))
        row, column = self._first_cell(key)
        return {"method": first.row(row).method, "model": first.column(column).slot}


def _of_weights(result: RunResult) -> dict[str, Any]:
    """The record of a result's stored weights, with their method."""
    settings = result.run.recipe.model_dump(mode="json")["methods"]
    return {**(result.weights or {}), "seed": result.run.seed, "methods": settings}


def _single(step: dict[str, Any], model: str) -> dict[str, float]:
    """The loss of a step under a name of one model alone, whose chart has the curves of its rows."""
    return {by_model("loss", model): step["loss"]} if "loss" in step else {}


def _cells(project: Project, paper: str) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Places where the paper's tables print a run and use its rotations and weights: {key: {table: [(row, column)]}}.

    The paper's own tables come first.
    """
    listed = [target.id for target in load_targets(project.root).targets]
    names = [name for name, table in project.of(RunTable).items() if table.paper == paper]
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=lambda name: listed.index(name) if name in listed else len(listed)):
        for cell in project.cells(name):
            for key in filter(None, (key for run in cell.runs for key in (run.key, run.rotation_key, run.weights_key))):
                places = found.setdefault(key, {}).setdefault(name, [])
                if (cell.row, cell.column) not in places:
                    places.append((cell.row, cell.column))
    return found


def _bits(recipe: Recipe) -> str:
    """Bits of weights, inputs of linear layers and KV cache, e.g. 4-4-4; 16 means not quantized."""
    weights = None if recipe.weights is None else recipe.weights.scheme
    keys, values = (16 if scheme is None else scheme.bits for scheme in (recipe.keys, recipe.values))
    cache = f"{keys}" if keys == values else f"{keys}/{values}"
    return "-".join([*(str(16 if scheme is None else scheme.bits) for scheme in (weights, recipe.activations)), cache])


def _online(recipe: Recipe) -> str:
    """The transforms of activations at run time, e.g. heads+R3+R4; `none` where there are none."""
    turned = {one.name: one.online for one in recipe.transforms}
    moved = {name: "transformation" in one.roles and one.acts_beyond_quantizers for name, one in recipe.methods.items()}
    return "+".join(name for name, online in (turned | moved).items() if online) or "none"
