"""MLflow as a view of the result files: one MLflow run per run, one experiment per paper, one parent run per table.

The store is SQLite in the project folder unless MLFLOW_TRACKING_URI names another. Every MLflow run carries the run's
key and a hash of its result file, so logging again changes nothing, a changed result replaces the older run, and a
deleted database is rebuilt from the files. This is the only module that imports MLflow, and it never holds a number of
its own.
"""

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rotquant.errors import RotquantError
from rotquant.files import canonical_json, read_json, short_hash
from rotquant.reporting.tables import collect
from rotquant.results import RunResult, run_path
from rotquant.project import Project
from rotquant.tables import Table

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

KEY, RESULT, KIND, TABLE = "rotquant.key", "rotquant.result", "rotquant.kind", "rotquant.table"


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
    """Make MLflow show a table's computed runs: each once, those of an older result deleted.

    Raises:
        ResultError: a run is not computed yet, or its file is damaged.
        TrackingError: the store cannot be reached or written.
    """
    _, results = collect(project, table)
    cells = {run.key: (cell.row, cell.column) for cell in project.cells(table.id) for run in cell.runs}
    with _locked(project.root):
        client = _client(project.root)
        experiment = _experiment(client, project.root, table.paper)
        existing = _existing(client, experiment)
        parent = _parent(client, experiment, existing, project, table)
        runs = {}
        for key, result in results.items():
            content = short_hash(canonical_json(read_json(project.root / run_path(key), "run file")))
            tags = _tags(table, key, *cells[key], result, content)
            runs[key] = _replace(client, experiment, existing.get(key, []), parent, result, tags)
    return Logged(printable(tracking_uri(project.root)), table.paper, experiment, parent, runs)


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


def _existing(client: "MlflowClient", experiment: str) -> dict[str, list["MlflowRun"]]:
    """The experiment's live runs by key; a table's parent run has the table's id as key."""
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


def _parent(
    client: "MlflowClient",
    experiment: str,
    existing: dict[str, list["MlflowRun"]],
    project: Project,
    table: Table,
) -> str:
    """The table's own MLflow run, kept over re-renderings."""
    if table.id in existing:
        return existing[table.id][0].info.run_id
    tags = {KEY: table.id, KIND: "table", TABLE: table.id, "paper": table.paper, "title": table.title}
    run = client.create_run(experiment, run_name=table.id, tags=tags)
    client.set_terminated(run.info.run_id)
    return run.info.run_id


def _replace(
    client: "MlflowClient",
    experiment: str,
    older: list["MlflowRun"],
    parent: str,
    result: RunResult,
    tags: dict[str, str],
) -> str:
    """The MLflow run of a result: the existing one where nothing changed, else a new one in its place."""
    same = [run for run in older if run.data.tags.get(RESULT) == tags[RESULT] and run.info.status == "FINISHED"]
    if same:
        kept = same[0].info.run_id
        for name, value in tags.items():
            if same[0].data.tags.get(name) != value:
                client.set_tag(kept, name, value)
    else:
        kept = _create(client, experiment, parent, result, tags)
    for run in older:
        if run.info.run_id != kept:
            client.delete_run(run.info.run_id)
    return kept


def _create(client: "MlflowClient", experiment: str, parent: str, result: RunResult, tags: dict[str, str]) -> str:
    from mlflow.entities import Metric, Param

    end = int(datetime.fromisoformat(result.provenance["date"]).timestamp() * 1000)
    start = end - int(1000 * float(result.provenance["seconds"]))
    name = f"{tags['row']} / {tags['column']} / seed {result.run.seed}"
    run = client.create_run(experiment, start, {**tags, "mlflow.parentRunId": parent}, name)
    metrics = {**result.metrics, "seconds": result.seconds}
    finite = [Metric(key, value, end, 0) for key, value in metrics.items() if math.isfinite(value)]
    parameters = [Param(key, str(value)[:5000]) for key, value in flatten(result.run.model_dump(mode="json")).items()]
    client.log_batch(run.info.run_id, metrics=finite, params=parameters[:100])
    for key, value in metrics.items():
        if not math.isfinite(value):  # some stores refuse them as metrics; the tag says what the file says
            client.set_tag(run.info.run_id, f"metric.{key}", str(value))
    client.set_terminated(run.info.run_id, end_time=end)
    return run.info.run_id


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; what is None is left out."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _tags(table: Table, key: str, row: str, column: str, result: RunResult, content: str) -> dict[str, str]:
    provenance = result.provenance
    tags = {
        KEY: key,
        RESULT: content,
        KIND: "run",
        TABLE: table.id,
        f"cell.{table.id}": f"{row} / {column}",
        "paper": table.paper,
        "table": table.id,
        "row": row,
        "column": column,
        "seed": str(result.run.seed),
        "key": key,
        "weights_key": result.run.weights_key or "-",
        "git_commit": provenance.get("git_commit"),
        "mlflow.source.git.commit": provenance.get("git_commit"),
        "code_digest": provenance.get("code_digest"),
    }
    return {name: value for name, value in tags.items() if value}
