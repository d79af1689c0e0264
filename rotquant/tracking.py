"""MLflow as a view of the result files: one MLflow run per run, one experiment per paper, one parent run per table.

The store is SQLite in the project folder unless MLFLOW_TRACKING_URI names another. A run that several tables ask for is
shown once, under the first of them, and tagged by all: the filter ``tags.`rotquant.table.quarot_table9` != ''`` finds
the runs of a table. Every MLflow run carries the run's key and a hash of its result file, so logging again changes
nothing, a changed result replaces the older run, and a deleted database is rebuilt from the files. This is the only
module that imports MLflow, and it never holds a number of its own. A speed table is one run, made from its record.
"""

import fcntl
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rotquant.bench.records import Record
from rotquant.errors import RotquantError
from rotquant.files import canonical_json, read_json, short_hash
from rotquant.project import Project
from rotquant.reporting.tables import collect
from rotquant.results import RunResult, run_path
from rotquant.speed.definitions import SpeedTable
from rotquant.tables import Table, load_targets

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

KEY, RESULT, KIND, TABLE = "rotquant.key", "rotquant.result", "rotquant.kind", "rotquant.table"

#: Most parameters and metrics that MLflow takes in one request.
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000


class TrackingError(RotquantError):
    """MLflow's store cannot be reached or written."""


@dataclass(frozen=True)
class Logged:
    """Where MLflow shows a table: the experiment, the table's parent run, and the MLflow run id of each run key."""

    uri: str
    experiment: str
    experiment_id: str
    parent: str
    runs: dict[str, str]


def tracking_uri(root: Path) -> str:
    """The store: MLFLOW_TRACKING_URI, or a SQLite file in the project folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"


def printable(uri: str) -> str:
    """A tracking URI without the password it may contain."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def initialise(root: Path) -> str:
    """Create the store's tables where they are missing and return its URI.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    with _locked(root):
        _client(root)
    return tracking_uri(root)


def log_table(project: Project, table: Table) -> Logged:
    """Make MLflow show a table's runs, as `log_tables` does for several."""
    return log_tables(project, [table])[0]


def log_tables(project: Project, tables: Sequence[Table]) -> list[Logged]:
    """Make MLflow show the runs of computed tables: each once, those of an older result deleted.

    Raises:
        ResultError: a run is not computed yet, or its file is damaged.
        TrackingError: the store cannot be reached or written.
    """
    results = {table.id: collect(project, table)[1] for table in tables}
    with _locked(project.root):
        client = _client(project.root)
        papers = {name: _Experiment(client, project, name) for name in dict.fromkeys(table.paper for table in tables)}
        return [papers[table.paper].log(table, results[table.id]) for table in tables]


def log_speed(project: Project, record: Record, table: SpeedTable) -> Logged:
    """Make MLflow show the record of a speed table as one run: its seconds and bytes by cell, its GPU and code as tags.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    with _locked(project.root):
        client = _client(project.root)
        experiment = _experiment(client, project.root, table.paper)
        older = _live_runs(client, experiment).get(table.id, [])
        content = short_hash(canonical_json(record.model_dump(mode="json")))
        kept = next((run for run in older if run.data.tags.get(RESULT) == content), None)
        if kept is None:
            kept = _create_speed(client, experiment, record, table, content)
        for run in older:
            if run.info.run_id != kept.info.run_id:
                client.delete_run(run.info.run_id)
    return Logged(printable(tracking_uri(project.root)), table.paper, experiment, kept.info.run_id, {})


def _create_speed(
    client: "MlflowClient", experiment: str, record: Record, table: SpeedTable, content: str
) -> "MlflowRun":
    from mlflow.entities import Metric

    environment = record.sittings[-1].environment
    tags = {KEY: table.id, RESULT: content, KIND: "speed", "paper": table.paper, "gpu": record.gpu}
    tags |= {
        "title": table.title,
        "git_commit": environment.get("git_commit") or "",
        "mlflow.note.content": table.caption,
    }
    end = int(datetime.fromisoformat(environment["date"]).timestamp() * 1000)
    run = client.create_run(experiment, end, tags, table.id)
    known = record.by_key
    metrics = {
        _acceptable(f"{cell.grid}/{cell.row}/{cell.column}/{name}"): measured.value
        for cell in table.cells
        if cell.key in known
        for name, measured in known[cell.key].quantities.items()
        if measured.low is not None or name.endswith("bytes")
    }
    found = [Metric(name, value, end, 0) for name, value in metrics.items()]
    for begin in range(0, len(found), _METRICS_AT_ONCE):
        client.log_batch(run.info.run_id, metrics=found[begin : begin + _METRICS_AT_ONCE])
    client.set_terminated(run.info.run_id, end_time=end)
    return run


def log_artifacts(project: Project, logged: Logged, paths: list[Path]) -> None:
    """Attach files (report, figure, table) to the table's parent run, replacing those of the same name."""
    with _locked(project.root):
        client = _client(project.root)
        for path in paths:
            client.log_artifact(logged.parent, str(path))


def _client(root: Path) -> "MlflowClient":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import logging

    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    uri = tracking_uri(root)
    try:
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)
    except Exception as error:  # MLflow and its stores raise many types
        reason = str(error).strip().split("\n")[0][:200]
        raise TrackingError(
            f"the MLflow store {printable(uri)} cannot be used ({type(error).__name__}: {reason}); start it, unset "
            "MLFLOW_TRACKING_URI, or set `tracking: false` in the configuration to go without."
        ) from None
    return client


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time: a fresh database's migration and the replacing of runs are not safe otherwise.

    The lock belongs to an open file, so a killed process leaves none behind.
    """
    path = root / "results" / ".mlflow.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _experiment(client: "MlflowClient", root: Path, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = tracking_uri(root).startswith("sqlite:")
        location = (root.resolve() / "mlartifacts" / name).as_uri() if local else None
        return client.create_experiment(name, artifact_location=location)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


class _Experiment:
    """The experiment of one paper: its live MLflow runs, searched once, and what has been brought up to date so far.

    live: MLflow runs found at the start, by key. shown: the MLflow run id of each key (of each table's id) seen to.
    """

    def __init__(self, client: "MlflowClient", project: Project, paper: str) -> None:
        self.client, self.project, self.paper = client, project, paper
        self.id = _experiment(client, project.root, paper)
        self.live = _live_runs(client, self.id)
        self.cells = _cells(project, paper)
        self.shown: dict[str, str] = {}

    def log(self, table: Table, results: dict[str, RunResult]) -> Logged:
        """Show a table: its parent run and the runs behind it."""
        for key, result in results.items():
            if key not in self.shown:
                self.shown[key] = self._show(key, result)
        uri = printable(tracking_uri(self.project.root))
        return Logged(uri, self.paper, self.id, self._parent(table), {key: self.shown[key] for key in results})

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
        if table.id in self.live:
            run = self.live[table.id][0]
            self._update_tags(run, tags)
        else:
            run = self.client.create_run(self.id, run_name=table.id, tags=tags)
            self.client.set_terminated(run.info.run_id)
        return run.info.run_id

    def _show(self, key: str, result: RunResult) -> str:
        """The MLflow run of a result: the existing one where nothing changed, else a new one in its place."""
        content = short_hash(canonical_json(read_json(self.project.root / run_path(key), "run file")))
        tags = self._tags(key, result, content)
        older = self.live.get(key, [])
        same = [run for run in older if run.data.tags.get(RESULT) == content and run.info.status == "FINISHED"]
        if same:
            kept = same[0]
            self._update_tags(kept, tags)
        else:
            kept = self._create(result, tags)
        for run in older:
            if run.info.run_id != kept.info.run_id:
                self.client.delete_run(run.info.run_id)
        return kept.info.run_id

    def _tags(self, key: str, result: RunResult, content: str) -> dict[str, str]:
        first = self.project.table(next(iter(self.cells[key])))
        row, column = self.cells[key][first.id][0]
        tags = {
            KEY: key,
            RESULT: content,
            KIND: "run",
            **{f"{TABLE}.{table}": "; ".join(map(" / ".join, cells)) for table, cells in self.cells[key].items()},
            "mlflow.parentRunId": self._parent(first),
            "mlflow.runName": f"{row} / {column} / {result.run.metric.kind} / seed {result.run.seed}",
            "paper": self.paper,
            "method": first.row(row).method,
            "model": first.column(column).slot,
            "metric": result.run.metric.kind,
            "seed": str(result.run.seed),
            "weights_key": result.run.weights_key,
            "git_commit": result.provenance.get("git_commit"),
            "mlflow.source.git.commit": result.provenance.get("git_commit"),
            "code_digest": result.provenance.get("code_digest"),
            **{f"metric.{name}": str(value) for name, value in _metrics(result).items() if not math.isfinite(value)},
        }
        return {name: value for name, value in tags.items() if value}

    def _create(self, result: RunResult, tags: dict[str, str]) -> "MlflowRun":
        from mlflow.entities import Metric, Param

        end = int(datetime.fromisoformat(result.provenance["date"]).timestamp() * 1000)
        start = end - int(1000 * float(result.provenance["seconds"]))
        run = self.client.create_run(self.id, start, tags, tags["mlflow.runName"])
        # Some stores refuse what is not finite; the tag metric.<name> says it instead.
        finite = [Metric(name, value, end, 0) for name, value in _metrics(result).items() if math.isfinite(value)]
        fields = flatten(result.run.model_dump(mode="json"))
        parameters = [Param(name, str(value)[:5000]) for name, value in fields.items()]
        self.client.log_batch(run.info.run_id, metrics=finite, params=parameters[:_PARAMETERS_AT_ONCE])
        for begin in range(_PARAMETERS_AT_ONCE, len(parameters), _PARAMETERS_AT_ONCE):
            self.client.log_batch(run.info.run_id, params=parameters[begin : begin + _PARAMETERS_AT_ONCE])
        self.client.set_terminated(run.info.run_id, end_time=end)
        return run

    def _update_tags(self, run: "MlflowRun", tags: dict[str, str]) -> None:
        """Give a kept run the tags it should have: tables come and go, and rows are renamed."""
        from mlflow.entities import RunTag

        changed = [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]
        if changed:
            self.client.log_batch(run.info.run_id, tags=changed)
        for name in run.data.tags:
            if name.startswith(f"{TABLE}.") and name not in tags:
                self.client.delete_tag(run.info.run_id, name)


def _live_runs(client: "MlflowClient", experiment: str) -> dict[str, list["MlflowRun"]]:
    """The experiment's runs that are not deleted, by key; a table's parent run has the table's id as key."""
    found: dict[str, list[MlflowRun]] = {}
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token, order_by=["start_time DESC"])
        for run in page:
            if KEY in run.data.tags:
                found.setdefault(run.data.tags[KEY], []).append(run)
        token = page.token
        if not token:
            return found


def _cells(project: Project, paper: str) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Where the paper's tables print each run: {key: {table: [(row, column)]}}, the paper's own tables first."""
    listed = [target["id"] for target in load_targets(project.root)["targets"]]
    names = [name for name, table in project.tables.items() if table.paper == paper]
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=lambda name: listed.index(name) if name in listed else len(listed)):
        for cell in project.cells(name):
            for run in cell.runs:
                found.setdefault(run.key, {}).setdefault(name, []).append((cell.row, cell.column))
    return found


def _metrics(result: RunResult) -> dict[str, float]:
    """A run's metrics under names that MLflow accepts."""
    metrics = {**result.metrics, "seconds": result.seconds}
    return {_acceptable(name): value for name, value in metrics.items()}


def _acceptable(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; what is None is left out."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
