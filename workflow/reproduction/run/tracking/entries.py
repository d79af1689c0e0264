"""What MLflow shows of a result, when it begins and once its files are there, as plain data."""

import csv
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from reproduction.identity.names import HISTORY_FILE, ROTATION_RECORD, WEIGHTS_RECORD, Results
from reproduction.run.plan import LARGE, Plan, PlannedTable
from reproduction.run.results import FIGURES, REPORTS, read_result, table_path
from reproduction.run.samples import observations
from reproduction.tables.quantities import endpoints, quantities
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, file_digest, read_json, read_object, short_hash

#: Tags by which runs are found: what a run is of, its kind, the digest of its code, and the table's row that it is in.
KEY, KIND, CODE, RESULT, TABLE = (f"rotquant.{name}" for name in ("key", "kind", "code", "result", "table"))
NOTE, _LONGEST_NOTE = "mlflow.note.content", 4000
#: Half widths of a 95 % interval in standard errors, of so many windows or items that Student's t is normal.
_WIDE = 1.96


@dataclass(frozen=True)
class Entry:
    """One result.

    key: of a result, or a table's id. kind: run, weights, rotation or table. project: the configuration's `tracking`.
    papers: in whose experiments it is, each with the table whose run is its parent and the tags of its tables there.
    status: as MLflow has it. params, tags, metrics: by name. history: name, value and step of what was learned.
    start, end: milliseconds since 1970, None for now. files: artifacts, below the project's folder.
    """

    key: str
    kind: str
    name: str
    project: bool | str
    papers: Mapping[str, tuple[str | None, Mapping[str, str]]]
    status: str = "RUNNING"
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: tuple[tuple[str, float, int], ...] = ()
    start: int | None = None
    end: int | None = None
    files: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A digest of what was found, whatever the tables are that show it."""
        found = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("name", "papers", "tags", "params", "files")
        }
        return short_hash(canonical_json([found, self.tags.get(NOTE), self.tags.get(CODE)]))

    def timed(self) -> Iterator[tuple[str, float, int, int]]:
        """The history with a time for each step, at even distances between start and end, in milliseconds."""
        start, end = self.start or 0, self.end or 0
        count = max((step for *_, step in self.history), default=0) + 1
        return ((name, value, step, start + (end - start) * step // count) for name, value, step in self.history)

    def text(self) -> str:
        """The entry as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: Mapping[str, Any]) -> "Entry":
        """The entry of JSON."""
        return cls(**{**text, "history": tuple(map(tuple, text["history"]))})


def begun(plan: Plan, key: str) -> Entry:
    """A result that is about to be computed.

    Raises:
        ConfigError: no table asks for it.
    """
    if key in plan.runs:
        kind, planned, first, metric = "run", plan.runs[key], key, True
    else:
        kind, known = ("weights", plan.weights) if key in plan.weights else ("rotation", plan.rotations)
        planned, metric = known[key], False
        first = planned.run
    fields = plan.planned(first).fields
    papers = {
        paper: (next(iter(tables)), {f"{TABLE}.{name}": rows for name, rows in tables.items()})
        for paper, tables in _places(plan, key, kind).items()
    }
    row, column, model = next(places for table in plan.tables.values() if (places := table.runs.get(first)))[0]
    shown = {"model": model, "seed": fields["seed"], "dtype": fields["dtype"], "checkpoint": fields["checkpoint"]}
    large = {name: plan.shared[fields[name]] for name in LARGE}
    settings = {**shown, **large["recipe"], **({"metric": large["metric"]} if metric else {})}
    tags = {
        KEY: key,
        KIND: kind,
        CODE: planned.code,
        "row": row,
        "column": column,
        "model": model,
        "checkpoint": Path(fields["checkpoint"]).name,
        "seed": fields["seed"],
    }
    name = planned.label if metric else f"{kind}: {planned.label}"
    return Entry(key, kind, name, plan.tracking, papers, params=dict(_flat(settings)), tags=_texts(tags))


def finished(plan: Plan, key: str, results: Results) -> Entry:
    """A result whose files are there.

    Raises:
        ResultError: they are missing or damaged.
    """
    entry = begun(plan, key)
    if entry.kind == "run":
        result = read_result(results.run(key))
        record, metrics = result.provenance, _metrics(result, entry.tags["checkpoint"])
    else:
        folder = results.weights(key) if entry.kind == "weights" else results.rotation(key)
        record = read_object(folder / (WEIGHTS_RECORD if entry.kind == "weights" else ROTATION_RECORD), "record")
        bits = record.get("bits_per_weight", {})
        metrics = {f"bits per weight/{part}": value for part, value in bits.items()}
        entry = replace(entry, history=tuple(_curves(read_json(folder / HISTORY_FILE, "history of a training"))))
    metrics["seconds"] = record["seconds"]
    end = int(datetime.fromisoformat(record["date"]).timestamp() * 1000)
    finite = {name: float(f"{value:.6g}") for name, value in metrics.items() if math.isfinite(value)}
    others = {f"metric.{name}": value for name, value in metrics.items() if name not in finite}
    commit = {"mlflow.source.git.commit": record.get("git_commit"), "gpu": record.get("gpu")}
    return replace(
        entry,
        status="FINISHED",
        tags={**entry.tags, **_texts({**commit, **others})},  # some stores refuse numbers that are not finite
        metrics=finite,
        start=end - int(1000 * record["seconds"]),
        end=end,
    )


def of_table(plan: Plan, name: str) -> Entry:
    """A table whose page is rendered: the beginning of the page, and page, numbers and figure as artifacts."""
    table = plan.table(name)
    page, numbers = REPORTS / f"{name}.md", table_path(name)
    files = [page, numbers, *([FIGURES / f"{table.figure}.svg"] if table.figure else [])]
    text = page.read_text(encoding="utf-8").partition("<details>")[0] if page.exists() else ""
    lines = [*csv.DictReader(numbers.open(encoding="utf-8"))] if table.benchmarks and numbers.exists() else []
    times = [line for line in lines if line["value"] and line["origin"] != "published"]
    note = "\n".join(line for line in text.splitlines() if not line.startswith("!["))
    note = f"``tags.`{TABLE}.{name}` != ''`` finds the runs of this table.\n\n{note}"[:_LONGEST_NOTE]
    return Entry(
        name,
        "table",
        name,
        plan.tracking,
        {table.paper: (None, {})},
        status="FINISHED",
        tags={
            KEY: name,
            KIND: "table",
            NOTE: note,
            CODE: short_hash(" ".join(map(str, map(file_digest, files)))),
            **({"gpu": times[0]["device"]} if times else {}),
        },
        metrics={f"{line['grid']}/{line['row']}/{line['column']}": float(line["value"]) for line in times},
        files=tuple(str(path) for path in files if path.exists()),
    )


def keys_of(plan: Plan, table: PlannedTable) -> list[str]:
    """What is computed for a table: its runs, their weights, and the rotations of these."""
    weights = dict.fromkeys(key for run in table.runs if (key := plan.runs[run].weights))
    rotations = dict.fromkeys(key for one in weights if (key := plan.weights[one].rotation))
    return [*table.runs, *weights, *rotations]


def entries_of(plan: Plan, name: str, results: Results, but: Collection[str] = ()) -> Iterator[Entry]:
    """A table, and all that is computed for it of which the files are there and whole; some keys left out.

    A table that lacks runs is SCHEDULED.
    """
    status = "FINISHED"
    for key in keys_of(plan, plan.table(name)):
        if key in but:
            continue
        try:
            yield finished(plan, key, results)
        except (ResultError, LookupError, ValueError):  # it is not computed, or its page says what is wrong with it
            status = "SCHEDULED" if key in plan.runs else status
    yield replace(of_table(plan, name), status=status)


def _places(plan: Plan, key: str, kind: str) -> dict[str, dict[str, str]]:
    """The tables that show a result, by paper, each with its rows there."""
    found: dict[str, dict[str, str]] = {}
    for name, table in plan.tables.items():
        runs = [key] if kind == "run" else [run for run in table.runs if key in _behind(plan, run)]
        rows = [place for run in runs for place in table.runs.get(run, ())]
        named = dict.fromkeys(row if column == model else f"{row} / {column}" for row, column, model in rows)
        if named:
            found.setdefault(table.paper, {})[name] = "; ".join(named)
    return found


def _behind(plan: Plan, run: str) -> tuple[str | None, ...]:
    weights = plan.runs[run].weights
    return (weights, plan.weights[weights].rotation) if weights else ()


def _metrics(result: Any, checkpoint: str) -> dict[str, float]:
    """Numbers of a run with the ends of their 95 % intervals over windows or items.

    The main one has another name too, of this checkpoint alone, so that a chart of it compares the rows of a table.
    """
    known = quantities(result.run.metric)
    found: dict[str, float] = {}
    for one in (*known, *endpoints(result.run.metric)):
        if one.key not in result.metrics:
            continue
        value = found[one.name] = result.metrics[one.key]
        each = observations(result.run.metric, one.key, result.metrics, result.samples)
        if each is not None and len(each) > 1:
            half = _WIDE * float(each.std(ddof=1)) / math.sqrt(len(each))
            found |= {f"{one.name} low": value - half, f"{one.name} high": value + half}
    main = next((one.name for one in known if one.name in found), None)
    return found if main is None else {f"{checkpoint}/{main}": found[main], **found}


def _curves(history: list[dict[str, Any]]) -> Iterator[tuple[str, float, int]]:
    for record in history:
        yield from curve(f"block {record['block']}" if "block" in record else "", record)


def curve(training: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """The numbers of a step: name, value and step. Blocks that are trained one by one have names of their own."""
    place = f"{training}/" if training.startswith("block ") or "/" in training else ""
    for name, value in record.items():
        if name not in ("step", "block") and isinstance(value, int | float) and math.isfinite(value):
            yield f"{place}{name}", float(f"{value:.6g}"), record["step"]


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings by dotted names, those that are None left out."""
    if isinstance(settings, Mapping) and settings:
        for name, value in settings.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif settings is not None:
        yield prefix, str(settings)


def _texts(tags: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in tags.items() if value is not None}
