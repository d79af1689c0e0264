"""A group's project for the trial of tracking: tables that share rows, all of it computed by stand-ins."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.project import CONFIG, TABLES, Copy
from tests.trials import projects
from tests.trials.shown import Shown, shown
from tests.trials.writers import Writers

SYNC = "runs sync-tracking"


def some_tables(count: int, row: str = "QuaRot") -> dict[str, Any]:
    """Tables that share two rows, each with one of its own; the last has learned rotations."""
    (table,) = TABLES["tables"]
    shared = [{"name": "Baseline", "method": "baseline"}, {"name": row, "method": "quarot-rtn"}]
    made = []
    for place in range(count):
        recipe = {"weights": {"scheme": {"bits": 2 + place % 7}}, "activations": {"bits": 8 - place // 7}}
        own = {"name": f"Own {place}", "method": "quarot-rtn", "recipe": recipe}
        learned = [{"name": "Learned", "method": "spinquant-easy"}] if place == count - 1 else []
        about = {"id": f"quarot_table{place + 1}", "rows": [*shared, own, *learned], "claims": [], "figure": None}
        made.append({**table, **about, "published": None})
    return {**TABLES, "tables": made}


def computed(root: Path, writers: Writers, tables: int, seeds: int) -> Copy:
    """A project with that many tables and seeds, all of it computed and no page rendered."""
    project = projects.mechanics(root)
    project.set_config({**CONFIG, "tracking": "group", "seeds": [*range(seeds)]})
    project.set_tables(some_tables(tables))
    compute(project, writers)
    return project


def compute(project: Copy, writers: Writers) -> None:
    """Compute what is not current of a project."""
    environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
    (done,) = writers.run([(project, "runs execute --jobs 1")], environment)
    made = writers.run([(project, f"report table {table}") for table in tables_of(project)], environment)
    for one in (done, *made):
        assert one.status == 0, one.said


def alone(project: Copy, writers: Writers) -> Shown:
    """What one process shows of a project in SQLite, with pages."""
    for table in tables_of(project):
        project.write(f"reports/{table}.md", f"# {table}")
    (done,) = writers.run([(project, SYNC)], {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"})
    assert done.status == 0, done.said
    with closing(sqlite3.connect(project.root / "mlflow.db")) as database:
        return shown(database.cursor(), "group/quarot")


def clone(project: Copy, root: Path) -> Copy:
    """A copy of the computed project in a folder of its own."""
    made = projects.mechanics(root)
    made.set_tables(some_tables(len(tables_of(project))))
    for part in ("config", "results", "reports"):
        shutil.copytree(project.root / part, made.root / part, dirs_exist_ok=True)
    return made


def tables_of(project: Copy) -> list[str]:
    """The names of a project's tables."""
    text = (project.root / "workflow/papers/quarot/tables.yaml").read_text(encoding="utf-8")
    return [table["id"] for table in yaml.safe_load(text)["tables"]]
