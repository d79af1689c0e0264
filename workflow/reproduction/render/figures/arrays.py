"""Data of figures in addition to a table's numbers: arrays of run files, histories of learned rotations."""

from typing import Any

from reproduction.identity.names import HISTORY_FILE
from reproduction.run.results import read_result
from reproduction.tables.project import Project
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_json


def array_of(project: Project, key: str, name: str) -> Any:
    """Read an array of a run, as nested lists or in the form stored by its metric.

    Raises:
        ResultError: the run file is missing, damaged, or has no such array.
    """
    path = project.results.run(key)
    arrays = read_result(path).arrays
    if name not in arrays:
        raise ResultError(f"run file {path} holds no {name}; delete it and run again.")
    return arrays[name]


def history_of(project: Project, key: str) -> list[dict[str, Any]]:
    """Read the history of the learned rotations of a run's weights, one record for each step.

    Raises:
        ResultError: the run has none, or a file is missing or damaged.
    """
    path = project.results.run(key)
    rotation = read_result(path).rotation
    if rotation is None:
        raise ResultError(f"run file {path} knows of no learned rotations; this figure needs a row that learns them.")
    return read_json(project.results.rotation(rotation["key"]) / HISTORY_FILE, "history of learned rotations")
