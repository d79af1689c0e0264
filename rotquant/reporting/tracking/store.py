"""The MLflow store, opened: one process at a time where it is a file, with errors in one sentence, and its runs by key.

MLflow is a view of the result files. So whatever is wrong with the store becomes a `TrackingError`, soon and without
holding up other processes, and callers go on without it.
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rotquant.reporting.tracking.location import Location, TrackingError, find_location, printable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.entities import Run as MlflowRun

KEY, RESULT, KIND, TABLE = "rotquant.key", "rotquant.result", "rotquant.kind", "rotquant.table"

#: Most parameters and metrics in one request: MLflow takes 100 parameters, and 1000 of both.
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 900

#: Settings of MLflow, where the user has not said otherwise. It would wait for a server for minutes, at every page, and
#: print two lines for each run.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}


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


@dataclass(frozen=True)
class Store:
    """An open store."""

    location: Location
    client: "MlflowClient"

    @property
    def uri(self) -> str:
        """Where it is, as it may be shown."""
        return printable(self.location.uri)


def initialise(root: Path) -> str:
    """Create the store's tables where they are missing and return its URI, as it may be shown.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    with opened(root) as store:
        return store.uri


def log_artifacts(root: Path, run: str, paths: Sequence[Path]) -> None:
    """Attach files (report, figure, table) to a run, replacing those of the same name.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    with opened(root) as store:
        for path in paths:
            store.client.log_artifact(run, str(path))


@contextmanager
def opened(root: Path) -> Iterator[Store]:
    """The project's store, its tables made where they are missing. Whatever fails in it is a `TrackingError`.

    Where the store is a file, other processes wait: a fresh database's migration and the replacing of runs are not safe
    otherwise. No process waits for another that talks to a server, which may take its time.

    Raises:
        TrackingError: the store cannot be reached, read or written.
    """
    location = find_location(root)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import logging

    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with _locked(location.path) if location.path else nullcontext():
            yield Store(location, _client(location))
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise unusable(location, error) from None


def _client(location: Location) -> "MlflowClient":
    from mlflow import MlflowClient

    if location.database:
        _check_whole(location.database)
    try:
        client = MlflowClient(location.uri)
        client.search_experiments(max_results=1)
    except Exception as error:  # MLflow, its stores and their drivers raise many types
        raise unusable(location, error) from None
    if location.database:
        _relocate(location, location.database)
    return client


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. The lock belongs to an open file, so a killed process leaves none behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unusable(location: Location, error: Exception) -> TrackingError:
    """What is wrong with a store, in a sentence that says what to do."""
    if location.database:
        try:
            _check_whole(location.database)
        except TrackingError as damage:
            return damage
        advice = "see to the file, unset MLFLOW_TRACKING_URI"
    else:
        advice = "start it, unset MLFLOW_TRACKING_URI"
    return TrackingError(
        f"the MLflow store {printable(location.uri)} cannot be used ({_reason(error)}); {advice}, or "
        "set `tracking: false` in the configuration to go without."
    )


def _reason(error: Exception) -> str:
    """What an error says, of a request that failed only the end, which names the cause."""
    text = " ".join(str(error).split()).rstrip(".")
    _, request, cause = text.rpartition("(Caused by ")
    if not request:
        return f"{type(error).__name__}: {text[:200]}"
    if "timed out" in cause:
        return f"it does not answer within {os.environ['MLFLOW_HTTP_REQUEST_TIMEOUT']} s"
    return cause.removesuffix("))").strip("\"'").rpartition(": ")[2]


def _check_whole(path: Path) -> None:
    """Raise the `TrackingError` of a damaged database. MLflow itself would try again for two minutes."""
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # locked or not readable: nothing is known about its content
        return
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise TrackingError(
            f"the MLflow database {path} is damaged ({' '.join(found.split())}); delete it and run "
            "`rotquant runs sync-tracking`, which makes it anew from the result files."
        )


def _relocate(location: Location, path: Path) -> None:
    """Let the artifacts of experiments of ours lie beside the database, also after the project was moved or copied.

    MLflow keeps absolute paths, and would make the old folder again and write there.
    """
    with closing(sqlite3.connect(path)) as database, database:
        known = database.execute("SELECT experiment_id, name, artifact_location FROM experiments").fetchall()
        for experiment, name, old in known:
            new = cast(str, location.artifacts(name))
            ours = old.startswith("file:") and old.endswith(new[new.index("/mlartifacts/") :])
            if ours and old != new:
                database.execute(
                    "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, experiment)
                )
                database.execute(
                    "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
                    "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                    (new, len(old) + 1, experiment, len(old) + 1, f"{old}/"),
                )


def live_runs(store: Store, experiment: str) -> dict[str, list["MlflowRun"]]:
    """The experiment's runs that are not deleted, by key; a table's parent run has the table's id as key.

    Runs that a killed process left unfinished are deleted where no other process can be at work on them.
    """
    found: dict[str, list[MlflowRun]] = {}
    token = None
    while True:
        page = store.client.search_runs([experiment], max_results=1000, page_token=token, order_by=["start_time DESC"])
        for run in page:
            if KEY in run.data.tags:
                found.setdefault(run.data.tags[KEY], []).append(run)
            elif KIND in run.data.tags and store.location.path:
                delete_run(store, run.info.run_id)
        token = page.token
        if not token:
            return found


def period(record: Mapping[str, Any]) -> tuple[int, int]:
    """Start and end in milliseconds of what a record tells the date and, unless it took none, the seconds of."""
    end = int(datetime.fromisoformat(record["date"]).timestamp() * 1000)
    return end - int(1000 * float(record.get("seconds", 0))), end


def show(
    store: Store,
    experiment: str,
    older: "Sequence[MlflowRun]",
    tags: Mapping[str, str],
    record: Mapping[str, Any],
    metrics: "Sequence[Metric]",
    fields: Mapping[str, Any] | None = None,
) -> str:
    """The id of the one run of a key: of the older ones that which shows the same, else a new one in their place.

    Args:
        tags: with KEY, RESULT and mlflow.runName. A kept run gets those that it should have: tables come and go, and
            rows are renamed.
        record: its provenance.
        fields: nested settings, which become parameters with dotted names.
    """
    same = {run.info.run_id: run for run in older if shows(run, tags[RESULT])}
    if same:
        kept = min(same)
        update_tags(store, same[kept], tags)
    else:
        kept = _create_run(store, experiment, tags, period(record), metrics, fields or {})
    for run in {run.info.run_id for run in older} - {kept}:
        delete_run(store, run)
    return kept


def shows(run: "MlflowRun", content: str | None) -> bool:
    """Whether a run is whole and shows that content."""
    return run.info.status == "FINISHED" and run.data.tags.get(RESULT) == content


def update_tags(store: Store, run: "MlflowRun", tags: Mapping[str, str]) -> None:
    """Give a run these tags, and take from it those of tables that are not among them."""
    from mlflow.entities import RunTag

    changed = [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]
    if changed:
        store.client.log_batch(run.info.run_id, tags=changed)
    for name in run.data.tags:
        if name.startswith(f"{TABLE}.") and name not in tags:
            store.client.delete_tag(run.info.run_id, name)


def _create_run(
    store: Store,
    experiment: str,
    tags: Mapping[str, str],
    time: tuple[int, int],
    metrics: "Sequence[Metric]",
    fields: Mapping[str, Any],
) -> str:
    """The id of a new, finished run. Its key is the last that it gets: a run that has one is whole."""
    from mlflow.entities import Param, RunTag

    start, end = time
    first = {name: value for name, value in tags.items() if name != KEY}
    run = store.client.create_run(experiment, start, first, tags["mlflow.runName"]).info.run_id
    parameters = [Param(name, str(value)[:5000]) for name, value in _flatten(fields).items()]
    while metrics or parameters:
        store.client.log_batch(run, metrics=metrics[:_METRICS_AT_ONCE], params=parameters[:_PARAMETERS_AT_ONCE])
        metrics, parameters = metrics[_METRICS_AT_ONCE:], parameters[_PARAMETERS_AT_ONCE:]
    store.client.set_terminated(run, end_time=end)
    store.client.log_batch(run, tags=[RunTag(KEY, tags[KEY])])
    return run


def delete_run(store: Store, run: str) -> None:
    """Delete a run, which another process may have done already."""
    from mlflow.exceptions import MlflowException

    try:
        store.client.delete_run(run)
    except MlflowException:
        if store.client.get_run(run).info.lifecycle_stage != "deleted":
            raise


def acceptable(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; what is None is left out."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
