"""A project that is computed without any fault, and the checks that one with faults computes the same in the end."""

import json
import shutil
import sqlite3
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reproduction.run.results import read_result
from rotquant.foundation.data import merge
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import file_digest
from tests.helpers.project import Copy
from tests.trials import projects
from tests.trials.faults import Job, loggers_ended
from tests.trials.trial import Trial

WORKFLOW = ("snakemake", "--cores", "2", projects.REPORT)
DONE = "Nothing to be done"
#: What a run leaves in a project.
LEFT = ("results", "reports", "logs", ".snakemake", "mlartifacts", "mlflow.db", "mlflow.db.lock")


@dataclass(frozen=True)
class Undisturbed:
    """A project, how it is set up, and what an undisturbed run of it computed in how many seconds."""

    project: Copy
    make: Callable[[Path], Copy]
    digests: dict[str, str]
    shown: list[tuple[str, str]]
    seconds: float


def shipped(root: Path) -> Copy:
    """The default job, Table 1, with one seed and one of its three models."""
    return changed(projects.shipped(root), projects.ONE_COLUMN)


def tiny(root: Path) -> Copy:
    """A small project that computes for real, with MLflow."""
    return projects.tiny(root, tracking=True)


def mechanics(root: Path) -> Copy:
    """A small project with stand-ins for what computes, with MLflow.

    Its checkpoints are folders, though nothing reads them: what is none is a name on the hub, which is asked.
    """
    project = changed(projects.mechanics(root), {"tracking": True})
    for name in ("small", "larger"):
        (root / "models" / name).mkdir(parents=True)
    name = 'str({}).split("/")[-1]'
    project.edit("rotquant/models/digests.py", "str(path)", name.format("path"))
    project.edit("workflow/reproduction/run/stages/runs.py", "len(checkpoint)", f"len({name.format('checkpoint')})")
    return project


def changed(project: Copy, changes: dict[str, Any]) -> Copy:
    """A project with another configuration."""
    config = yaml.safe_load((project.root / "config/config.yaml").read_text(encoding="utf-8"))
    project.set_config(merge(config, changes))
    return project


def undisturbed(
    trial: Trial, make: Callable[[Path], Copy], place: Path, before: Callable[[Copy], None] = lambda project: None
) -> Undisturbed:
    """Compute a project without any fault.

    Args:
        before: what happens to it before it is computed.
    """
    project = make(place)
    before(project)
    started = time.monotonic()
    status, output = Job(project, *WORKFLOW).ends()
    seconds = time.monotonic() - started
    trial.check("An undisturbed run completes", status == 0 and completes(project), output[-1000:])
    trial.say(f"the undisturbed run of {place.name} took {seconds:.0f} s")
    return Undisturbed(project, make, projects.digests(place), shown_in_mlflow(place), seconds)


def completes(project: Copy, *around: str) -> bool:
    """Whether a start has nothing to do any more."""
    status, output = Job(project, *around, *WORKFLOW).ends()
    return status == 0 and DONE in output


def unlock(project: Copy) -> None:
    """Let Snakemake start again where it was killed with -9, as its user does."""
    if any((project.root / ".snakemake/locks").glob("*.lock")):
        Job(project, *WORKFLOW, "--unlock").ends()


def shown_in_mlflow(root: Path) -> list[tuple[str, str]]:
    """Name and status of each run that MLflow shows."""
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        return sorted(database.execute("SELECT name, status FROM runs WHERE lifecycle_stage = 'active'"))


def ends_well(trial: Trial, what: str, project: Copy, calm: Undisturbed, *around: str) -> None:
    """Check the start after a fault: it completes, with the digests of an undisturbed run, and leaves nothing behind.

    Args:
        around: what stands before the commands.
    """
    unlock(project)
    status, output = Job(project, *around, *WORKFLOW).ends()
    trial.check(f"After {what} the next start completes", status == 0, output[-2000:])
    other = projects.difference(calm.digests, projects.digests(project.root))
    trial.check(f"After {what} all digests equal those of an undisturbed run", not other, other)
    trial.check("A completed start leaves nothing to do", completes(project, *around))
    loggers_ended(project.root)
    left = [str(path) for path in project.root.rglob(".tmp-*")]
    trial.check("No temporary file is left after a completed start", not left, ", ".join(left))


def in_sentences(output: str) -> bool:
    """Whether an output is without a traceback."""
    return "Traceback (most recent call last)" not in output


def finished(root: Path) -> dict[Path, int]:
    """Results that lie in a project, and when each was written, without those of jobs that Snakemake saw no end of."""
    patterns = ("results/runs/*.json", "results/weights/*/weights.json", "results/rotations/*/rotation.json")
    begun = {urlsafe_b64decode(mark.name).decode() for mark in (root / ".snakemake/incomplete").glob("*")}
    found = [path for pattern in patterns for path in root.glob(pattern)]
    return {path: path.stat().st_mtime_ns for path in found if str(path.relative_to(root)) not in begun}


def is_whole(root: Path) -> bool:
    """Whether everything that lies in a project under its own name is whole."""
    try:
        for path in root.glob("results/runs/*.json"):
            read_result(path)
        for path in root.glob("results/*/*/*.json"):
            json.loads(path.read_text(encoding="utf-8"))
        for path in root.glob("results/rotations/*/rotation.json"):
            told = json.loads(path.read_text(encoding="utf-8"))["digest"]
            if file_digest(path.with_name("rotations.safetensors")) != told:
                return False
    except (RotquantError, ValueError):
        return False
    return True


def empty(project: Copy) -> None:
    """Remove all that was computed."""
    for name in LEFT:
        path = project.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
