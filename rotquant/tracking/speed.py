"""A speed table in MLflow: one run made from its record, its GPU and code as tags."""

from datetime import datetime
from typing import TYPE_CHECKING

from rotquant.bench.records import Record
from rotquant.files import canonical_json, short_hash
from rotquant.project import Project
from rotquant.speed.definitions import SpeedTable
from rotquant.tracking.store import (
    KEY,
    KIND,
    RESULT,
    Logged,
    acceptable,
    live_runs,
    locked,
    log_values,
    open_client,
    open_experiment,
    printable,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun


def log_speed(project: Project, record: Record, table: SpeedTable) -> Logged:
    """Make MLflow show the record of a speed table as one run: its seconds and bytes by cell, its GPU and code as tags.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    with locked(project.root):
        client = open_client(project.root)
        experiment = open_experiment(client, project.root, table.paper)
        older = live_runs(client, experiment).get(table.id, [])
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
        acceptable(f"{cell.grid}/{cell.row}/{cell.column}/{name}"): measured.value
        for cell in table.cells
        if cell.key in known
        for name, measured in known[cell.key].quantities.items()
        if measured.low is not None or name.endswith("bytes")
    }
    found = [Metric(name, value, end, 0) for name, value in metrics.items()]
    log_values(client, run.info.run_id, found)
    client.set_terminated(run.info.run_id, end_time=end)
    return run
