"""The MLflow runs of an experiment by key: each shown once, replaced when its content changes, and never doubled."""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from reproduction.render.pages.model import Logged, Report
from reproduction.render.tracking.experiments import describe, experiment_name, open_experiment, view_link
from reproduction.render.tracking.store import Store, gone, opened
from reproduction.render.tracking.views import KIND, TABLE, acceptable
from reproduction.tables.project import Project
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.entities import Run as MlflowRun


KEY, RESULT, PARENT = "rotquant.key", "rotquant.result", "mlflow.parentRunId"

#: The tag with the time when writing a run began, in seconds since 1970; and the seconds after which it counts as
#: abandoned. The clocks of a group's machines may differ by minutes.
BEGUN, _ABANDONED = "rotquant.begun", 3600

#: Most parameters and metrics in one request: MLflow takes 100 parameters, and 1000 of both.
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 900

#: Runs per search request.
_PAGE = 1000

#: The tag of a run's overview, which describes a run until a report's beginning replaces it; and its most characters:
#: MLflow takes 5,000 or 8,000, by its version.
NOTE, _LONGEST_NOTE = "mlflow.note.content", 5000


@dataclass(frozen=True)
class LoggedEntry:
    """The content of one MLflow run.

    key: of a run, a rotation or weights in our files; a table's id. tags: None and "" are left out.
    content: all its sources; None: it never counts as changed.
    record: its provenance, with the date and, unless it took none, the seconds; None: it is of now.
    metrics: results, which MLflow draws. history: numbers step by step. notes: numbers that are no results, as tags.
    fields: nested settings, which become parameters with dotted names.
    """

    key: str
    kind: str
    name: str
    tags: Mapping[str, object]
    content: object = None
    record: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    notes: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str | None:
        """A hash of the content."""
        return None if self.content is None else short_hash(canonical_json(self.content))

    @property
    def all_tags(self) -> dict[str, str]:
        """The tags that it should have. Some stores refuse non-finite numbers: a tag holds those instead."""
        record = self.record or {}
        commit, code = record.get("git_commit"), record.get("code_digest")
        tags = {
            KEY: self.key,
            RESULT: self.digest,
            KIND: self.kind,
            "mlflow.runName": self.name,
            "git_commit": commit,
            "mlflow.source.git.commit": commit,
            "code_digest": code,
            **self.tags,
            **{f"metric.{acceptable(name)}": one for name, one in self.metrics.items() if not math.isfinite(one)},
            **{f"metric.{acceptable(name)}": _rounded(one) for name, one in self.notes.items()},
        }
        return {name: str(value) for name, value in tags.items() if value not in (None, "")}

    @property
    def period(self) -> tuple[int, int] | None:
        """Start and end in milliseconds."""
        if self.record is None:
            return None
        end = int(datetime.fromisoformat(self.record["date"]).timestamp() * 1000)
        return end - int(1000 * float(self.record.get("seconds", 0))), end

    def all_metrics(self) -> "list[Metric]":
        """The finite numbers in four digits, those of a history at even distances in time."""
        from mlflow.entities import Metric

        start, end = self.period or (0, 0)
        numbers = [
            (name, value, start + (end - start) * (place + 1) // len(self.history), step["step"])
            for place, step in enumerate(self.history)
            for name, value in step.items()
            if name != "step" and isinstance(value, int | float)
        ]
        numbers += [(name, value, end, 0) for name, value in self.metrics.items()]
        return [
            Metric(acceptable(name), _rounded(one), time, step)
            for name, one, time, step in numbers
            if math.isfinite(one)
        ]


class ShownExperiment:
    """The experiment of one paper: its live MLflow runs, searched once, and those updated so far.

    live: MLflow runs found at the start, by key. shown: the MLflow run id of each updated key.
    """

    def __init__(self, store: Store, project: Project, paper: str) -> None:
        self.store, self.client, self.project, self.paper = store, store.client, project, paper
        self.name = experiment_name(store, project, paper)
        self.id = open_experiment(store, self.name)
        self.live = self._live_runs()
        self.shown: dict[str, str] = {}

    def show(self, entry: LoggedEntry) -> str:
        """Id of the one run of a key: a live one that shows the same, else a new one that replaces the live ones.

        A run that stays is given its current tags: tables change, and rows are renamed. On a server, a run with a later
        result stays too: another clone of the project has computed it since.
        """
        older = {run.info.run_id: run for run in self.live.get(entry.key, [])}
        best = min((run for run in older.values() if self._stands(run, entry)), key=_rank, default=None)
        kept = self._create(entry) if best is None else best.info.run_id
        if best is not None:
            tags = entry.all_tags if _shows(best, entry.digest) else _of_tables(entry.all_tags)
            self._update_tags(best, {name: value for name, value in tags.items() if name != NOTE})
        for run in older.keys() - {kept}:
            self._delete(run)
        self.shown[entry.key] = kept
        return kept

    def logged(self, table: str, runs: Mapping[str, Any], rotations: Mapping[str, Any]) -> Logged:
        """Location of a shown table, and the runs and learned rotations of these keys."""
        behind = ({key: self.shown[key] for key in keys if key in self.shown} for keys in (runs, rotations))
        return Logged(self.store.uri, self.name, self.id, self.shown[table], *behind)

    def finish(self) -> None:
        """Update the description and the views after the runs, and drop doubles on a server."""
        if self.store.location.path is None:
            self.drop_doubles()
        live = (run for runs in self._live_runs().values() for run in runs)
        describe(self.store, self.project, self.paper, [run for run in live if _is_whole(run)])

    def drop_doubles(self) -> None:
        """Delete all but one of a key's whole runs that processes made at the same time; all choose the same one.

        `_rank` orders runs by constant properties, so no process deletes the first of all. For any two runs, the
        process that finished later finds both here, once they are whole, and deletes the one with the lower rank.
        """
        live = self._live_runs()
        moved: dict[str, str] = {}
        for key, mine in self.shown.items():
            whole = [run for run in live.get(key, []) if _is_whole(run)]
            kept = min(whole, key=_rank).info.run_id if whole else mine
            moved |= dict.fromkeys({mine, *(run.info.run_id for run in whole)} - {kept}, kept)
            self.shown[key] = kept
        for run in moved:
            self._delete(run)
        for run in (run for runs in live.values() for run in runs if run.info.run_id not in moved):
            if run.data.tags.get(PARENT) in moved:
                self._update_tags(run, {**run.data.tags, PARENT: moved[run.data.tags[PARENT]]})

    def _stands(self, run: "MlflowRun", entry: LoggedEntry) -> bool:
        """Whether a run is whole and shows its content, or on a server a later result."""
        if _shows(run, entry.digest):
            return True
        computed = entry.period[1] if entry.period else math.inf
        return self.store.location.path is None and _is_whole(run) and int(run.info.end_time or 0) > computed

    def _live_runs(self) -> "dict[str, list[MlflowRun]]":
        """The runs that are not deleted, by key.

        Runs left unfinished by a killed process are deleted: at once where no other process can be at work on them, on
        a server when they are old.
        """
        found: dict[str, list[MlflowRun]] = {}
        for run in self._listed():
            if KEY in run.data.tags:
                found.setdefault(run.data.tags[KEY], []).append(run)
            elif KIND in run.data.tags and (
                self.store.location.path or time.time() - float(run.data.tags.get(BEGUN, 0)) > _ABANDONED
            ):
                self._delete(run.info.run_id)
        return found

    def _listed(self) -> "Iterator[MlflowRun]":
        """All live runs. A page begins at the time where the last one ended: places shift when others delete runs."""
        seen: set[str] = set()
        until, token, order = "", None, ["attributes.start_time DESC"]
        while True:
            page = self.client.search_runs([self.id], until, max_results=_PAGE, page_token=token, order_by=order)
            fresh = [run for run in page if run.info.run_id not in seen]
            yield from fresh
            if not page.token:
                return
            seen |= {run.info.run_id for run in fresh}
            token = None if fresh else page.token  # more than a page of runs that started at the same time
            until = f"attributes.start_time <= {page[-1].info.start_time}" if fresh else until

    def _create(self, entry: LoggedEntry) -> str:
        """Create a finished run and return its id. The key is written last: a run with a key is whole."""
        from mlflow.entities import Param

        tags, (start, end) = entry.all_tags, entry.period or (None, None)
        key = tags.pop(KEY)
        tags[BEGUN] = f"{time.time():.0f}"
        run = self.client.create_run(self.id, start, tags, entry.name).info.run_id
        metrics = entry.all_metrics()
        (fields,) = pd.json_normalize([dict(entry.fields)]).to_dict("records")
        said = {acceptable(str(name)): str(value)[:5000] for name, value in fields.items() if value is not None}
        parameters = [Param(name, value) for name, value in said.items()]
        while metrics or parameters:
            self.client.log_batch(run, metrics[:_METRICS_AT_ONCE], parameters[:_PARAMETERS_AT_ONCE])
            metrics, parameters = metrics[_METRICS_AT_ONCE:], parameters[_PARAMETERS_AT_ONCE:]
        self.client.set_terminated(run, end_time=end)
        self.client.set_tag(run, KEY, key)
        return run

    def _update_tags(self, run: "MlflowRun", tags: Mapping[str, str]) -> None:
        """Set these tags on a run, and remove tags of other tables."""
        from mlflow.entities import RunTag

        with self._unless_deleted(run.info.run_id):
            if changed := [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]:
                self.client.log_batch(run.info.run_id, tags=changed)
            for name in run.data.tags:
                if name.startswith(f"{TABLE}.") and name not in tags:
                    with gone():
                        self.client.delete_tag(run.info.run_id, name)

    def _delete(self, run: str) -> None:
        """Delete a run that another process may have deleted already."""
        with self._unless_deleted(run):
            self.client.delete_run(run)

    @contextmanager
    def _unless_deleted(self, run: str) -> Iterator[None]:
        """Ignore failures because another process has deleted the run."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException:
            with gone():
                if self.client.get_run(run).info.lifecycle_stage != "deleted":
                    raise


def log_report(root: Path, logged: Logged, report: Report, files: Sequence[Path]) -> None:
    """Attach a report, its figure and its table to a table's run, replacing those of the same name, and its score.

    The run's overview, on which MLflow opens it, shows the report's beginning.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    from mlflow.entities import RunTag

    score = report.claims.score
    claims = {"hold": score.reproduced, "contradicted": score.not_reproduced, "no_effect": score.no_effect}
    claims |= {"undecided": score.undecided, "not_checkable": score.unchecked}
    tags = {f"claims.{name}": str(count) for name, count in claims.items()}
    with opened(root) as store:
        parent = _current(store, logged)
        kept = files if store.location.reaches(str(parent.info.artifact_uri)) else []
        for page in (path for path in files if path.suffix == ".md"):
            tags[NOTE] = _overview(replace(logged, parent=parent.info.run_id), page, kept)
        store.client.log_batch(parent.info.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        for path in kept:
            store.client.log_artifact(parent.info.run_id, str(path))


def _current(store: Store, logged: Logged) -> "MlflowRun":
    """A table's run: the logged one, or the one with which another process has replaced it."""
    run = store.client.get_run(logged.parent)
    if run.info.lifecycle_stage == "deleted":
        found = store.client.search_runs([logged.experiment_id], f"tags.`{KEY}` = '{run.data.tags[KEY]}'")
        return next(iter(found), run)
    return run


def _overview(logged: Logged, page: Path, files: Sequence[Path]) -> str:
    """The beginning of a report's page, below links to the files attached and to the table's charts."""
    artifacts = f"#/experiments/{logged.experiment_id}/runs/{logged.parent}/artifacts"
    links = [f"[{path.name}]({artifacts}/{path.name})" for path in files]
    if logged.runs:
        links.append(f"[charts]({view_link(logged.experiment_id, page.stem)})")
    text = re.sub(r"!\[.*\n", "", page.read_text(encoding="utf-8").partition("<details>")[0])
    shown = f"{' · '.join(links)}\n\n{text}"
    return shown if len(shown) < _LONGEST_NOTE else shown[:_LONGEST_NOTE].rpartition("\n")[0]


def _rounded(number: float) -> float:
    """A number in four significant digits, since MLflow prints all digits."""
    return float(f"{number:.4g}")


def _shows(run: "MlflowRun", digest: str | None) -> bool:
    """Whether a run is whole and shows this content."""
    return _is_whole(run) and run.data.tags.get(RESULT) == digest


def _is_whole(run: "MlflowRun") -> bool:
    """Whether a run was complete when it was read: MLflow reads its status first, and its tags last."""
    return run.info.status == "FINISHED"


def _rank(run: "MlflowRun") -> tuple[int, str]:
    """The order of runs of one key: those of the latest result first, then by an order common to all processes."""
    return -int(run.info.end_time or 0) if RESULT in run.data.tags else 0, run.info.run_id


def _of_tables(tags: Mapping[str, str]) -> dict[str, str]:
    """A run's tags for its places in tables."""
    return {name: value for name, value in tags.items() if name == PARENT or name.startswith(f"{TABLE}.")}
