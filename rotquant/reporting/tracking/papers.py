"""A paper's tables in MLflow: a parent run for each table, and below it the runs and learned rotations behind it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rotquant.foundation.files import canonical_json, read_json, short_hash
from rotquant.foundation.progress import task, track
from rotquant.recipes.recipe import Recipe
from rotquant.reporting.claims import outcomes, score
from rotquant.reporting.tracking.experiments import open_experiment
from rotquant.reporting.tracking.store import (
    KEY,
    KIND,
    RESULT,
    TABLE,
    Logged,
    Store,
    acceptable,
    delete_run,
    live_runs,
    opened,
    period,
    show,
    shows,
    update_tags,
)
from rotquant.study.project import Project
from rotquant.study.results import HISTORY_FILE, RunResult, rotation_path, rotations_of, run_path
from rotquant.study.tables import Table
from rotquant.study.targets import load_targets
from rotquant.study.values import Values, collect

if TYPE_CHECKING:
    from mlflow.entities import Metric

_PARENT = "mlflow.parentRunId"


Collected = tuple[Values, dict[str, RunResult]]
"""A table's numbers, and the run results behind them by key."""


def log_table(project: Project, table: Table, read: Collected | None = None) -> Logged:
    """Make MLflow show a table's runs, as `log_tables` does for several; `read`: its numbers, where they are known."""
    return log_tables(project, [table], read and {table.id: read})[0]


def log_tables(project: Project, tables: Sequence[Table], read: Mapping[str, Collected] | None = None) -> list[Logged]:
    """Make MLflow show the runs of computed tables: each once, those of an older result deleted.

    Args:
        read: the numbers of these tables, collected from the run files unless they are given.

    Raises:
        ResultError: a run is not computed yet, or its file is damaged.
        TrackingError: the store cannot be reached or written.
    """
    found = read or {table.id: collect(project, table) for table in tables}
    with task("MLflow"), opened(project.root) as store:
        papers = {name: _Experiment(store, project, name) for name in dict.fromkeys(table.paper for table in tables)}
        for table in tables:
            papers[table.paper].show(table, *found[table.id])
        if store.location.path is None:
            for experiment in papers.values():
                experiment.drop_doubles()
        return [papers[table.paper].logged(table, found[table.id][1]) for table in tables]


class _Experiment:
    """The experiment of one paper: its live MLflow runs, searched once, and what has been brought up to date so far.

    live: MLflow runs found at the start, by key. shown: the MLflow run id of each key (of each table's id) seen to.
    contents: the hash of what each of these shows, None for tables.
    """

    def __init__(self, store: Store, project: Project, paper: str) -> None:
        self.store, self.client, self.project, self.paper = store, store.client, project, paper
        self.id = open_experiment(store, project, paper)
        self.live = live_runs(store, self.id)
        self.cells = _cells(project, paper)
        self.shown: dict[str, str] = {}
        self.contents: dict[str, str | None] = {}

    def show(self, table: Table, values: Values, results: dict[str, RunResult]) -> None:
        """Show a table: its parent run with the outcomes of its claims, the runs and learned rotations behind it."""
        from mlflow.entities import RunTag

        counted = score(outcomes(self.project, table, values))
        claims = {"hold": counted.holds, "fail": counted.fails, "not_checkable": counted.unchecked}
        tags = [RunTag(f"claims.{name}", str(count)) for name, count in claims.items()]
        self.client.log_batch(self._parent(table), tags=tags)
        for key, result in track(results.items(), table.id, "run"):
            if key not in self.shown:
                self.shown[key] = self._show_run(key, result)
        for key, record in rotations_of(results.values()).items():
            if key not in self.shown and (learned := self._show_rotation(key, record)):
                self.shown[key] = learned

    def logged(self, table: Table, results: dict[str, RunResult]) -> Logged:
        """Where a table is that has been shown."""
        learned = rotations_of(results.values())
        runs, rotations = ({key: self.shown[key] for key in keys if key in self.shown} for keys in (results, learned))
        return Logged(self.store.uri, self.paper, self.id, self.shown[table.id], runs, rotations)

    def drop_doubles(self) -> None:
        """Of equal runs that several processes made at the same time keep one, in each of them the same one."""
        live = live_runs(self.store, self.id)
        moved: dict[str, str] = {}
        for key, content in self.contents.items():
            equal = [run.info.run_id for run in live.get(key, []) if shows(run, content)]
            kept = min(equal, default=self.shown[key])
            moved |= dict.fromkeys({*equal, self.shown[key]} - {kept}, kept)
            self.shown[key] = kept
        for run in moved:
            delete_run(self.store, run)
        for run in (run for runs in live.values() for run in runs if run.info.run_id not in moved):
            parent = run.data.tags.get(_PARENT)
            if parent in moved:
                self.client.set_tag(run.info.run_id, _PARENT, moved[parent])

    def _parent(self, table: Table) -> str:
        """The table's own MLflow run, kept over re-renderings."""
        if table.id not in self.shown:
            self.shown[table.id] = self._show_parent(table)
        return self.shown[table.id]

    def _show_parent(self, table: Table) -> str:
        note = (
            f"{table.caption}\n\nAll runs of this table, those shown under other tables included: "
            f"search for ``tags.`{TABLE}.{table.id}` != ''``."
        )
        title = {"paper": self.paper, "title": table.title, "mlflow.note.content": note}
        tags = {KEY: table.id, KIND: "table", **title}
        self.contents[table.id] = None
        if table.id in self.live:
            run = min(self.live[table.id], key=lambda run: run.info.run_id)
            update_tags(self.store, run, tags)
        else:
            run = self.client.create_run(self.id, run_name=table.id, tags=tags)
            self.client.set_terminated(run.info.run_id)
        return run.info.run_id

    def _show_run(self, key: str, result: RunResult) -> str:
        """The MLflow run of a result."""
        from mlflow.entities import Metric

        row, column = self._first_cell(key)
        name = f"{row} / {column} / {result.run.metric.kind} / seed {result.run.seed}"
        short = {**self._short(key), "bits": _bits(result.run.recipe)}
        fields = {**short, **result.run.model_dump(mode="json")}
        fields["source"] = {"checkpoint": fields.pop("checkpoint"), "digest": fields.pop("checkpoint_digest")}
        content = [read_json(self.project.root / run_path(key), "run file"), fields]
        _, end = period(result.provenance)
        metrics = {acceptable(name): value for name, value in {**result.metrics, "seconds": result.seconds}.items()}
        # Some stores refuse what is not finite; the tag metric.<name> says it instead.
        finite = [Metric(name, value, end, 0) for name, value in metrics.items() if math.isfinite(value)]
        tags = {
            **self._tags(key, "run", content, name, result.run.seed, result.provenance),
            **short,
            "metric": result.run.metric.kind,
            "weights_key": result.run.weights_key,
            "rotation_key": result.run.rotation_key,
            **{f"metric.{name}": str(value) for name, value in metrics.items() if not math.isfinite(value)},
        }
        return self._show(key, tags, result.provenance, finite, fields)

    def _show_rotation(self, key: str, record: dict[str, Any]) -> str | None:
        """The MLflow run of a learned rotation, with the numbers of every step of its learning.

        None where its folder was deleted and not made again.
        """
        from mlflow.entities import Metric

        path = self.project.root / rotation_path(key) / HISTORY_FILE
        if not path.exists():
            return None
        history = read_json(path, "history of rotations")
        row, column = self._first_cell(key)
        name = f"learned rotations / {row} / {column} / seed {record['seed']}"
        short = self._short(key)
        start, end = period(record)
        metrics = [
            Metric(name, float(value), start + (end - start) * (place + 1) // len(history), step["step"])
            for place, step in enumerate(history)
            for name, value in step.items()
            if name != "step" and isinstance(value, int | float)
        ]
        metrics.append(Metric("seconds", float(record["seconds"]), end, 0))
        fields = {**short, **{name: record[name] for name in ("seed", "learning", "digest")}}
        fields["source"] = {"checkpoint": record["checkpoint"], "digest": record["checkpoint_digest"]}
        tags = {**self._tags(key, "rotation", [record, history, short], name, record["seed"], record), **short}
        return self._show(key, tags, record, metrics, fields)

    def _show(
        self,
        key: str,
        tags: dict[str, str | None],
        record: dict[str, Any],
        metrics: "list[Metric]",
        fields: dict[str, Any],
    ) -> str:
        given = {name: value for name, value in tags.items() if value}
        self.contents[key] = given[RESULT]
        return show(self.store, self.id, self.live.get(key, []), given, record, metrics, fields)

    def _first_cell(self, key: str) -> tuple[str, str]:
        """Row and column of the first cell, in the first table, of a run or a learned rotation."""
        return next(iter(self.cells[key].values()))[0]

    def _tags(
        self, key: str, kind: str, content: list[Any], name: str, seed: int, provenance: dict[str, Any]
    ) -> dict[str, str | None]:
        """The tags of a run or a learned rotation; None for those that it has not."""
        first = self.project.table(next(iter(self.cells[key])))
        return {
            KEY: key,
            RESULT: short_hash(canonical_json(content)),
            KIND: kind,
            **{f"{TABLE}.{table}": "; ".join(map(" / ".join, cells)) for table, cells in self.cells[key].items()},
            _PARENT: self._parent(first),
            "mlflow.runName": name,
            "paper": self.paper,
            "seed": str(seed),
            "git_commit": provenance.get("git_commit"),
            "mlflow.source.git.commit": provenance.get("git_commit"),
            "code_digest": provenance.get("code_digest"),
        }

    def _short(self, key: str) -> dict[str, Any]:
        """What tells runs apart in a table's column or on an axis, where paths and recipes are too long."""
        first = self.project.table(next(iter(self.cells[key])))
        row, column = self._first_cell(key)
        return {"method": first.row(row).method, "model": first.column(column).slot}


def _cells(project: Project, paper: str) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Where the paper's tables print each run and use each learned rotation: {key: {table: [(row, column)]}}.

    The paper's own tables come first.
    """
    listed = [target.id for target in load_targets(project.root).targets]
    names = [name for name, table in project.tables.items() if table.paper == paper]
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=lambda name: listed.index(name) if name in listed else len(listed)):
        for cell in project.cells(name):
            for key in (key for run in cell.runs for key in (run.key, run.rotation_key) if key):
                places = found.setdefault(key, {}).setdefault(name, [])
                if (cell.row, cell.column) not in places:
                    places.append((cell.row, cell.column))
    return found


def _bits(recipe: Recipe) -> str:
    """Bits of weights, inputs of linear layers and KV cache, e.g. 4-4-4; 16 is not quantized."""
    weights = None if recipe.weights is None else recipe.weights.scheme
    keys, values = (16 if scheme is None else scheme.bits for scheme in (recipe.keys, recipe.values))
    cache = f"{keys}" if keys == values else f"{keys}/{values}"
    return "-".join([*(str(16 if scheme is None else scheme.bits) for scheme in (weights, recipe.activations)), cache])
