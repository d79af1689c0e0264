"""A small project whose runs are computed, for tests of what MLflow shows of it and of where it keeps that."""

import math
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run

from reproduction.run.results import RunResult, write_result
from reproduction.run.tracking.store import opened
from reproduction.sources import load_project
from reproduction.tables.project import Project
from tests.helpers.circumstances import circumstances
from tests.helpers.project import Copy, checkpoints_by_name

ROWS = [
    {"name": "Baseline", "method": "baseline"},
    {"name": "QuaRot", "method": "quarot"},
    {"name": "INT8", "method": "quarot-rtn", "recipe": {"weights": {"scheme": {"bits": 8}}}},
]
COMMON = {
    "section": "5.1",
    "caption": "A small table.",
    "columns": ["Llama-2-7B", "Llama-2-13B"],
    "baseline": "Baseline",
    "claims": [],
}
PERPLEXITY = {"kind": "perplexity", "corpus": "wikitext2"}
TABLES = {
    "paper": "quarot",
    "title": "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    "tables": [
        {"id": "quarot_table1", "title": "first", "metrics": [PERPLEXITY], "rows": ROWS[:2], **COMMON},
        {
            "id": "quarot_table9",
            "title": "second, which shares two rows with the first",
            "metrics": [PERPLEXITY, {"kind": "zero_shot", "suite": "shipped", "corpus": "wikitext2"}],
            "rows": [ROWS[0], {**ROWS[1], "name": "INT4"}, ROWS[2]],
            **COMMON,
        },
    ],
}
SHARED = 6
"""Runs of Table 1, all of which Table 9 has too: baseline and QuaRot with two seeds, on two models."""


def metrics(run: Any, value: float) -> dict[str, float]:
    if run.metric.kind == "perplexity":
        return {"perplexity": value, "nll": math.log(value), "tokens": 2044, "windows": 4}
    accuracies = dict.fromkeys(run.metric.tasks, value)
    return {"average": value, **accuracies, **{f"{task}.acc_norm,none": value for task in accuracies}}


def compute(project: Project, value: float = 11.0, row: str | None = None) -> None:
    """Write the run files of all tables, or of the runs that Table 1 prints in a row."""
    for cell in (cell for name in project.tables for cell in project.cells(name)):
        if row in (None, cell.row):
            for run in cell.runs:
                numbers = metrics(run, value + run.seed / 10)
                record = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.5}
                write_result(project.results.run(run.key), RunResult(run, numbers, record, None))


def make_project(root: Path, patch: pytest.MonkeyPatch, database: Path) -> Project:
    """The project in that folder, which becomes the working folder: all of it computed, with a copy of a database."""
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checkpoints_by_name(patch)
    Copy(root).set_tables(TABLES)
    patch.chdir(root)  # to which corpora are relative
    shutil.copy(database, root)
    loaded = load_project(root=root)
    compute(loaded)
    return loaded


def search(query: str = "tags.`rotquant.kind` = 'run'", experiment: str = "quarot") -> list[Run]:
    """The runs that the store of the working folder shows, or of MLFLOW_TRACKING_URI."""
    client = opened()
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id], query, max_results=1000))


def one(query: str) -> Run:
    (found,) = search(query)
    return found


def rows() -> set[tuple[object, ...]]:
    """All that the database in the working folder holds."""
    with closing(sqlite3.connect("mlflow.db")) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {(table, *row) for table in tables for row in database.execute(f"SELECT * FROM {table}")}
