"""The MLflow store: where it is, how it is opened, and a paper's experiment in it, by MLflow's public interface alone.

A result is one MLflow run in each experiment, found by its key. Several processes may write at once: whoever ends a run
deletes the others of its key but the latest, so all keep the same one.
"""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from reproduction.run.tracking.entries import CODE, KEY, KIND, RESULT, TABLE, Entry
from reproduction.run.tracking.line import STORE
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import atomic_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARENT, LOGGER = "mlflow.parentRunId", "rotquant.logger"
#: MLflow's settings, unless the user has set them: it would wait minutes for a server, and in every process keep up to
#: 5 connections to a database of a server. One is kept: without any, most of the time would go into connecting anew.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "PGCONNECT_TIMEOUT": "5",
}
_SERVER_SETTINGS = {"MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "1"}
#: Most parameters and metrics of one request, characters of a parameter, and runs of one answer.
_PARAMS, _METRICS, _CHARACTERS, _PAGE = 100, 900, 500, 1000
#: How often a result is logged while other processes delete runs that it meets, and what MLflow says of such a run.
_ATTEMPTS, _DELETED = 4, "must be in the 'active' state"
#: Seconds after which a run of another machine that has not ended counts as killed.
_ABANDONED = 86400
#: Statuses of what files say: a result or a whole table, and a table of which results are missing.
_FOUND = ("FINISHED", "SCHEDULED")


class TrackingError(RotquantError):
    """MLflow's store cannot be reached, read or written."""


def location() -> str:
    """The store's URI: that of MLFLOW_TRACKING_URI, else a SQLite file; relative paths begin at the working folder."""
    uri = os.environ.get(STORE, "").strip() or "sqlite:///mlflow.db"
    return re.sub(r"^(sqlite[^:]*:///)(?=[^/?:])", rf"\1{Path.cwd()}/", uri)


def is_server(uri: str) -> bool:
    """Whether a store is a tracking server with its own pages."""
    return uri.startswith(("http://", "https://"))


def printable(text: str) -> str:
    """A URI, or a text with one in it, without its password."""
    text = re.sub(r"(://[^/:@\s]*:)[^\s'\"]*@", r"\1***@", text)
    return re.sub(r"([?&]password=)[^&#\s'\"]*", r"\1***", text)


@contextmanager
def refusing() -> Iterator[None]:
    """Raise any failure of the store as a `TrackingError` of one sentence."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:  # MLflow, its stores and their drivers raise many types
        text = printable(" ".join(str(error).split()))
        text = re.sub(r"^\(\w+(\.\w+)*\) |( \[SQL: .*)?( ?\(Background on .*)?$", "", text)
        text = text.rpartition("(Caused by ")[2].removesuffix("))")[:200].rstrip(".")
        raise TrackingError(
            f"the MLflow store {printable(location())} cannot be used ({type(error).__name__}: {text}); start or mend "
            f"it, correct {STORE}, or set `tracking: false` in the configuration to go without."
        ) from None


def opened() -> "MlflowClient":
    """A client of the store, whose tables are made if it is new.

    Raises:
        TrackingError: it cannot be used.
    """
    for name, value in (_SETTINGS | ({} if location().startswith("sqlite") else _SERVER_SETTINGS)).items():
        os.environ.setdefault(name, value)
    with refusing():
        import logging

        from mlflow import MlflowClient

        for name, level in {"alembic": logging.WARNING, "mlflow.store.db.utils": logging.CRITICAL}.items():
            logging.getLogger(name).setLevel(level)
        with _alone(location()):
            client = MlflowClient(location())
            client.search_experiments(max_results=1)
        return client


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process at a time open a database: several that meet a new one would all make its tables, and most fail.

    A database that is damaged or not there shows here, since MLflow would try again for minutes.
    """
    if is_server(uri) or not re.match(r"\w+(\+\w+)?://", uri):
        yield
        return
    from mlflow import MlflowClient
    from sqlalchemy import NullPool, create_engine, text

    engine = create_engine(uri, poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        path = Path(engine.url.database or "")
        if not path.name or not path.parent.is_dir():
            raise TrackingError(f"{STORE}={uri} names no file in a folder that is there, as sqlite:///mlflow.db does.")
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with atomic_path(path) as whole:  # MLflow cannot use one with half of its tables
                    new = engine.url.set(database=str(whole)).render_as_string(hide_password=False)
                    MlflowClient(new).search_experiments(max_results=1)
        with engine.connect() as connection:
            if (found := connection.execute(text("PRAGMA quick_check(1)")).scalar()) != "ok":
                raise TrackingError(f"{path} is damaged ({found}): delete it, and `rotquant runs sync-tracking`.")
        yield
        return
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_lock(7236173)"))
        yield


def me() -> str:
    """This process, as runs name the one that logs them: machine, process and when it was started."""
    return f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}"


def _started(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return "ended"


def _is_over(run: "Run") -> bool:
    """Whether nobody works on a run any more."""
    if run.info.status not in ("RUNNING", "SCHEDULED"):
        return True
    host, process, started = [*run.data.tags.get(LOGGER, "").split(), "", "", ""][:3]
    if host == socket.gethostname():
        return not process.isdigit() or _started(int(process)) != started
    return time.time() - (run.info.start_time or 0) / 1000 > _ABANDONED


class PaperExperiment:
    """A paper's experiment.

    Args:
        project: the configuration's `tracking`.

    Raises:
        TrackingError: the store is a server, and the project has no name there.
    """

    def __init__(self, client: "MlflowClient", project: bool | str, paper: str) -> None:
        uri = location()
        if not isinstance(project, str) and re.match(r"(https?|postgresql|mysql|mssql)\b", uri):
            raise TrackingError(
                f"the MLflow store {printable(uri)} is a server, where projects are kept apart by their names: write "
                "`tracking: NAME` in the configuration, the same name for all who work on this project."
            )
        self.client, self.paper, self.name = client, paper, f"{project}/{paper}" if isinstance(project, str) else paper
        self.parents: dict[str, str] = {}
        self.known: dict[str, list[Run]] | None = None
        found = client.get_experiment_by_name(self.name) or self._create()
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        self.id: str = found.experiment_id
        place = urlsplit(found.artifact_location)
        # MLflow would make the folder of another machine, or of before a move, anew and write there.
        self.takes_files = place.scheme not in ("", "file") or Path(unquote(place.path)).is_dir()

    def _create(self) -> Any:
        root = os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT")
        place = f"{root.rstrip('/')}/{self.name}" if root else (Path("mlartifacts") / self.name).absolute().as_uri()
        if not root and not is_server(location()):
            (Path("mlartifacts") / self.name).mkdir(parents=True, exist_ok=True)
        with suppress(Exception):  # another process has just made it; else the next line's answer is None
            kind = {"mlflow.experimentKind": "custom_model_development"}  # else its page begins with a question
            self.client.create_experiment(self.name, None if is_server(location()) else place, kind)
        return self.client.get_experiment_by_name(self.name)

    def runs(self, condition: str = "") -> "list[Run]":
        """The runs that are not deleted, page by page."""
        found: dict[str, Run] = {}
        token = None
        while True:
            page = self.client.search_runs([self.id], condition, max_results=_PAGE, page_token=token)
            found |= {run.info.run_id: run for run in page}
            if not (token := page.token):
                return [*found.values()]

    def of(self, key: str, fresh: bool = False) -> "list[Run]":
        """The runs of a key, the latest result first, in an order that all processes agree on."""
        known = (
            self.known.get(key, []) if self.known is not None and not fresh else self.runs(f"tags.`{KEY}` = '{key}'")
        )
        return sorted(known, key=_rank)

    def read_all(self) -> None:
        """Read all runs at once, where many keys are asked for; those that a dead process has left become KILLED."""
        self.known = {}
        for run in self.runs():
            self.known.setdefault(run.data.tags.get(KEY, ""), []).append(run)
            if run.info.status == "RUNNING" and LOGGER in run.data.tags and _is_over(run):
                self.client.set_terminated(run.info.run_id, "KILLED")

    def parent(self, table: str) -> str:
        """The run of a table, RUNNING while its results are computed."""
        if table not in self.parents:
            found = self.of(table)
            if not found:
                tags = {KEY: table, KIND: "table", LOGGER: me()}
                mine = self.client.create_run(self.id, tags=tags, run_name=table)
                found = self.of(table, fresh=True)
                if found[0].info.run_id != mine.info.run_id:  # another process has just made one
                    self.client.delete_run(mine.info.run_id)
            elif found[0].info.status != "FINISHED":
                self._set(found[0], {LOGGER: me()}, "RUNNING")
            self.parents[table] = found[0].info.run_id
        return self.parents[table]

    def _move(self, table: str, first: str) -> None:
        """Let results that were put below a run of a table stand below the first one, where another process made that.

        Neither of two that make one at the same time need see the other's.
        """
        mine = self.parents.get(table, first)
        if mine != first:
            for run in self.runs(f"tags.`{PARENT}` = '{mine}'"):
                self.client.set_tag(run.info.run_id, PARENT, first)
            self.parents[table] = first

    def record(self, entry: Entry) -> None:
        """Log a result whose files are there; again where another process has deleted a run that was to be written."""
        from mlflow.exceptions import MlflowException

        for left in reversed(range(_ATTEMPTS)):
            try:
                self.log(*self.begin(entry), entry)
            except MlflowException as error:
                if not left or _DELETED not in str(error):
                    raise
                self.parents.clear()
                if self.known is not None:
                    self.read_all()
            else:
                return

    def begin(self, entry: Entry) -> "tuple[str, set[tuple[str, int]] | None]":
        """The run that logs a result from now on, and the steps and parameters (of step -1) that it has already.

        A run of the same code that was broken off goes on. None: a run has the result, or one that was found later.
        """
        tags, found = self._tags(entry), self.of(entry.key, fresh=entry.kind == "table")
        if entry.kind == "table" and found:
            self._move(entry.key, found[0].info.run_id)
        if entry.status in _FOUND and found and found[0].info.status == entry.status:
            first = found[0]
            same = first.data.tags.get(RESULT) == entry.digest
            if same or (entry.end is not None and (first.info.end_time or 0) > entry.end):
                self._set(first, tags if same else {name: tags[name] for name in tags if name.startswith(TABLE)})
                if len(found) > 1:
                    self._settle(entry.key)
                return first.info.run_id, None
            if entry.kind != "table":  # the files say something else now
                self.client.delete_run(first.info.run_id)
        if entry.status == "SCHEDULED" and found and _others(found[0]):
            return found[0].info.run_id, None
        for run in found:
            broken_off = run.info.status != "FINISHED" and run.data.tags.get(CODE) == entry.tags[CODE]
            if entry.kind == "table" or (broken_off and _is_over(run)):
                self._set(run, {**tags, LOGGER: me()}, "RUNNING")
                steps = (self.client.get_metric_history(run.info.run_id, name) for name in run.data.metrics)
                known = {(one.key, one.step) for history in steps for one in history}
                return run.info.run_id, known | {(name, -1) for name in run.data.params}
        tags[LOGGER] = me()
        return self.client.create_run(self.id, entry.start, tags, entry.name).info.run_id, set()

    def log(
        self,
        run: str,
        known: set[tuple[str, int]] | None,
        entry: Entry,
        steps: Sequence[tuple[str, float, int, int]] = (),
    ) -> None:
        """Log what a run does not have yet of parameters and steps; at the end also numbers, files and its status.

        Args:
            known: from `begin`, and added to. steps: name, value, step, and milliseconds since 1970.
        """
        from mlflow.entities import Metric, Param, RunTag

        if known is None:
            return
        ended, now = entry.status != "RUNNING", entry.end or int(time.time() * 1000)
        told = {(acceptable(name), step): (value, when) for name, value, step, when in (*steps, *entry.timed())}
        metrics = [Metric(name, *told[name, step], step) for name, step in told if (name, step) not in known]
        metrics += [Metric(acceptable(name), value, now, 0) for name, value in entry.metrics.items() if ended]
        named = {acceptable(name): value[:_CHARACTERS] for name, value in entry.params.items()}
        params = [Param(name, value) for name, value in named.items() if (name, -1) not in known]
        result = {RESULT: entry.digest} if entry.status in _FOUND else {}
        tags = [RunTag(*tag) for tag in (self._tags(entry) | result).items() if ended]
        while metrics or params or tags:
            self.client.log_batch(run, metrics[:_METRICS], params[:_PARAMS], tags)
            tags = []
            known |= {(one.key, one.step) for one in metrics[:_METRICS]} | {(one.key, -1) for one in params[:_PARAMS]}
            metrics, params = metrics[_METRICS:], params[_PARAMS:]
        if not ended:
            return
        for file in entry.files if self.takes_files else ():
            self.client.log_artifact(run, file)
        if entry.status == "SCHEDULED":
            self.client.update_run(run, status=entry.status)
        else:
            self.client.set_terminated(run, entry.status, entry.end)
        if entry.status in _FOUND:
            self._settle(entry.key)

    def leave(self) -> None:
        """Let tables whose page was not rendered wait for the next start."""
        for table in self.parents:
            for run in self.of(table, fresh=True):
                if run.info.status == "RUNNING" and run.data.tags.get(LOGGER) == me():
                    self.client.update_run(run.info.run_id, status="SCHEDULED")

    def _tags(self, entry: Entry) -> dict[str, str]:
        parent, tables = entry.papers[self.paper]
        above = {} if parent is None else {PARENT: self.parent(parent)}
        named = {**entry.tags, "mlflow.runName": entry.name}
        return {**named, **tables, **above, "tables": " ".join(name.removeprefix(f"{TABLE}.") for name in tables)}

    def _set(self, run: "Run", tags: dict[str, str], status: str | None = None) -> None:
        """Set what differs of a run's tags, without those of tables that show it no more, and its status."""
        from mlflow.entities import RunTag

        if changed := [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]:
            self.client.log_batch(run.info.run_id, tags=changed)
        if KEY in tags:
            for name in run.data.tags:
                if (name.startswith(f"{TABLE}.") or name == "error") and name not in tags:
                    self.client.delete_tag(run.info.run_id, name)
        if status not in (None, run.info.status):
            self.client.update_run(run.info.run_id, status=status)

    def _settle(self, key: str) -> "list[Run]":
        """Delete all runs of a key that are over but the first; those that are left."""
        first, *others = self.of(key, fresh=True)
        left = [run for run in others if _others(run)]
        for run in others:
            if run not in left:
                self.client.delete_run(run.info.run_id)
        return [first, *left]


def _others(run: "Run") -> bool:
    """Whether another process works on a run."""
    return not _is_over(run) and run.data.tags.get(LOGGER) != me()


def _rank(run: "Run") -> tuple[bool, int, int, str]:
    """The order of runs of one key, the same for all processes: the latest result first, then the oldest run."""
    finished = run.info.status == "FINISHED"
    return not finished, -(run.info.end_time or 0) if finished else 0, run.info.start_time or 0, run.info.run_id


def acceptable(name: str) -> str:
    """A name of a metric or parameter that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]
