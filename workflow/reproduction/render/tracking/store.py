"""The MLflow store, opened: one process at a time where it can be locked, and with errors in one sentence.

MLflow is a view of the result files. So any failure of the store becomes a `TrackingError`, soon and without delaying
other processes, and callers continue without it.
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reproduction.render.tracking.location import Location, TrackingError, find_location, printable
from reproduction.render.tracking.turns import Turn, turns
from rotquant.foundation.files import atomic_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: MLflow's settings, unless the user has set them. By default it would wait minutes for a server, at every page, and
#: print two lines for each run.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "PGCONNECT_TIMEOUT": "5",
}

#: Settings for a database server. MLflow would open up to 15 connections in every process, and PostgreSQL has 100.
_DATABASE_SETTINGS = {"MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}

_OPENING = "opens the store"
"""The turn in which a database's tables are made."""


@dataclass(frozen=True)
class Store:
    """An open store."""

    location: Location
    client: "MlflowClient"

    @property
    def uri(self) -> str:
        """The store's address in a printable form."""
        return printable(self.location.uri)


def initialise(root: Path) -> str:
    """Create the store's missing tables and return its URI in a printable form.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    with opened(root) as store:
        return store.uri


@contextmanager
def opened(root: Path, writer: str | None = None) -> Iterator[Store]:
    """Open the project's store, creating its missing tables. Any failure in it is a `TrackingError`.

    Where the store is a file or PostgreSQL, other processes wait: a fresh database's migration and the replacing of
    runs are not safe otherwise. No process waits for another to reach a tracking server, which may take its time.

    Args:
        writer: owner of the runs to write; others may write to a database server at the same time.

    Raises:
        TrackingError: the store cannot be reached, read or written.
    """
    location = find_location(root)
    for name, value in (_SETTINGS | (_DATABASE_SETTINGS if location.is_database_server else {})).items():
        os.environ.setdefault(name, value)
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints its errors, with tracebacks
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with _taking_turns(location) as turn:
            turn(_OPENING)
            store = Store(location, _client(location))
            turn(writer and f"writes {writer}")
            yield store
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
        raise unusable(location, error) from None


@contextmanager
def _taking_turns(location: Location) -> Iterator[Turn]:
    """Make other processes wait: by a file's lock all the time, by turns on a database server.

    A tracking server has neither. There the processes of one project folder take turns once the server has answered, so
    that many do not request the same at once; those of other folders write at the same time.
    """
    if location.is_database_server:
        with turns(location) as turn:
            yield turn
    elif location.path:
        with _locked(location.path):
            yield lambda _: None
    else:
        with ExitStack() as held:
            yield lambda name: name in (None, _OPENING) or held.enter_context(_locked(location.root / "mlflow.db"))


def _client(location: Location) -> "MlflowClient":
    from mlflow import MlflowClient

    if location.database:
        _check_whole(location.database)
    try:
        if location.database and not location.database.exists():
            _create(location.uri, location.database)
        client = MlflowClient(location.uri)
        client.search_experiments(max_results=1)
    except Exception as error:  # MLflow, its stores and their drivers raise many types
        raise unusable(location, error) from None
    if location.database:
        _relocate(location, location.database)
    return client


def _create(uri: str, database: Path) -> None:
    """Create a database with MLflow's tables, whole or not at all: MLflow cannot use partial tables."""
    from mlflow import MlflowClient

    with atomic_path(database) as temporary:
        MlflowClient(uri.replace(str(database), str(temporary))).search_experiments(max_results=1)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Allow one process at a time. The lock belongs to an open file, so a killed process leaves none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def gone() -> Iterator[None]:
    """Ignore that a file to remove is missing: another process was faster."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def unusable(location: Location, error: Exception) -> TrackingError:
    """The error of a store, in a sentence with the remedy."""
    if location.database:
        try:
            _check_whole(location.database)
        except TrackingError as damage:
            return damage
        advice = "see to the file, unset MLFLOW_TRACKING_URI"
    elif isinstance(error, ImportError) and location.uri.startswith("postgresql"):
        advice = "install the driver, `pip install -e ./workflow[postgresql]`, unset MLFLOW_TRACKING_URI"
    else:
        advice = "start it, correct or unset MLFLOW_TRACKING_URI"
    return TrackingError(
        f"the MLflow store {printable(location.uri)} cannot be used ({_reason(error)}); {advice}, or "
        "set `tracking: false` in the configuration to go without."
    )


def _reason(error: Exception) -> str:
    """Reason in an error; for a failed request only the end, which names the cause."""
    text = printable(" ".join(str(error).split()))
    text = re.sub(r"^\(\w+(\.\w+)*\) |( \[SQL: .*)?( ?\(Background on .*)?$", "", text).rstrip(".")
    _, request, cause = text.rpartition("(Caused by ")
    if not request:
        return f"{type(error).__name__}: {text[:200]}"
    if "timed out" in cause:
        return f"it does not answer within {os.environ['MLFLOW_HTTP_REQUEST_TIMEOUT']} s"
    return cause.removesuffix("))").strip("\"'").rpartition(": ")[2]


def _check_whole(path: Path) -> None:
    """Raise the `TrackingError` of a damaged database. MLflow itself would retry for two minutes."""
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # locked or not readable: its content is unknown
        return
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise TrackingError(
            f"the MLflow database {path} is damaged ({' '.join(found.split())}); delete it and run "
            "`rotquant runs sync-tracking`, which makes it anew from the result files."
        )


def _relocate(location: Location, path: Path) -> None:
    """Store artifacts of our experiments next to the database, also after the project was moved or copied.

    MLflow stores absolute paths, and would create the old folder again and write there.
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
