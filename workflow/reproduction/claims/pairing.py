"""Pairing of runs: whether two were measured on the same windows of text or the same items of tasks."""

from collections.abc import Hashable, Iterator
from typing import Any

from reproduction.run.results import RunResult

#: Fields of a metric that choose windows or items; the rest says how these are measured.
_CHOOSES = ("kind", "corpus", "split", "sequence_length", "max_windows", "suite", "tasks", "path", "limit")


def same_items(one: RunResult, other: RunResult) -> bool:
    """Whether no record of both runs shows that their windows or items differ.

    Compared are the metric's choice of them, the digests of the text and of the tasks, and the number of samples. An
    older file lacks some of these; then the common ones are compared.
    """
    mine, others = (dict(_identity(run)) for run in (one, other))
    return all(mine[name] == others[name] for name in mine.keys() & others.keys())


def source(result: RunResult) -> Hashable:
    """The windows or items of a run, to compare with those of another model's."""
    return tuple(sorted((name, str(value)) for name, value in _identity(result)))


def _identity(result: RunResult) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The records, by name, that identify a run's windows or items."""
    metric = result.run.metric
    yield from (((name,), getattr(metric, name)) for name in _CHOOSES if hasattr(metric, name))
    text = result.provenance.get("corpora", {}).get("evaluation", {})
    split = text.get("splits", {}).get(getattr(metric, "split", None), {})
    for where, record in ((("text",), text), (("split",), split)):
        yield from (((*where, name), record[name]) for name in ("ids", "sha256") if name in record)
    for name, task in result.provenance.get("tasks", {}).get("tasks", {}).items():
        yield from (((name, field), task[field]) for field in ("definition", "sha256") if field in task)
    yield from (((name, "samples"), len(values)) for name, values in result.samples.items())
