"""Logging of a job: what it computes, from its beginning to its end. No job fails, or waits long, because of MLflow."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from reproduction.identity.names import Results
from reproduction.run.plan import Plan, read_plan
from reproduction.run.tracking.entries import begun, curve, entries_of, finished, of_table
from reproduction.run.tracking.line import LogLine
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.progress import heard_by


@contextmanager
def logged(plan: Plan, key: str, results: Results) -> Iterator[None]:
    """Log a result while the block computes it: RUNNING at once, each step of a training, and how it ends.

    A job that is killed says nothing, and its connection ends: KILLED.
    """
    if not plan.tracking or key in plan.tasks:
        yield
        return
    entry, line = begun(plan, key), LogLine()
    line.say(entry=entry.text())
    try:
        with heard_by(lambda training, record: line.say(steps=[*curve(training, record)])):
            yield
    except BaseException as error:
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        line.say(entry=replace(entry, status=status, tags={**entry.tags, "error": str(error)[:500]}).text())
        line.close()
        raise
    with suppress(RotquantError, LookupError, ValueError):  # its files say it later, or to their reader what is wrong
        line.say(entry=finished(plan, key, results).text())
    line.close()


def log_table(plan: Plan, name: str, results: Results) -> None:
    """Log a table whose page was rendered, with the results behind it, of which most are logged already."""
    table = plan.table(name)
    if plan.tracking and (table.runs or table.benchmarks):
        line = LogLine()
        for entry in entries_of(plan, name, results):
            line.say(entry=entry.text())
        line.close()


@contextmanager
def timed(table: str) -> Iterator[None]:
    """Log the cells of a speed table as the block measures them, in a job of the workflow."""
    path = os.environ.get("ROTQUANT_PLAN")
    plan = read_plan(Path(path)) if path else None
    if plan is None or not plan.tracking or table not in plan.tables:
        yield
        return
    entry, line = replace(of_table(plan, table), status="RUNNING", metrics={}, files=()), LogLine()
    line.say(entry=entry.text())
    with heard_by(lambda training, record: line.say(steps=[*curve(training, record)])):
        yield
    line.say(entry=replace(entry, status="FINISHED").text())
    line.close()
