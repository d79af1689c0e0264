"""Claims are decided by numbers: each kind of check can hold and can fail, and what cannot be compared is named."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotquant.foundation.errors import ConfigError
from rotquant.reporting.claims import CHECKS, Finding, Numbers, Score, Verdict, judge, outcomes, score
from rotquant.study.checks import Check
from rotquant.study.project import Project
from rotquant.study.quantities import AVERAGE, PERPLEXITY, SNR_DB, Quantity
from rotquant.study.tables import Table
from rotquant.study.values import Number, Values

PAPER = {
    ("Baseline", "7B"): 5.47,
    ("Baseline", "13B"): 4.88,
    ("QUIK", "7B"): 8.87,
    ("QUIK", "13B"): 7.78,
    ("QuaRot", "7B"): 6.10,
    ("QuaRot", "13B"): 5.40,
    ("Atom", "7B"): 6.03,
}
ACCURACY = {("Baseline", "7B"): 69.79, ("QuaRot", "7B"): 65.64, ("Baseline", "13B"): 72.55, ("QuaRot", "13B"): 69.79}


def numbers(
    values: dict[tuple[str, str], float | Number], quantity: Quantity = PERPLEXITY, **more: float | Number
) -> Numbers:
    """Numbers, without deviations where only a mean is given; `more` changes a row's number in the column 7B."""
    changed = {**values, **{(row, "7B"): value for row, value in more.items()}}
    return {
        (row, column, quantity.name): value if isinstance(value, Number) else Number(value)
        for (row, column), value in changed.items()
    }


def seeds(*values: float) -> Number:
    """The number of several seeds."""
    return Number(statistics.mean(values), statistics.stdev(values), values)


def table(*claims: dict[str, Any]) -> Table:
    return Table.model_validate(
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


def verdict(
    check: dict[str, Any],
    given: Numbers | None = None,
    columns: list[str] | None = None,
    quantity: Quantity = PERPLEXITY,
    *,
    printed: bool = False,
) -> Verdict:
    chosen = table({"check": check, "columns": columns})
    return judge(chosen.claims[0], chosen, numbers(PAPER) if given is None else given, quantity, printed=printed)


BETTER = {"better": {"row": "QuaRot", "than": ["QUIK"]}}
PAIR = [["QuaRot", "QUIK"], ["Baseline", "Atom"]]
CASES: dict[str, tuple[dict[str, Any], dict[str, float | Number], dict[str, float | Number]]] = {
    "better": ({"row": "QuaRot", "than": ["QUIK"]}, {"QuaRot": 6.0, "QUIK": 7.0}, {"QuaRot": 7.0, "QUIK": 6.0}),
    "no_worse": ({"row": "QuaRot", "than": ["QUIK"]}, {"QuaRot": 6.0, "QUIK": 6.0}, {"QuaRot": 6.1, "QUIK": 6.0}),
    "order": (
        {"rows": ["QuaRot", "Atom", "QUIK"]},
        {"QuaRot": 6.0, "Atom": 6.0, "QUIK": 7.0},
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
"""For each kind of check: arguments, numbers of the column 7B by which it holds, and by which it fails."""
OF_BOTH_COLUMNS = ("loss_decreasing", "loss_larger", "best_column")


def columns_of(kind: str) -> list[str] | None:
    return None if kind in OF_BOTH_COLUMNS else ["7B"]


def test_every_kind_of_check_is_built_and_tested() -> None:
    assert set(Check.model_fields) == set(CHECKS) == set(CASES)


@pytest.mark.parametrize("kind", CASES)
def test_every_kind_of_check_can_hold_and_can_fail(kind: str) -> None:
    arguments, good, bad = CASES[kind]
    assert verdict({kind: arguments}, numbers(PAPER, **good), columns_of(kind)).holds is True
    assert verdict({kind: arguments}, numbers(PAPER, **bad), columns_of(kind)).holds is False


def broken_down(kind: str) -> list[Numbers]:
    """Numbers by which a check would hold, but that the row or column which it praises broke down."""
    praised = {"gains_increasing": ("Baseline", "7B"), "loss_larger": ("QuaRot", "13B")}
    row, column = praised.get(kind, ("QuaRot", "13B" if kind == "loss_decreasing" else "7B"))
    return [
        {**numbers(PAPER, **CASES[kind][1]), (row, column, "perplexity"): Number(broken, math.nan, (5.0, broken))}
        for broken in (math.nan, math.inf)
    ]


@pytest.mark.parametrize("kind", CASES)
def test_no_check_passes_or_fails_by_a_number_that_is_not_finite(kind: str) -> None:
    for found in broken_down(kind):
        outcome = verdict({kind: CASES[kind][0]}, found, columns_of(kind))
        assert outcome.holds is None
        assert any("not finite" in finding.numbers for finding in outcome.findings)


@pytest.mark.parametrize("kind", sorted(set(CASES) - {"spread_smaller"}))  # of a paper, a deviation without a number
def test_a_row_that_a_paper_says_broke_down_fails_every_check(kind: str) -> None:
    for found in broken_down(kind):
        assert verdict({kind: CASES[kind][0]}, found, columns_of(kind), printed=True).holds is False


@given(st.lists(st.sampled_from([True, False, None])))
def test_a_claim_fails_where_one_comparison_does_and_holds_where_all_do(found: list[bool | None]) -> None:
    expected = False if False in found else None if None in found or not found else True
    assert Verdict(tuple(Finding("-", "-", holds) for holds in found), ()).holds is expected


def test_a_loss_of_zero_is_no_verdict_on_a_network_whose_numbers_are_nan() -> None:
    check = {"loss_at_most": {"row": "QuaRot", "over": "Baseline", "points": 0.17}}
    given = numbers({("Baseline", "7B"): math.nan, ("QuaRot", "7B"): math.nan}, AVERAGE)
    assert verdict(check, given, ["7B"], AVERAGE).holds is None
    # One finite model among them says no and needs no other; one that says yes does not speak for both.
    for value, holds in ((69.0, None), (60.0, False)):
        both = {**given, **numbers({("Baseline", "13B"): 69.1, ("QuaRot", "13B"): value}, AVERAGE)}
        assert verdict(check, both, quantity=AVERAGE).holds is holds


def test_infinite_decibels_are_the_best_there_is() -> None:
    """Equal logits have no noise; a perplexity without end is no result."""
    given = numbers({("QuaRot", "7B"): math.inf, ("QUIK", "7B"): 20.0, ("Baseline", "7B"): math.inf}, SNR_DB)
    assert verdict(BETTER, given, ["7B"], SNR_DB).holds is True
    backward = {"better": {"row": "QUIK", "than": ["QuaRot"]}}
    assert verdict(backward, given, ["7B"], SNR_DB).holds is False
    alike = {"close": {"row": "QuaRot", "over": "Baseline", "points": 0.1}}
    assert verdict(alike, given, ["7B"], SNR_DB).holds is True
    assert verdict(alike, {**given, **numbers({("QuaRot", "7B"): math.nan}, SNR_DB)}, ["7B"], SNR_DB).holds is None


@pytest.mark.parametrize("kind", CASES)
def test_without_numbers_there_is_no_verdict(kind: str) -> None:
    outcome = verdict({kind: CASES[kind][0]}, {})
    assert outcome.holds is None
    assert outcome.missing


POSITIVE = st.floats(min_value=1.0, max_value=100.0)


@given(st.tuples(POSITIVE, POSITIVE, POSITIVE, POSITIVE))
def test_higher_is_better_for_accuracy(values: tuple[float, ...]) -> None:
    """What compares rows says about -x by accuracy the same as about x by perplexity."""
    rows = dict(zip(("Baseline", "QUIK", "QuaRot", "Atom"), values, strict=True))
    mirrored = {row: -value for row, value in rows.items()}
    for kind in ("better", "no_worse", "order"):
        lower = verdict({kind: CASES[kind][0]}, numbers({}, **rows), ["7B"])
        higher = verdict({kind: CASES[kind][0]}, numbers({}, AVERAGE, **mirrored), ["7B"], AVERAGE)
        assert lower.holds == higher.holds


@given(POSITIVE, POSITIVE)
def test_of_two_different_rows_exactly_one_is_better(mine: float, other: float) -> None:
    given = numbers({}, QuaRot=mine, QUIK=other)
    forward = verdict(BETTER, given, ["7B"]).holds
    backward = verdict({"better": {"row": "QUIK", "than": ["QuaRot"]}}, given, ["7B"]).holds
    assert (forward, backward).count(True) == (abs(mine - other) > 1e-9)  # differences below the slack are equality


@given(POSITIVE, POSITIVE)
def test_close_is_a_loss_within_the_bound_either_way(base: float, value: float) -> None:
    def holds(kind: str, row: str, over: str) -> bool | None:
        check = {kind: {"row": row, "over": over, "points": 5.0}}
        return verdict(check, numbers({}, QuaRot=value, Baseline=base), ["7B"]).holds

    both = holds("loss_at_most", "QuaRot", "Baseline") and holds("loss_at_most", "Baseline", "QuaRot")
    assert holds("close", "QuaRot", "Baseline") == both


def test_better_compares_in_every_column() -> None:
    assert [finding.place for finding in verdict(BETTER).findings] == ["7B", "13B"]
    worse = {**numbers(PAPER), ("QuaRot", "13B", "perplexity"): Number(7.79)}
    assert verdict(BETTER, worse).holds is False
    assert [finding.holds for finding in verdict(BETTER, worse).findings] == [True, False]
    assert verdict(BETTER, worse, columns=["7B"]).holds is True


def test_equal_is_not_better_and_a_margin_counts() -> None:
    assert verdict(BETTER, numbers(PAPER, QuaRot=8.87)).holds is False
    assert verdict({"better": {"row": "QuaRot", "than": ["QUIK"], "points": 2.0}}).holds is True
    assert verdict({"better": {"row": "QuaRot", "than": ["QUIK"], "points": 2.38}}).holds is False  # 7.78 - 5.40
    assert verdict({"better": {"row": "QuaRot", "than": ["QUIK"], "points": 2.5}}).holds is False


def test_what_has_no_number_is_named_and_left_out() -> None:
    outcome = verdict({"better": {"row": "Atom", "than": ["QUIK"]}})
    assert outcome.holds is True
    assert outcome.missing == ("Atom, 13B",)
    assert verdict({"better": {"row": "Atom", "than": ["QuaRot"]}}, columns=["13B"]).holds is None


def test_any_number_is_better_than_a_network_that_a_paper_says_broke_down() -> None:
    for broken in (math.nan, math.inf):
        assert verdict(BETTER, numbers(PAPER, QUIK=broken), printed=True).holds is True
        accuracies = numbers({("QuaRot", "7B"): 30.0, ("QUIK", "7B"): broken}, AVERAGE)
        assert verdict(BETTER, accuracies, ["7B"], AVERAGE, printed=True).holds is True


def test_no_worse_allows_the_spread_over_seeds() -> None:
    check = {"no_worse": {"row": "QuaRot", "than": ["Atom"], "deviations": 2}}
    place = ("QuaRot", "7B", "perplexity")
    assert (
        verdict(check, {**numbers(PAPER), place: Number(6.10, 0.04)}, ["7B"]).holds is True
    )  # 6.10 <= 6.03 + 2 * 0.04
    assert verdict(check, {**numbers(PAPER), place: Number(6.12, 0.04)}, ["7B"]).holds is False
    assert verdict(check, columns=["7B"]).holds is False
    assert (
        "6.10 ≤ 6.03 + 0.08"
        in verdict(check, {**numbers(PAPER), place: Number(6.10, 0.04)}, ["7B"]).findings[0].numbers
    )


def test_bounds_on_the_loss_are_inclusive() -> None:
    for kind in ("loss_at_most", "close"):
        assert verdict({kind: {"row": "QuaRot", "over": "Baseline", "points": 0.63}}).holds is True  # 6.10 - 5.47
        assert verdict({kind: {"row": "QuaRot", "over": "Baseline", "points": 0.62}}).holds is False
        assert verdict({kind: {"row": "QuaRot", "over": "Baseline", "percent": 11.6}}).holds is True
        assert verdict({kind: {"row": "QuaRot", "over": "Baseline", "percent": 11.5}}).holds is False


def test_losses_of_accuracy_are_losses() -> None:
    given = numbers(ACCURACY, AVERAGE)
    check = {"loss_at_most": {"row": "QuaRot", "over": "Baseline", "points": 4.15}}  # 69.79 - 65.64
    assert verdict(check, given, quantity=AVERAGE).holds is True
    check = {"loss_at_most": {"row": "QuaRot", "over": "Baseline", "points": 4.14}}
    assert verdict(check, given, quantity=AVERAGE).holds is False
    assert verdict({"loss_decreasing": {"row": "QuaRot", "over": "Baseline"}}, given, quantity=AVERAGE).holds is True


def test_a_loss_in_percent_of_nothing_never_holds() -> None:
    given = numbers({("Baseline", "7B"): 0.0, ("QuaRot", "7B"): 0.0}, AVERAGE)
    check = {"loss_at_most": {"row": "QuaRot", "over": "Baseline", "percent": 100.0}}
    assert verdict(check, given, ["7B"], AVERAGE).holds is False


def test_gains_over_rows_that_broke_down_are_larger_than_any_and_not_comparable_among_themselves() -> None:
    check = {"gains_increasing": {"pairs": PAIR}}
    assert verdict(check, numbers(PAPER, Atom=math.nan), ["7B"], printed=True).holds is True
    assert verdict(check, numbers(PAPER, QUIK=math.inf), ["7B"], printed=True).holds is False
    both = verdict(check, numbers(PAPER, QUIK=math.inf, Atom=math.nan), ["7B"], printed=True)
    assert both.holds is None
    assert "both broke down" in both.missing[0]


def test_a_model_is_not_compared_with_itself() -> None:
    check = {"loss_larger": {"row": "QuaRot", "over": "Baseline", "pairs": [["7B", "13B"]]}}
    same = {(row, column): value for row, value in (("Baseline", 5.0), ("QuaRot", 6.0)) for column in ("7B", "13B")}
    outcome = verdict(check, numbers(same))
    assert outcome.holds is None
    assert outcome.missing == ("a second model: 7B and 13B are computed on one",)


def test_the_best_column_may_be_shared() -> None:
    check = {"best_column": {"row": "QuaRot", "column": "7B"}}
    assert verdict(check, numbers(PAPER, QuaRot=5.40)).holds is True
    assert verdict(check, numbers(PAPER)).holds is False


class Double(Project):
    """A project of one table that measures given quantities."""

    def __init__(self, *measured: Quantity) -> None:
        super().__init__(Path(), None, {})  # type: ignore[arg-type]
        object.__setattr__(self, "measured", measured)

    def quantities(self, _: Table) -> tuple[Quantity, ...]:
        return self.measured


def test_deviations_and_single_seeds_are_compared_where_they_are_known() -> None:
    """Of the paper the deviations are known, where it prints them, and never the seeds."""
    spread = {"check": {"spread_smaller": {"row": "QuaRot", "than": ["QUIK"]}}, "columns": ["7B"]}
    best = {"check": {"better_than_best": {"row": "QuaRot", "than": ["QUIK"]}}, "columns": ["7B"]}
    far = {"check": {"range_at_least": {"row": "QUIK", "points": 1.0}}, "columns": ["7B"]}
    ours = numbers({("QuaRot", "7B"): seeds(6.0, 6.2), ("QUIK", "7B"): seeds(6.15, 7.0)})
    printed = numbers(PAPER, QuaRot=Number(6.10, 0.01), QUIK=Number(8.87, 0.02))
    decided = outcomes(Double(PERPLEXITY), table(spread, best, far), Values(ours, printed))
    assert [outcome.ours.holds for outcome in decided] == [True, True, False]
    assert [outcome.papers.holds for outcome in decided] == [True, None, None]
    assert decided[1].papers.missing == ("QUIK, 7B, by seed",)
    assert decided[2].ours.findings[0].numbers == "6.15 to 7.00 over 2 seeds, 0.85 ≥ 1"


def test_ours_and_the_papers_numbers_are_judged_apart() -> None:
    """Also a claim about one of the paper's tasks, which a table of our own tasks cannot check."""
    piqa = {("QuaRot", "7B", "piqa"): Number(76.77), ("Baseline", "7B", "piqa"): Number(79.11)}
    ours = numbers({cell: seeds(20 - value, 22 - value) for cell, value in PAPER.items()})
    on_piqa = {"check": {"better": {"row": "Baseline", "than": ["QuaRot"]}}, "quantity": "piqa"}
    atom = {"check": {"better": {"row": "Atom", "than": ["QuaRot"]}}, "columns": ["13B"]}
    chosen = table({"check": BETTER}, on_piqa, atom)
    decided = outcomes(Double(PERPLEXITY), chosen, Values(ours, {**numbers(PAPER), **piqa}))
    assert [outcome.ours.holds for outcome in decided] == [False, None, None]
    assert [outcome.papers.holds for outcome in decided] == [True, True, None]
    assert score(decided) == Score(holds=0, fails=1, unchecked=2)
    assert score(decided).checked == 1


def test_an_unknown_quantity_of_a_claim_is_named() -> None:
    chosen = table({"check": BETTER, "quantity": "perplexety"})
    with pytest.raises(ConfigError, match=r"unknown quantity 'perplexety'.*perplexity"):
        outcomes(Double(PERPLEXITY), chosen, Values({}, {}))
