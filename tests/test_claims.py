"""Claims are decided by numbers: each kind of check can hold and can fail, and what cannot be compared is named."""

import math
from typing import Any

import pytest

from rotquant.reporting.claims import judge, ours, papers, score
from rotquant.reporting.tables import Value
from rotquant.tables import Table

PAPER = {
    ("Baseline", "7B"): 5.47,
    ("Baseline", "13B"): 4.88,
    ("QUIK", "7B"): 8.87,
    ("QUIK", "13B"): 7.78,
    ("QuaRot", "7B"): 6.10,
    ("QuaRot", "13B"): 5.40,
    ("Atom", "7B"): 6.03,
}
NUMBERS = {cell: (value, None) for cell, value in PAPER.items()}


def table(*claims: dict[str, Any]) -> Table:
    return Table.model_validate(
        {
            **dict.fromkeys(("paper", "paper_title", "title", "section", "caption", "published"), "-"),
            "id": "quarot_table1",
            "metric": {"kind": "perplexity"},
            "columns": ["7B", "13B"],
            "baseline": "Baseline",
            "rows": [{"name": row, "method": "rtn"} for row in ("Baseline", "QUIK", "QuaRot", "Atom")],
            "claims": [{"text": "-", "section": "-", **claim} for claim in claims],
        }
    )


def verdict(check: dict[str, Any], numbers: dict = NUMBERS, columns: list[str] | None = None) -> Any:
    chosen = table({"check": check, "columns": columns})
    return judge(chosen.claims[0], chosen, numbers)


LESS = {"less": {"row": "QuaRot", "than": ["QUIK"]}}


def test_less_compares_in_every_column() -> None:
    assert verdict(LESS).holds is True
    assert [finding.column for finding in verdict(LESS).findings] == ["7B", "13B"]
    worse = {**NUMBERS, ("QuaRot", "13B"): (7.79, None)}
    assert verdict(LESS, worse).holds is False
    assert [finding.holds for finding in verdict(LESS, worse).findings] == [True, False]
    assert verdict(LESS, worse, columns=["7B"]).holds is True


def test_equal_is_not_less_and_a_margin_counts() -> None:
    assert verdict(LESS, {**NUMBERS, ("QuaRot", "7B"): (8.87, None)}).holds is False
    assert verdict({"less": {"row": "QuaRot", "than": ["QUIK"], "points": 2.0}}).holds is True
    assert verdict({"less": {"row": "QuaRot", "than": ["QUIK"], "points": 2.5}}).holds is False


def test_what_has_no_number_is_named_and_left_out() -> None:
    outcome = verdict({"less": {"row": "Atom", "than": ["QuaRot"]}})
    assert outcome.holds is True
    assert outcome.missing == ("Atom, 13B",)
    assert verdict({"less": {"row": "Atom", "than": ["QuaRot"]}}, columns=["13B"]).holds is None


def test_a_broken_network_is_worse_than_any_number() -> None:
    for broken in (math.nan, math.inf):
        assert verdict(LESS, {**NUMBERS, ("QUIK", "7B"): (broken, None)}).holds is True
        assert verdict(LESS, {**NUMBERS, ("QuaRot", "7B"): (broken, None)}).holds is False
        for check in (
            {"increase_at_most": {"row": "QuaRot", "over": "Baseline", "percent": 1e9}},
            {"difference_at_most": {"row": "QuaRot", "over": "Baseline", "points": 1e9}},
            {"decreasing": {"row": "QuaRot", "over": "Baseline"}},
        ):
            assert verdict(check, {**NUMBERS, ("QuaRot", "13B"): (broken, None)}).holds is False


def test_no_worse_allows_the_spread_over_seeds() -> None:
    check = {"no_worse": {"row": "QuaRot", "than": ["Atom"], "deviations": 2}}
    spread = {**NUMBERS, ("QuaRot", "7B"): (6.10, 0.04)}
    assert verdict(check, spread, columns=["7B"]).holds is True  # 6.10 <= 6.03 + 2 * 0.04
    assert verdict(check, {**NUMBERS, ("QuaRot", "7B"): (6.12, 0.04)}, columns=["7B"]).holds is False
    assert verdict(check, columns=["7B"]).holds is False
    assert verdict({"no_worse": {"row": "Atom", "than": ["QuaRot"]}}, columns=["7B"]).holds is True


def test_bounds_on_the_loss_are_inclusive() -> None:
    assert verdict({"difference_at_most": {"row": "QuaRot", "over": "Baseline", "points": 0.63}}).holds is True
    assert verdict({"difference_at_most": {"row": "QuaRot", "over": "Baseline", "points": 0.62}}).holds is False
    assert verdict({"increase_at_most": {"row": "QuaRot", "over": "Baseline", "percent": 11.6}}).holds is True
    assert verdict({"increase_at_most": {"row": "QuaRot", "over": "Baseline", "percent": 11.5}}).holds is False


def test_decreasing_compares_neighbouring_columns() -> None:
    check = {"decreasing": {"row": "QuaRot", "over": "Baseline"}}
    assert verdict(check).holds is True  # 0.52 < 0.63
    assert verdict(check, {**NUMBERS, ("QuaRot", "13B"): (5.60, None)}).holds is False


def test_ours_and_the_papers_numbers_are_judged_apart() -> None:
    values = {
        cell: Value(values=(value + 10, value + 12), seeds=(0, 1), keys=("a", "b"), published=value)
        for cell, value in PAPER.items()
    }
    values["Atom", "13B"] = Value((1.0,), (0,), ("c",), None)
    assert ours(values)["QuaRot", "7B"] == (17.10, pytest.approx(math.sqrt(2)))
    assert papers(values)["QuaRot", "7B"] == (6.10, None)
    assert ("Atom", "13B") not in papers(values)
    chosen = table({"check": LESS}, {"check": {"less": {"row": "QUIK", "than": ["QuaRot"]}}})
    assert score(chosen, values) == (1, 2)
