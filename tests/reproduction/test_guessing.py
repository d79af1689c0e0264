"""Rows at chance: no accuracy, and no log-odds of the same answers, says which of two networks is better.

Answers are made here as runs would store them: each seed's on each item, with the log-odds of the right one.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reproduction.claims.claims import Verdict, judge
from reproduction.claims.guessing import knowing_nothing
from reproduction.corpora import DOCSTRINGS
from reproduction.frame.values import Number
from reproduction.identity.run import Run
from reproduction.run.results import RunResult
from reproduction.run.samples import pack
from reproduction.tables.quantities import AVERAGE, LOG_ODDS, Quantity
from reproduction.tasks.settings import ZeroShot
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Perplexity
from tests.helpers.claims import BETTER, CASES, columns_of, table

ITEMS = 400


def run(task: str) -> Run:
    metric = ZeroShot(suite="shipped", tasks=(task,), corpus="docstrings")
    return Run(
        checkpoint="model", checkpoint_digest="0", recipe=Recipe(), metric=metric, corpora={"docstrings": DOCSTRINGS}
    )


def answered(
    task: str, items: int = ITEMS, **rows: tuple[float, float]
) -> tuple[dict[Any, Number], dict[str, RunResult]]:
    """Rows that give a share of right answers with mean log-odds, on the same items; three seeds answer alike."""
    numbers: dict[Any, Number] = {}
    results: dict[str, RunResult] = {}
    for place, (row, (share, odds)) in enumerate(rows.items()):
        generator, found = np.random.default_rng(place), []
        right = generator.permutation(np.arange(items) < round(share / 100 * items)).astype(float)
        for seed in range(3):
            sure = generator.normal(odds, 0.1, items)
            metrics = {name: 100 * right.mean() for name in ("average", task)} | {"log_odds": sure.mean()}
            samples = pack({task: [*right], f"{task}_log_odds": [*sure]})
            found.append(metrics)
            results[f"{row}{seed}"] = RunResult(run(task), metrics, {}, None, samples=samples)
        for name in ("average", "log_odds"):
            values = tuple(metrics[name] for metrics in found)
            numbers[row, "7B", name] = Number.of_seeds(values, (0, 1, 2), tuple(f"{row}{seed}" for seed in range(3)))
    return numbers, results


def verdict(check: dict[str, Any], given: Any, quantity: Quantity, *, printed: bool = False) -> Verdict:
    return judge(check, table(), given[0], quantity, None if printed else given[1], ["7B"])


@pytest.mark.parametrize("quantity", [AVERAGE, LOG_ODDS])
@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        ((25.5, -1.0), (24.5, -2.0), "not checkable"),  # of four choices: surer of wrong answers is all that differs
        ((21.0, -1.0), (20.0, -2.0), "not checkable"),  # and below it, where wrong answers are made to look right
        ((45.0, 1.0), (24.5, -2.0), "holds"),
        ((24.5, -2.0), (45.0, 1.0), "contradicted"),
        ((75.0, 2.0), (45.0, 1.0), "holds"),
    ],
)
def test_two_rows_at_chance_are_not_compared_and_one_above_it_is(
    quantity: Quantity, mine: tuple[float, float], other: tuple[float, float], expected: str
) -> None:
    given = answered("grammar", QuaRot=mine, QUIK=other)
    found = verdict(BETTER, given, quantity)
    assert found.decision == expected
    text = found.findings[0].reason
    assert text.endswith("at chance: none is above 25.00, which knowing nothing scores") == (
        expected == "not checkable"
    )
    if expected == "not checkable":
        assert all(f"{share:.2f} [" in text for share, _ in (mine, other))
        assert verdict(BETTER, given, quantity, printed=True).decision == "holds"  # a printed number has no noise


@pytest.mark.parametrize(("task", "share"), [("complete_line", 1.5), ("complete_return", 10.0)])
def test_written_answers_are_at_chance_where_the_commonest_one_scores_as_much(task: str, share: float) -> None:
    for mine, expected in ((share, "not checkable"), (share + 12.0, "holds")):
        found = verdict(BETTER, answered(task, QuaRot=(mine, 0.0), QUIK=(0.0, 0.0)), AVERAGE)
        assert found.decision == expected


def test_more_items_tell_a_row_from_chance() -> None:
    for items, expected in ((400, "not checkable"), (4000, "holds")):
        given = answered("grammar", items, QuaRot=(28.0, 0.0), QUIK=(20.0, 0.0))
        assert verdict(BETTER, given, AVERAGE).decision == expected


@pytest.mark.parametrize("case", CASES)
def test_every_direction_says_so_and_what_asks_how_much_is_decided(case: str) -> None:
    """A margin can be missed at chance, and a bound is often about it: a network that fails."""
    given = answered("grammar", QuaRot=(25.0, 0.0), QUIK=(24.0, 0.0), Atom=(24.5, 0.0), Baseline=(26.0, 0.0))
    more = {
        (row, "13B", name): replace(one, runs=tuple(f"{run} too" for run in one.runs))
        for (row, _, name), one in given[0].items()
    }
    results = given[1] | {f"{key} too": one for key, one in given[1].items()}
    found = judge(CASES[case][0], table(), {**given[0], **more}, AVERAGE, results, columns_of(case))
    at_chance = any("at chance" in finding.reason for finding in found.findings)
    assert at_chance == (case not in ("bound", "close", "at_most", "at_least", "across"))
    assert verdict({"better": {**BETTER["better"], "points": 10.0}}, given, AVERAGE).decision == "contradicted"


def test_the_smaller_of_two_differences_is_not_told_where_one_is_of_rows_at_chance() -> None:
    given = answered("grammar", QuaRot=(25.0, 0.0), QUIK=(24.0, 0.0), Baseline=(80.0, 0.0), Atom=(50.0, 0.0))
    (finding,) = verdict(CASES["difference_smaller"][0], given, AVERAGE).findings
    assert (finding.place, finding.decision) == ("QuaRot and QUIK, 7B", "not checkable")


def test_the_best_of_two_models_is_not_told_where_both_are_at_chance() -> None:
    numbers, results = answered("grammar", QuaRot=(25.0, 0.0), QUIK=(24.0, 0.0), Atom=(50.0, 0.0))
    best = {"across": {"row": "QuaRot", "pairs": [["13B", "7B"]]}}
    for other, expected in (("QUIK", "not checkable"), ("Atom", "contradicted")):
        given = {**numbers, ("QuaRot", "13B", "average"): numbers[other, "7B", "average"]}
        assert judge(best, table(), given, AVERAGE, results).decision == expected


def test_what_knowing_nothing_scores_is_the_tasks_chance_and_of_an_average_the_mean() -> None:
    both = ZeroShot(suite="shipped", tasks=("grammar", "parameter", "summary"), corpus="docstrings")
    for quantity in ("average", "log_odds"):
        assert knowing_nothing(both, quantity) == ("average", 37.5)
    assert knowing_nothing(both, "parameter_log_odds") == knowing_nothing(both, "parameter") == ("parameter", 50.0)
    assert knowing_nothing(both, "rouge_l") is knowing_nothing(both, "summary") is None
    assert knowing_nothing(ZeroShot(suite="paper", tasks=("tldr",)), "average") is None
    assert knowing_nothing(ZeroShot(suite="paper", tasks=("humaneval",)), "average") == ("average", 0.0)
    written = ZeroShot(suite="shipped", tasks=("complete_line", "complete_import", "complete_return"), corpus="x")
    found = knowing_nothing(written, "average")
    assert found is not None
    assert math.isclose(found[1], 4.71, abs_tol=0.01)
    assert knowing_nothing(Perplexity(corpus="docstrings"), "perplexity") is None
