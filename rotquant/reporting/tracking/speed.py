"""A speed table in MLflow: one run made from its record, its GPU and code as tags."""

from rotquant.bench.records import Record
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.reporting.tracking.experiments import open_experiment
from rotquant.reporting.tracking.store import (
    KEY,
    KIND,
    RESULT,
    Logged,
    acceptable,
    live_runs,
    opened,
    period,
    show,
)
from rotquant.study.project import Project
from rotquant.study.speed.definitions import SpeedTable


def log_speed(project: Project, record: Record, table: SpeedTable) -> Logged:
    """Make MLflow show the record of a speed table as one run: its seconds and bytes by cell, its GPU and code as tags.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    from mlflow.entities import Metric

    environment = record.sittings[-1].environment
    tags = {
        KEY: table.id,
        RESULT: short_hash(canonical_json(record.model_dump(mode="json"))),
        KIND: "speed",
        "paper": table.paper,
        "gpu": record.gpu,
        "title": table.title,
        "git_commit": environment.get("git_commit") or "",
        "mlflow.runName": table.id,
        "mlflow.note.content": table.caption,
    }
    _, end = period(environment)
    known = record.by_key
    metrics = {
        acceptable(f"{cell.grid}/{cell.row}/{cell.column}/{name}"): measured.value
        for cell in table.cells
        if cell.key in known
        for name, measured in known[cell.key].quantities.items()
        if measured.low is not None or name.endswith("bytes")
    }
    with opened(project.root) as store:
        experiment = open_experiment(store, project, table.paper)
        older = live_runs(store, experiment).get(table.id, [])
        found = [Metric(name, value, end, 0) for name, value in metrics.items()]
        shown = show(store, experiment, older, tags, environment, found)
    return Logged(store.uri, table.paper, experiment, shown, {})
