"""Tables with claims and made-up numbers."""

import math
import statistics
from typing import Any

import numpy as np

from reproduction.corpora import DOCSTRINGS
from reproduction.frame.values import Number
from reproduction.identity.run import Run
from reproduction.run.results import RunResult
from reproduction.run.samples import pack
from reproduction.tables.tables import RunTable
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


Numbers = dict[str, float | Number]
CASES: dict[str, tuple[dict[str, Any], Numbers, Numbers]] = {
    "better": (BETTER, {"QuaRot": 6.0, "QUIK": 7.0}, {"QuaRot": 7.0, "QUIK": 6.0}),
    "chain": (
        {"better": {"rows": ["QuaRot", "Atom", "QUIK"]}},
        {"QuaRot": 6.0, "Atom": 6.5, "QUIK": 7.0},
        {"QuaRot": 6.0, "Atom": 7.0, "QUIK": 6.5},
    ),
    "no_worse": ({"no_worse": BETTER["better"]}, {"QuaRot": 6.0, "QUIK": 6.0}, {"QuaRot": 6.1, "QUIK": 6.0}),
    "bound": (
        {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "percent": 10.0}},
        {"Baseline": 10.0, "QuaRot": 11.0},
        {"Baseline": 10.0, "QuaRot": 11.1},
    ),
    "close": (
        {"close": {"row": "QuaRot", "than": ["Baseline"], "points": 0.5}},
        {"Baseline": 10.0, "QuaRot": 9.5},
        {"Baseline": 10.0, "QuaRot": 9.4},
    ),
    "at_most": ({"value": {"row": "QuaRot", "at_most": 6.1}}, {"QuaRot": 6.1}, {"QuaRot": 6.2}),
    "at_least": ({"value": {"row": "QuaRot", "at_least": 6.1}}, {"QuaRot": 6.2}, {"QuaRot": 6.0}),
    "across": (
        {"across": {"row": "QuaRot", "over": "Baseline", "pairs": [["7B", "13B"]]}},
        {"Baseline": 5.47, "QuaRot": 6.10},
        {"Baseline": 5.47, "QuaRot": 5.90},
    ),
    "own": ({"across": {"row": "QuaRot", "pairs": [["13B", "7B"]]}}, {"QuaRot": 5.40}, {"QuaRot": 5.41}),
    "gains_increasing": (
        {"gains_increasing": {"pairs": PAIR}},
        {"QuaRot": 6.0, "QUIK": 6.6, "Baseline": 5.0, "Atom": 6.0},
        {"QuaRot": 6.0, "QUIK": 9.0, "Baseline": 5.0, "Atom": 6.0},
    ),
    "difference_smaller": (
        {"difference_smaller": {"of": ["QuaRot", "QUIK"], "than": ["Baseline", "Atom"]}},
        {"QuaRot": 6.0, "QUIK": 5.8, "Baseline": 5.0, "Atom": 6.0},
        {"QuaRot": 6.0, "QUIK": 4.0, "Baseline": 5.0, "Atom": 5.1},
    ),
    "spread_smaller": (
        {"spread_smaller": BETTER["better"]},
        {"QuaRot": seeds(6.0, 6.1), "QUIK": seeds(6.0, 6.2)},
        {"QuaRot": seeds(6.0, 6.3), "QUIK": seeds(6.0, 6.2)},
    ),
}
"""For each form of each kind of check: the check, numbers of the column 7B by which it holds, and by which it fails."""


def columns_of(case: str) -> list[str] | None:
    """The column 7B, or all where columns are compared."""
    return None if "across" in CASES[case][0] else ["7B"]


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
