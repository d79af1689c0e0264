"""Tables with claims and made-up numbers."""

import math
import statistics
from typing import Any

import numpy as np

from reproduction.frame.values import Number
from reproduction.identity.run import Run
from reproduction.run.results import RunResult
from reproduction.run.samples import pack
from reproduction.tables.tables import RunTable
from rotquant.recipes.corpus import DOCSTRINGS
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Perplexity

PAPER = {
    ("Baseline", "7B"): 5.47,
    ("Baseline", "13B"): 4.88,
    ("QUIK", "7B"): 8.87,
    ("QUIK", "13B"): 7.78,
    ("QuaRot", "7B"): 6.10,
    ("QuaRot", "13B"): 5.40,
    ("Atom", "7B"): 6.03,
}


def seeds(*values: float) -> Number:
    """The number of several seeds."""
    return Number(statistics.mean(values), statistics.stdev(values), values)


def table(*claims: dict[str, Any]) -> RunTable:
    return RunTable.model_validate(
        {
            **dict.fromkeys(("paper", "paper_title", "title", "section", "caption"), "-"),
            "id": "quarot_table1",
            "metrics": [{"kind": "perplexity"}],
            "columns": ["7B", "13B"],
            "baseline": "Baseline",
            "rows": [{"name": row, "method": "rtn"} for row in ("Baseline", "QUIK", "QuaRot", "Atom")],
            "claims": [{"text": "-", "section": "-", **claim} for claim in claims],
        }
    )


BETTER = {"better": {"row": "QuaRot", "than": ["QUIK"]}}


PAIR = [["QuaRot", "QUIK"], ["Baseline", "Atom"]]


CASES: dict[str, tuple[dict[str, Any], dict[str, float | Number], dict[str, float | Number]]] = {
    "better": ({"row": "QuaRot", "than": ["QUIK"]}, {"QuaRot": 6.0, "QUIK": 7.0}, {"QuaRot": 7.0, "QUIK": 6.0}),
    "no_worse": ({"row": "QuaRot", "than": ["QUIK"]}, {"QuaRot": 6.0, "QUIK": 6.0}, {"QuaRot": 6.1, "QUIK": 6.0}),
    "order": (
        {"rows": ["QuaRot", "Atom", "QUIK"]},
        {"QuaRot": 6.0, "Atom": 6.5, "QUIK": 7.0},
        {"QuaRot": 6.0, "Atom": 7.0, "QUIK": 6.5},
    ),
    "loss_at_most": (
        {"row": "QuaRot", "over": "Baseline", "percent": 10.0},
        {"Baseline": 10.0, "QuaRot": 11.0},
        {"Baseline": 10.0, "QuaRot": 11.1},
    ),
    "close": (
        {"row": "QuaRot", "over": "Baseline", "points": 0.5},
        {"Baseline": 10.0, "QuaRot": 9.5},
        {"Baseline": 10.0, "QuaRot": 9.4},
    ),
    "at_most": ({"row": "QuaRot", "value": 6.1}, {"QuaRot": 6.1}, {"QuaRot": 6.2}),
    "at_least": ({"row": "QuaRot", "value": 6.1}, {"QuaRot": 6.2}, {"QuaRot": 6.0}),
    "loss_decreasing": (
        {"row": "QuaRot", "over": "Baseline"},
        {"Baseline": 5.47, "QuaRot": 6.10},
        {"Baseline": 5.47, "QuaRot": 5.90},
    ),
    "loss_larger": (
        {"row": "QuaRot", "over": "Baseline", "pairs": [["7B", "13B"]]},
        {"Baseline": 5.47, "QuaRot": 6.10},
        {"Baseline": 5.47, "QuaRot": 5.90},
    ),
    "gains_increasing": (
        {"pairs": PAIR},
        {"QuaRot": 6.0, "QUIK": 6.6, "Baseline": 5.0, "Atom": 6.0},
        {"QuaRot": 6.0, "QUIK": 9.0, "Baseline": 5.0, "Atom": 6.0},
    ),
    "difference_smaller": (
        {"of": ["QuaRot", "QUIK"], "than": ["Baseline", "Atom"]},
        {"QuaRot": 6.0, "QUIK": 5.8, "Baseline": 5.0, "Atom": 6.0},
        {"QuaRot": 6.0, "QUIK": 4.0, "Baseline": 5.0, "Atom": 5.1},
    ),
    "better_than_best": (
        {"row": "QuaRot", "than": ["QUIK"]},
        {"QuaRot": 6.0, "QUIK": seeds(6.1, 7.0)},
        {"QuaRot": 6.0, "QUIK": seeds(5.9, 7.0)},
    ),
    "spread_smaller": (
        {"row": "QuaRot", "than": ["QUIK"]},
        {"QuaRot": seeds(6.0, 6.1), "QUIK": seeds(6.0, 6.2)},
        {"QuaRot": seeds(6.0, 6.3), "QUIK": seeds(6.0, 6.2)},
    ),
    "range_at_least": (
        {"row": "QuaRot", "points": 2.0},
        {"QuaRot": seeds(5.0, 6.0, 7.0)},
        {"QuaRot": seeds(5.1, 6.0, 7.0)},
    ),
    "best_column": (
        {"row": "QuaRot", "column": "7B"},
        {"QuaRot": 5.40},
        {"QuaRot": 5.41},
    ),
}


OF_BOTH_COLUMNS = ("loss_decreasing", "loss_larger", "best_column")


RUN = Run(
    checkpoint="model",
    checkpoint_digest="0",
    recipe=Recipe(),
    metric=Perplexity(corpus="docstrings"),
    corpora={"docstrings": DOCSTRINGS},
)


Measured = tuple[dict[tuple[str, str, str], Number], dict[str, RunResult]]


def measured(cells: dict[tuple[str, str], tuple[float, np.ndarray]], *, stored: bool = True) -> Measured:
    """Numbers with the runs behind them: perplexities around a value with relative deviations [seeds, windows]."""
    numbers, results = {}, {}
    for (row, column), (value, deviations) in cells.items():
        keys, values = [f"{row}{column}{seed}" for seed in range(len(deviations))], []
        for key, losses in zip(keys, np.log(value) + deviations, strict=True):
            values.append(math.exp(losses.mean()))
            samples = pack({"perplexity": tuple(losses)}) if stored else {}
            results[key] = RunResult(RUN, {"perplexity": values[-1]}, {}, None, samples=samples)
        numbers[row, column, "perplexity"] = Number.of_seeds(tuple(values), tuple(range(len(keys))), tuple(keys))
    return numbers, results
