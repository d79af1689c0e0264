"""Final values of parameters trained in addition to the weights: clips, group partitions and centres.

They come from histories stored with the weights. Missing ones, and trainings that learn none of these, are left out.
"""

import math
from pathlib import Path
from statistics import fmean

from reproduction.identity.names import HISTORY_FILE
from reproduction.render.pages import cells
from reproduction.render.pages.model import Grid, GridColumn
from reproduction.render.pages.origins import Results
from reproduction.run.results import RunResult
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_json

#: Names in records of trainings, means over groups, and names on pages.
LEARNED = {
    "clip_low": "lower end",
    "clip_high": "upper end",
    "partition_1": "first partition",
    "partition_2": "second",
    "partition_3": "third",
    "from_uniform": "farthest from a third",
    "centre": "centre",
}


def trained(project: Project, table: RunTable, results: Results) -> Grid | None:
    """Final values of each row on each model, means over its seeds, in percent; None without any.

    Raises:
        ResultError: a history is damaged.
    """
    found: dict[tuple[str, ...], tuple[str, str, dict[str, float]]] = {}
    for cell in project.cells(table.id):
        runs = [results[run.key] for run in cell.runs if run.key in results]
        ends = [end for run in runs if (end := _end(project, run))]
        if ends:
            means = {name: fmean(end[name] for end in ends) for name in LEARNED if all(name in end for end in ends)}
            weights = tuple(dict.fromkeys(run.run.weights_key or "" for run in runs))
            found.setdefault((cell.row, *weights), (cell.row, project.slot(table, cell.column).name, means))
    lines = list(found.values())
    known = [name for name in LEARNED if any(name in means for *_, means in lines)]
    columns = [GridColumn([cells.share(means.get(name)) for *_, means in lines], LEARNED[name]) for name in known]
    return Grid("", ["Row", "Model"], [[row, slot] for row, slot, _ in lines], columns) if lines else None


def _end(project: Project, result: RunResult) -> dict[str, float]:
    key = result.run.weights_key
    path = project.results.weights(key) / HISTORY_FILE if key else None
    return last_step(path) if path and path.is_file() else {}


def last_step(path: Path) -> dict[str, float]:
    """`LEARNED` values in the last step of a training's history.

    Raises:
        ResultError: the history is damaged.
    """
    history = read_json(path, "history of a training")
    if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
        raise ResultError(f"history of a training {path} is damaged (no list of steps); make the weights again.")
    last = history[-1] if history else {}
    shares = {name: last[name] for name in LEARNED if isinstance(last.get(name), float)}
    return {name: share for name, share in shares.items() if math.isfinite(share)}
