"""Result files as exports hold them: with as many digits as pages show, which is a fourth of the size, and without the
places of a machine.

Numbers of runs (`metrics`) keep all digits, and so do the means of samples. Rounded are

- log-odds of items, to tenths, where their deviation over items is several nats;
- windows' values, to a thousandth of a usual one;
- arrays of magnitudes, which are drawn as surfaces, to three digits, and histories to five.

Of samples each takes up what the one before lost, and the last one the rest, so that their mean stays.

Of a history of trained weights `LONGEST` steps at most are kept, the last one among them: pages show that one, MLflow
draws the others.

Files of tasks are named from `results/` on.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.run.results import HISTORY_FILE, RUNS, TASKS, WEIGHTS
from rotquant.foundation.files import read_json, read_object

#: Decimal places of log-odds in nats.
LOG_ODDS_PLACES = 1
#: Digits of the mean of a run's windows that its windows have.
WINDOW_DIGITS = 4
#: Most steps that are kept of a history of trained weights.
LONGEST = 200
#: Metrics whose arrays are surfaces.
_SURFACES = ("magnitudes", "token_maxima")


def rounded(path: Path) -> bytes:
    """The content of a result file with fewer digits; any other file's as it is.

    Raises:
        ResultError: it is damaged.
    """
    if path.name == HISTORY_FILE:
        history = read_json(path, "history of a training")
        return _text(_digits(_thinned(history) if path.parent.parent == WEIGHTS else history, 5))
    if path.parent == TASKS:
        tasks = read_object(path, "record of tasks")
        _name_files(tasks)
        return _text(tasks)
    return _text(_rounded_run(read_object(path, "run file"))) if path.parent == RUNS else path.read_bytes()


def _rounded_run(run: dict[str, Any]) -> dict[str, Any]:
    """The data of a run file with fewer digits and without places."""
    _name_files(run["provenance"].get("tasks", {}))
    kind = run["run"]["metric"]["kind"]
    for name, values in run.get("samples", {}).items():
        if isinstance(values, list):  # answers and choices are text
            run["samples"][name] = mean_kept(values, LOG_ODDS_PLACES if kind == "zero_shot" else _places(values))
    if kind in _SURFACES and "arrays" in run:
        run["arrays"] = _digits(run["arrays"], 3)
    return run


def mean_kept(values: Sequence[float], places: int) -> list[float]:
    """Values rounded to so many decimal places but for the last, with the same sum."""
    found, lost = [], 0.0
    for value in values[:-1]:
        found.append(round(value + lost, places))
        lost += value - found[-1]
    return [*found, *(value + lost for value in values[-1:])]


def _places(values: Sequence[float]) -> int:
    """Decimal places by which a usual one of the values has `WINDOW_DIGITS` digits."""
    usual = fmean(map(abs, values))
    return WINDOW_DIGITS - 1 - (math.floor(math.log10(usual)) if usual else 0)


def _thinned(steps: list[Any]) -> list[Any]:
    """Evenly spaced steps, the last one among them."""
    every = -(-len(steps) // LONGEST) or 1
    return steps[(len(steps) - 1) % every :: every]


def _name_files(tasks: dict[str, Any]) -> None:
    """Name the files of tasks by their places in a project, or by their names alone."""
    for task in tasks.get("tasks", {}).values():
        if "file" in task:
            _, inside, name = task["file"].rpartition(f"{TASKS.as_posix()}/")
            task["file"] = f"{inside}{name}" if inside else Path(name).name


def _digits(data: Any, count: int) -> Any:
    """Data whose floats have so many significant digits."""
    if isinstance(data, float):
        return float(f"{data:.{count}g}")
    if isinstance(data, list):
        return [_digits(one, count) for one in data]
    return {name: _digits(one, count) for name, one in data.items()} if isinstance(data, dict) else data


def _text(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
