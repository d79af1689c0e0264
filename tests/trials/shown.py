"""What a store of MLflow shows, read from its tables without MLflow, so that two stores can be compared."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from tests.trials.postgresql import Server
from tests.trials.served import wait_for

#: What differs between two stores that show the same: who has written a run.
_PASSING = ("rotquant.logger",)


class Cursor(Protocol):
    """A cursor of SQLite's or of PostgreSQL's."""

    def execute(self, statement: str) -> Any: ...

    def fetchall(self) -> list[tuple[Any, ...]]: ...


@dataclass(frozen=True)
class Shown:
    """An experiment.

    runs: what each live run says, by its key. keys: how often each key is live. unfinished: live runs that are not
    finished. deleted: how many runs were deleted. identities: the live runs' own names.
    """

    runs: dict[str, Any]
    keys: Counter[str]
    unfinished: int
    deleted: int
    identities: frozenset[str]

    def missing(self, reference: "Shown") -> str:
        """How this differs from what should be shown; empty where it does not."""
        problems = [
            *(f"{key} is lost" for key in reference.runs.keys() - self.runs.keys()),
            *(f"{key} should not be there" for key in self.runs.keys() - reference.runs.keys()),
            *(f"{key} is shown {count} times" for key, count in self.keys.items() if count > 1),
            *(
                f"{key} differs in {_where(self.runs[key], one)}"
                for key, one in reference.runs.items()
                if self.runs.get(key, one) != one
            ),
        ]
        return "; ".join(problems[:3])


def shown(cursor: Cursor, experiment: str) -> Shown:
    """What an experiment shows."""

    def rows(columns: str, rest: str) -> list[tuple[Any, ...]]:
        named = f"JOIN experiments e ON e.experiment_id = r.experiment_id WHERE e.name = '{experiment}' {rest}"
        cursor.execute(f"SELECT {columns} {named}")
        return cursor.fetchall()

    live = "AND r.lifecycle_stage = 'active'"
    about = rows("r.run_uuid, r.name, r.status, r.start_time, r.end_time FROM runs r", live)
    tags, said = {run: {} for run, *_ in about}, {run: {"metrics": [], "params": {}} for run, *_ in about}
    for run, name, value in rows("t.run_uuid, t.key, t.value FROM tags t JOIN runs r ON r.run_uuid = t.run_uuid", live):
        tags[run][name] = value
    for run, name, value in rows(
        "t.run_uuid, t.key, t.value FROM params t JOIN runs r ON r.run_uuid = t.run_uuid", live
    ):
        said[run]["params"][name] = value
    for run, *metric in rows(
        "t.run_uuid, t.key, t.value, t.step, t.timestamp FROM metrics t JOIN runs r ON r.run_uuid = t.run_uuid", live
    ):
        said[run]["metrics"].append(metric)
    keys = {run: found["rotquant.key"] for run, found in tags.items() if "rotquant.key" in found}
    runs = {}
    for run, name, status, start, end in about:
        if run in keys:
            period = () if tags[run]["rotquant.kind"] == "table" else (start, end)  # a table's is of when it was made
            one = {"name": name, "status": status, "period": period, "tags": _plain(tags[run], keys), **said[run]}
            runs[keys[run]] = {**one, "metrics": sorted(one["metrics"])}
    left = sum(status != "FINISHED" for _, _, status, *_ in about)
    deleted = len(rows("r.run_uuid FROM runs r", "AND r.lifecycle_stage = 'deleted'"))
    return Shown(runs, Counter(keys.values()), left, deleted, frozenset(tags))


def unfinished(server: Server, database: str) -> int:
    """How many live runs of results are not finished."""
    tables = "SELECT run_uuid FROM tags WHERE key = 'rotquant.kind' AND value = 'table'"
    live = "lifecycle_stage = 'active' AND status = 'RUNNING'"
    statement = f"SELECT count(*) FROM runs WHERE {live} AND run_uuid NOT IN ({tables})"
    return int(server.query(statement, database)[0][0])


def some_runs(server: Server, database: str, count: int) -> None:
    """Wait until a database has so many runs."""
    wait_for(lambda: count_runs(server, database) >= count)


def count_runs(server: Server, database: str) -> int:
    """How many runs a database has; 0 before it has tables."""
    if not server.query("SELECT 1 FROM pg_tables WHERE tablename = 'runs'", database):
        return 0
    return server.query("SELECT count(*) FROM runs", database)[0][0]


def _plain(tags: dict[str, str], keys: dict[str, str]) -> dict[str, str]:
    """Tags without what each store names in its own way: runs become their keys, and experiments nothing."""
    text = json.dumps({name: value for name, value in tags.items() if name not in _PASSING})
    text = re.sub(r"\b[0-9a-f]{32}\b", lambda run: keys.get(run[0], "another"), text)
    return json.loads(re.sub(r"#/experiments/\d+", "#/experiments/", text))


def _where(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The parts in which two runs differ, of tags by name."""
    parts = [name for name in other if one[name] != other[name]]
    tags = [
        name for name in one["tags"].keys() | other["tags"].keys() if one["tags"].get(name) != other["tags"].get(name)
    ]
    return ", ".join([*parts, *sorted(tags)])
