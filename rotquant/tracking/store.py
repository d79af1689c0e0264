"""The MLflow store: where it is, one process at a time, experiments, and the runs that are there by key."""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rotquant.errors import RotquantError
from rotquant.project import Project

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.entities import Run as MlflowRun

KEY, RESULT, KIND, TABLE = "rotquant.key", "rotquant.result", "rotquant.kind", "rotquant.table"

#: Most parameters and metrics in one request: MLflow takes 100 parameters, and 1000 of both.
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 900


class TrackingError(RotquantError):
    """MLflow's store cannot be reached or written."""


@dataclass(frozen=True)
class Logged:
    """Where MLflow shows a table: the experiment, the table's parent run, and the MLflow run ids behind it.

    runs, rotations: the MLflow run id of each run's, and each learned rotation's, key.
    """

    uri: str
    experiment: str
    experiment_id: str
    parent: str
    runs: dict[str, str]
    rotations: dict[str, str] = field(default_factory=dict)


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
    with locked(root):
        open_client(root)
    return tracking_uri(root)


def log_artifacts(project: Project, logged: Logged, paths: list[Path]) -> None:
    """Attach files (report, figure, table) to the table's parent run, replacing those of the same name."""
    with locked(project.root):
        client = open_client(project.root)
        for path in paths:
            client.log_artifact(logged.parent, str(path))


def open_client(root: Path) -> "MlflowClient":
    """A client of the store.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
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
def locked(root: Path) -> Iterator[None]:
    """One process at a time: a fresh database's migration and the replacing of runs are not safe otherwise.

    The lock belongs to an open file, so a killed process leaves none behind.
    """
    path = root / "results" / ".mlflow.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_experiment(client: "MlflowClient", root: Path, name: str) -> str:
    """The id of the experiment of that name, made or restored where needed."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = tracking_uri(root).startswith("sqlite:")
        location = (root.resolve() / "mlartifacts" / name).as_uri() if local else None
        return client.create_experiment(name, artifact_location=location)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def live_runs(client: "MlflowClient", experiment: str) -> dict[str, list["MlflowRun"]]:
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


def log_values(
    client: "MlflowClient", run_id: str, metrics: "Sequence[Metric]", fields: Mapping[str, Any] | None = None
) -> None:
    """Log metrics, and nested settings as parameters with dotted names, in as few requests as MLflow allows."""
    from mlflow.entities import Param

    parameters = [Param(name, str(value)[:5000]) for name, value in flatten(fields or {}).items()]
    while metrics or parameters:
        client.log_batch(run_id, metrics=metrics[:_METRICS_AT_ONCE], params=parameters[:_PARAMETERS_AT_ONCE])
        metrics, parameters = metrics[_METRICS_AT_ONCE:], parameters[_PARAMETERS_AT_ONCE:]


def acceptable(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; what is None is left out."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
