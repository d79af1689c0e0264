"""Claims are decided by numbers: each kind of check can hold and be contradicted, what cannot be compared is named.

Without results numbers are compared as they are, as the paper's; `test_verdicts.py` is about numbers with noise.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reproduction.claims.claims import Score, Verdict, judge, once, outcomes, repeated, score
from reproduction.claims.effects import CHECKS, Numbers
from reproduction.claims.endpoints import Endpoints
from reproduction.claims.findings import Finding
from reproduction.frame.values import Number, Values
from reproduction.render.pages.verdicts import claims_of
from reproduction.run.provenance import WITH_PREFIX
from reproduction.run.results import RunResult
from reproduction.tables.checks import Check, is_direction
from reproduction.tables.project import Project
from reproduction.tables.quantities import AVERAGE, KL, LOG_ODDS, PERPLEXITY, SNR_DB, Quantity
from reproduction.tables.tables import RunTable
from rotquant.foundation.errors import ConfigError
from rotquant.recipes.recipe import Recipe
from tests.helpers.claims import BETTER, CASES, PAIR, PAPER, RUN, columns_of, seeds, table

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


def verdict(
    check: dict[str, Any],
    given: Numbers | None = None,
    columns: list[str] | None = None,
    quantity: Quantity = PERPLEXITY,
    *,
    ours: bool = False,
) -> Verdict:
    ((kind, arguments),) = check.items()
    asked = Check.model_validate({kind: arguments}).model_dump(exclude_unset=True)
    numbers_of = numbers(PAPER) if given is None else given
    return judge(asked, table(), numbers_of, quantity, {} if ours else None, columns)


def test_every_kind_of_check_is_built_and_tested() -> None:
    assert set(Check.model_fields) == set(CHECKS) == {kind for check, _, _ in CASES.values() for kind in check}
    assert len(CHECKS) <= 8


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_check_can_hold_and_can_fail(case: str) -> None:
    check, good, bad = CASES[case]
    assert verdict(check, numbers(PAPER, **good), columns_of(case)).decision == "holds"
    assert verdict(check, numbers(PAPER, **bad), columns_of(case)).decision == "contradicted"


def broken_down(case: str) -> list[Numbers]:
    """Numbers by which a check would hold, but that the row or column which it praises broke down."""
    praised = {"gains_increasing": ("Baseline", "7B"), "across": ("QuaRot", "13B")}
    row, column = praised.get(case, ("QuaRot", "7B"))
    return [
        {**numbers(PAPER, **CASES[case][1]), (row, column, "perplexity"): Number(broken, math.nan, (5.0, broken))}
        for broken in (math.nan, math.inf)
    ]


@pytest.mark.parametrize("case", CASES)
def test_no_check_passes_or_fails_by_a_number_that_is_not_finite(case: str) -> None:
    for found in broken_down(case):
        outcome = verdict(CASES[case][0], found, columns_of(case), ours=True)
        assert outcome.decision == "not checkable"
        assert any("not finite" in finding.reason for finding in outcome.findings)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"spread_smaller"}))  # of a paper, a deviation without a number
def test_a_row_that_a_paper_says_broke_down_fails_every_check(case: str) -> None:
    for found in broken_down(case):
        assert verdict(CASES[case][0], found, columns_of(case)).decision == "contradicted"


WORDS: list[Any] = ["holds", "contradicted", "no effect", "undecided", "not checkable"]


@given(st.lists(st.sampled_from(WORDS)))
def test_a_check_is_contradicted_where_one_comparison_is_and_holds_where_all_do(found: list[Any]) -> None:
    order = ["contradicted", "no effect", "not checkable", "undecided", "holds"]
    expected = min(found, key=order.index) if found else "not checkable"
    assert Verdict(tuple(Finding("-", word) for word in found)).decision == expected


def test_a_loss_of_zero_is_no_verdict_on_a_network_whose_numbers_are_nan() -> None:
    check = {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "points": 0.17}}
    given = numbers({("Baseline", "7B"): math.nan, ("QuaRot", "7B"): math.nan}, AVERAGE)
    assert verdict(check, given, ["7B"], AVERAGE, ours=True).decision == "not checkable"


def test_infinite_decibels_are_the_best_there_is() -> None:
    """Equal logits have no noise; a perplexity without end is no result."""
    given = numbers({("QuaRot", "7B"): math.inf, ("QUIK", "7B"): 20.0, ("Baseline", "7B"): math.inf}, SNR_DB)
    assert verdict(BETTER, given, ["7B"], SNR_DB, ours=True).decision == "holds"
    backward = {"better": {"row": "QUIK", "than": ["QuaRot"]}}
    assert verdict(backward, given, ["7B"], SNR_DB, ours=True).decision == "contradicted"
    alike = {"close": {"row": "QuaRot", "than": ["Baseline"], "points": 0.1}}
    assert verdict(alike, given, ["7B"], SNR_DB, ours=True).decision == "holds"
    broken = {**given, **numbers({("QuaRot", "7B"): math.nan}, SNR_DB)}
    assert verdict(alike, broken, ["7B"], SNR_DB, ours=True).decision == "not checkable"


@pytest.mark.parametrize("case", CASES)
def test_without_numbers_there_is_no_verdict(case: str) -> None:
    outcome = verdict(CASES[case][0], {})
    assert outcome.decision == "not checkable"
    assert outcome.missing


POSITIVE = st.floats(min_value=1.0, max_value=100.0)


@given(st.tuples(POSITIVE, POSITIVE, POSITIVE, POSITIVE))
def test_higher_is_better_for_accuracy(values: tuple[float, ...]) -> None:
    """What compares rows says about -x by accuracy the same as about x by perplexity."""
    rows = dict(zip(("Baseline", "QUIK", "QuaRot", "Atom"), values, strict=True))
    mirrored = {row: -value for row, value in rows.items()}
    for case in ("better", "no_worse", "chain"):
        lower = verdict(CASES[case][0], numbers({}, **rows), ["7B"])
        higher = verdict(CASES[case][0], numbers({}, AVERAGE, **mirrored), ["7B"], AVERAGE)
        assert lower.decision == higher.decision


@given(POSITIVE, POSITIVE)
def test_of_two_different_rows_exactly_one_is_better(mine: float, other: float) -> None:
    given = numbers({}, QuaRot=mine, QUIK=other)
    forward = verdict(BETTER, given, ["7B"]).decision
    backward = verdict({"better": {"row": "QUIK", "than": ["QuaRot"]}}, given, ["7B"]).decision
    assert (forward, backward).count("holds") == (abs(mine - other) > 1e-9)  # differences below the slack are equality


@given(POSITIVE, POSITIVE)
def test_close_is_a_loss_within_the_bound_either_way(base: float, value: float) -> None:
    def holds(kind: str, row: str, over: str) -> bool:
        check = {kind: {"row": row, "than": [over], "points": 5.0}}
        return verdict(check, numbers({}, QuaRot=value, Baseline=base), ["7B"]).decision == "holds"

    both = holds("no_worse", "QuaRot", "Baseline") and holds("no_worse", "Baseline", "QuaRot")
    assert holds("close", "QuaRot", "Baseline") == both


def test_better_compares_in_every_column() -> None:
    assert [finding.place for finding in verdict(BETTER).findings] == ["7B", "13B"]
    worse = {**numbers(PAPER), ("QuaRot", "13B", "perplexity"): Number(7.79)}
    assert verdict(BETTER, worse).decision == "contradicted"
    assert [finding.decision for finding in verdict(BETTER, worse).findings] == ["holds", "contradicted"]
    assert verdict(BETTER, worse, columns=["7B"]).decision == "holds"


def test_equal_is_not_better_and_a_margin_counts() -> None:
    assert verdict(BETTER, numbers(PAPER, QuaRot=8.87)).decision == "contradicted"
    assert verdict({"better": {"row": "QuaRot", "than": ["QUIK"], "points": 2.0}}).decision == "holds"
    assert (
        verdict({"better": {"row": "QuaRot", "than": ["QUIK"], "points": 2.38}}).decision == "contradicted"
    )  # 7.78 - 5.40
    assert verdict({"better": {"row": "QuaRot", "than": ["QUIK"], "points": 2.5}}).decision == "contradicted"


def test_what_has_no_number_is_named_and_left_out() -> None:
    outcome = verdict({"better": {"row": "Atom", "than": ["QUIK"]}})
    assert outcome.decision == "holds"
    assert outcome.missing == ("Atom, 13B",)
    assert verdict({"better": {"row": "Atom", "than": ["QuaRot"]}}, columns=["13B"]).decision == "not checkable"


def test_any_number_is_better_than_a_network_that_a_paper_says_broke_down() -> None:
    for broken in (math.nan, math.inf):
        assert verdict(BETTER, numbers(PAPER, QUIK=broken)).decision == "holds"
        accuracies = numbers({("QuaRot", "7B"): 30.0, ("QUIK", "7B"): broken}, AVERAGE)
        assert verdict(BETTER, accuracies, ["7B"], AVERAGE).decision == "holds"


def test_bounds_on_the_loss_are_inclusive() -> None:
    for kind in ("no_worse", "close"):
        assert (
            verdict({kind: {"row": "QuaRot", "than": ["Baseline"], "points": 0.63}}).decision == "holds"
        )  # 6.10 - 5.47
        assert verdict({kind: {"row": "QuaRot", "than": ["Baseline"], "points": 0.62}}).decision == "contradicted"
        assert verdict({kind: {"row": "QuaRot", "than": ["Baseline"], "percent": 11.6}}).decision == "holds"
        assert verdict({kind: {"row": "QuaRot", "than": ["Baseline"], "percent": 11.5}}).decision == "contradicted"


def test_losses_of_accuracy_are_losses() -> None:
    given = numbers(ACCURACY, AVERAGE)
    check = {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "points": 4.15}}  # 69.79 - 65.64
    assert verdict(check, given, quantity=AVERAGE).decision == "holds"
    check = {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "points": 4.14}}
    assert verdict(check, given, quantity=AVERAGE).decision == "contradicted"
    larger = {"across": {"row": "QuaRot", "over": "Baseline", "pairs": [["7B", "13B"]], "percent": False}}
    assert verdict(larger, given, quantity=AVERAGE).decision == "holds"


def test_a_loss_in_percent_of_nothing_never_holds() -> None:
    given = numbers({("Baseline", "7B"): 0.0, ("QuaRot", "7B"): 0.0}, AVERAGE)
    check = {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "percent": 100.0}}
    assert verdict(check, given, ["7B"], AVERAGE).decision == "contradicted"


def test_gains_over_rows_that_broke_down_are_larger_than_any_and_not_comparable_among_themselves() -> None:
    check = {"gains_increasing": {"pairs": PAIR}}
    assert verdict(check, numbers(PAPER, Atom=math.nan), ["7B"]).decision == "holds"
    assert verdict(check, numbers(PAPER, QUIK=math.inf), ["7B"]).decision == "contradicted"
    both = verdict(check, numbers(PAPER, QUIK=math.inf, Atom=math.nan), ["7B"])
    assert both.decision == "not checkable"
    assert "both broke down" in both.missing[0]


def test_differences_are_compared_by_their_size_whichever_row_is_better() -> None:
    """A start that matters more after learning than before is not less important because its sign has changed."""
    check = {"difference_smaller": {"of": ["QuaRot", "QUIK"], "than": ["Baseline", "Atom"]}}
    for mine, other in ((6.45, 6.0), (6.0, 6.45)):
        for before, after in ((5.05, 5.0), (5.0, 5.05)):
            found = numbers(PAPER, QuaRot=mine, QUIK=other, Baseline=before, Atom=after)
            assert verdict(check, found, ["7B"]).decision == "contradicted"


def test_a_column_is_no_worse_than_an_equal_one() -> None:
    check = {"across": {"row": "QuaRot", "pairs": [["13B", "7B"]]}}
    assert verdict(check, numbers(PAPER, QuaRot=5.40)).decision == "holds"
    assert verdict(check, numbers(PAPER)).decision == "contradicted"


class Double(Project):
    """A project of one table that measures given quantities; its columns are the paper's own models or `stand_in`."""

    def __init__(self, *measured: Quantity, stand_in: bool = False) -> None:
        super().__init__(Path(), None, {})  # type: ignore[arg-type]
        object.__setattr__(self, "measured", measured)
        object.__setattr__(self, "stand_in", stand_in)

    def quantities(self, _: RunTable) -> tuple[Quantity, ...]:
        return self.measured

    def endpoints(self, _: RunTable) -> tuple[Quantity, ...]:
        return (KL, LOG_ODDS)

    def columns(self, table: RunTable) -> tuple[str, ...]:
        return tuple(column.name for column in table.columns)

    def slot(self, table: RunTable, column: str) -> Any:
        return SimpleNamespace(name=column, checkpoint="models/small" if self.stand_in else f"models/{column}")


def test_deviations_are_compared_where_they_are_known() -> None:
    """Of the paper the deviations are known, where it prints them."""
    spread = {"mechanism": {"spread_smaller": {"row": "QuaRot", "than": ["QUIK"]}}, "columns": ["7B"]}
    ours = numbers({("QuaRot", "7B"): seeds(6.0, 6.2), ("QUIK", "7B"): seeds(6.15, 7.0)})
    for printed, said in (({"QuaRot": Number(6.10, 0.01), "QUIK": Number(8.87, 0.02)}, "holds"), ({}, "not checkable")):
        (decided,) = outcomes(Double(PERPLEXITY), table(spread), Values(ours, numbers(PAPER, **printed)), {})
        assert [answer.papers.decision for answer in decided.answers.values()] == [said]


def test_what_no_check_asks_is_shown_and_counts_nowhere() -> None:
    (found,) = outcomes(Double(PERPLEXITY), table({"shown": ["QuaRot", "QUIK"]}), Values({}, numbers(PAPER)), {})
    assert not found.answers
    assert score([found]).total == 0
    assert claims_of([found], "Claims").lines[0].here == "see QuaRot, QUIK"
    with pytest.raises(ValidationError, match="or rows that show it"):
        table({})
    with pytest.raises(ValidationError, match="Another"):
        table({"shown": ["Another"]})


def test_a_setting_is_shown_everywhere_and_judged_on_the_papers_models_alone_and_a_fact_nowhere() -> None:
    bound = {"better": {**BETTER["better"], "points": 2.5}}
    both = {"mechanism": BETTER, "setting": bound, "columns": ["7B"]}
    fact = {"fact": {"value": {"row": "QuaRot", "at_most": 1.0}}, "columns": ["7B"]}
    ours = numbers({("QuaRot", "7B"): seeds(40.0, 40.1), ("QUIK", "7B"): seeds(41.0, 41.1)})
    ours = {place: replace(one, seeds=(0, 1), runs=(f"{place}0", f"{place}1")) for place, one in ours.items()}
    for stand_in, expected in ((False, "not reproduced"), (True, "not tested here")):
        values = Values(ours, numbers(PAPER))
        first, second = outcomes(Double(PERPLEXITY, stand_in=stand_in), table(both, fact), values, {})
        assert first.mechanism is not None
        assert first.setting is not None
        assert (first.mechanism.here, first.setting.here) == ("reproduced", expected)
        assert [answer.papers.decision for answer in first.answers.values()] == ["holds", "holds"]  # 8.87 - 6.10
        assert first.setting.ours.findings[0].effect is not None
        assert first.setting.ours.findings[0].effect.size == pytest.approx(1.0)
        assert first.is_not_reproduced == (not stand_in)
        assert (second.mechanism, second.setting, second.is_not_reproduced) == (None, None, False)
        assert second.fact is not None
        assert second.fact.ours.findings[0].decision == "contradicted"
        assert score([first, second]) == Score(reproduced=1)  # of the mechanism alone


def test_ours_and_the_papers_numbers_are_judged_apart() -> None:
    """Also a claim about one of the paper's tasks, which a table of our own tasks cannot check."""
    piqa = {("QuaRot", "7B", "piqa"): Number(76.77), ("Baseline", "7B", "piqa"): Number(79.11)}
    ours = numbers({cell: seeds(20 - value, 20.001 - value) for cell, value in PAPER.items()})
    ours = {place: replace(one, seeds=(0, 1), runs=(f"{place}0", f"{place}1")) for place, one in ours.items()}
    on_piqa = {"mechanism": {"better": {"row": "Baseline", "than": ["QuaRot"]}}, "quantity": "piqa"}
    atom = {"mechanism": {"better": {"row": "Atom", "than": ["QuaRot"]}}, "columns": ["13B"]}
    chosen = table({"mechanism": BETTER}, on_piqa, atom)
    decided = outcomes(Double(PERPLEXITY), chosen, Values(ours, {**numbers(PAPER), **piqa}), {})
    answers = [outcome.answers["mechanism"] for outcome in decided]
    assert [answer.here for answer in answers] == ["not reproduced", "not checkable", "not checkable"]
    assert [answer.papers.decision for answer in answers] == ["holds", "holds", "not checkable"]
    assert score(decided) == Score(not_reproduced=1, unchecked=2)
    assert score(decided).total == 3


def test_a_claim_about_what_only_a_column_that_is_not_computed_measures_has_no_subject() -> None:
    class Partly(Double):
        def columns(self, table: RunTable) -> tuple[str, ...]:
            return ("7B",)

    coding = {"mechanism": BETTER, "quantity": "humaneval"}
    values = Values(of_two(40.0, 41.0, PERPLEXITY), {})
    chosen = table({"mechanism": BETTER, "columns": ["7B"]}, {**coding, "columns": ["13B"]})
    (found,) = outcomes(Partly(PERPLEXITY), chosen, values, {})
    assert found.claim == chosen.claims[0]
    for named in ({}, {"columns": ["7B"]}):
        with pytest.raises(ConfigError, match="unknown quantity 'humaneval'"):
            outcomes(Partly(PERPLEXITY), table({**coding, **named}), values, {})


def of_two(mine: float, other: float, quantity: Quantity) -> dict[tuple[str, str, str], Number]:
    """QuaRot and QUIK on one model, two seeds each that differ little, with runs of their own."""
    found = numbers({("QuaRot", "7B"): seeds(mine, mine + 1e-4), ("QUIK", "7B"): seeds(other, other + 1e-4)}, quantity)
    return {place: replace(one, seeds=(0, 1), runs=(f"{place}0", f"{place}1")) for place, one in found.items()}


@pytest.mark.parametrize(
    ("main", "finer", "good", "bad"),
    [(PERPLEXITY, KL, (0.1, 0.2), (0.2, 0.1)), (AVERAGE, LOG_ODDS, (0.2, 0.1), (0.1, 0.2))],
)
def test_a_mechanism_on_a_stand_in_is_decided_on_the_finer_quantity_whatever_the_papers_says(
    main: Quantity, finer: Quantity, good: tuple[float, float], bad: tuple[float, float]
) -> None:
    """Both ways; on the paper's own models the paper's quantity decides, and a setting by it anywhere."""
    claim = {"mechanism": BETTER, "setting": {"better": {**BETTER["better"], "points": 0.5}}, "columns": ["7B"]}
    better = (1.0, 2.0) if main.better == "lower" else (2.0, 1.0)
    for fine, coarse in itertools.product((True, False), repeat=2):
        given = {
            **of_two(*(better if coarse else better[::-1]), main),
            **of_two(*(good if fine else bad), finer),
        }
        words = {True: "reproduced", False: "not reproduced"}
        (ours,) = outcomes(Double(main, stand_in=True), table(claim), Values(given, {}), {})
        assert ours.mechanism is not None
        assert ours.setting is not None
        assert (ours.mechanism.on, ours.mechanism.second and ours.mechanism.second.quantity) == (finer, main)
        here = words[fine] if fine == coarse else "endpoints disagree"
        assert (ours.mechanism.here, ours.mechanism.there) == (here, words[coarse])
        assert (ours.setting.here, ours.setting.second) == ("not tested here", None)
        (theirs,) = outcomes(Double(main), table(claim), Values(given, {}), {})
        assert theirs.mechanism is not None
        assert theirs.setting is not None
        assert (theirs.mechanism.on, theirs.mechanism.here, theirs.mechanism.second) == (main, words[coarse], None)
        assert theirs.setting.here == words[coarse]


def test_the_papers_quantity_decides_where_a_row_lacks_the_finer_one_or_is_the_full_precision_model() -> None:
    given = of_two(6.0, 7.0, PERPLEXITY)
    divergences = of_two(0.2, 0.1, KL)
    lacking = {place: one for place, one in divergences.items() if place[0] == "QuaRot"}
    exact = {**divergences, ("QUIK", "7B", "kl"): Number(0.0, None, (0.0,), (0,), ("fp",))}
    for finer in ({}, lacking, exact):
        chosen = table({"mechanism": BETTER, "columns": ["7B"]})
        (found,) = outcomes(Double(PERPLEXITY, stand_in=True), chosen, Values({**given, **finer}, {}), {})
        assert found.mechanism is not None
        assert (found.mechanism.on, found.mechanism.here, found.mechanism.second) == (PERPLEXITY, "reproduced", None)


@pytest.mark.parametrize(
    ("quantity", "at_chance", "expected"),
    [(PERPLEXITY, False, KL), (AVERAGE, False, KL), (AVERAGE, True, LOG_ODDS), (LOG_ODDS, False, None)],
)
def test_accuracies_at_chance_are_not_decided_by_the_divergence(
    quantity: Quantity, at_chance: bool, expected: Quantity | None
) -> None:
    """In claims and in experiments."""
    endpoints = Endpoints((KL, LOG_ODDS), (PERPLEXITY, AVERAGE), frozenset({"7B"}))
    rows = {(row, "7B"): 1.0 for row in ("QuaRot", "QUIK")}
    known = [one for measured in (PERPLEXITY, AVERAGE, KL, LOG_ODDS) for one in numbers(rows, measured).items()]
    check = {"better": {"row": "QuaRot", "than": ["QUIK"]}}
    assert endpoints.instead(check, quantity, dict(known), None, at_chance) == expected
    assert endpoints.instead(check, quantity, dict(known), ["13B"], at_chance) is None  # the paper's own model


@pytest.mark.parametrize(
    ("accuracies", "divergences", "expected"),
    [
        ((), ("QuaRot", "QUIK"), "reproduced"),
        ((), ("QuaRot",), "not checkable"),
        (("QuaRot", "QUIK"), ("QuaRot",), "not reproduced"),
    ],
)
def test_where_a_configuration_leaves_the_tasks_out_the_divergence_decides_what_is_said_of_accuracy(
    accuracies: tuple[str, ...], divergences: tuple[str, ...], expected: str
) -> None:
    ours = {
        place: one
        for rows, known in ((accuracies, of_two(70.0, 80.0, AVERAGE)), (divergences, of_two(0.1, 0.2, KL)))
        for place, one in known.items()
        if place[0] in rows
    }
    claim = table({"mechanism": BETTER, "columns": ["7B"], "quantity": "average"})
    (found,) = outcomes(Double(PERPLEXITY, AVERAGE, stand_in=True), claim, Values(ours, {}), {})
    assert found.mechanism is not None
    assert (found.mechanism.here, found.mechanism.on) == (expected, AVERAGE if accuracies else KL)


def with_prefix(
    numbers: dict[tuple[str, str, str], Number], rows: Iterable[str], **recorded: str
) -> dict[str, RunResult]:
    """The runs of these numbers, on models that read a prefix in some rows; recorded: what their files say of KL."""
    plain = RunResult(RUN, {}, {}, None)
    recipe = Recipe.model_validate({"methods": {"prefixed_outliers": {}}, "calibration": {"corpus": "docstrings"}})
    prefixed = RunResult(RUN.model_copy(update={"recipe": recipe}), {}, recorded, None)
    return {run: prefixed if place[0] in rows else plain for place, one in numbers.items() for run in one.runs}


@pytest.mark.parametrize("prefixed", [(), ("QuaRot",)])
@pytest.mark.parametrize("better", [True, False])
def test_accuracy_is_decided_by_the_divergence_of_the_same_rows_and_another_reference_by_perplexity(
    prefixed: tuple[str, ...], better: bool
) -> None:
    """Whatever log-odds say; both claims of the same rows are one mechanism."""
    fine = of_two(*((0.1, 0.2) if better else (0.2, 0.1)), KL)
    coarse = {**of_two(80.0, 70.0, AVERAGE), **of_two(0.2, 0.1, LOG_ODDS)}
    perplexity = of_two(*((6.0, 7.0) if better else (7.0, 6.0)), PERPLEXITY)
    project = Double(PERPLEXITY, AVERAGE, stand_in=True)
    both = table(
        {"mechanism": BETTER, "columns": ["7B"]}, {"mechanism": BETTER, "columns": ["7B"], "quantity": "average"}
    )
    ours = {**fine, **coarse, **perplexity}
    decided = outcomes(project, both, Values(ours, {}), with_prefix(ours, prefixed))
    answers = [one.mechanism for one in decided if one.mechanism is not None]
    assert [one.on for one in answers] == [PERPLEXITY if prefixed else KL] * 2
    first = "reproduced" if better else "not reproduced"
    assert [one.here for one in answers] == [first, "reproduced" if better else "endpoints disagree"]
    assert answers[1].second is not None
    assert (answers[1].second.quantity, answers[1].there) == (AVERAGE, "reproduced")
    assert repeated(decided) == {1: 0}
    assert score(decided) == Score(reproduced=int(better), not_reproduced=int(not better))
    assert [[*one.answers] for one in once(decided)] == [["mechanism"], []]
    headline = replace(decided[1], claim=decided[1].claim.model_copy(update={"headline": True}))
    assert repeated([decided[0], headline]) == {0: 1}


def test_what_is_no_accuracy_and_a_claim_of_one_task_are_not_decided_by_the_divergence() -> None:
    piqa = Quantity("piqa", "PIQA", "higher", "%", 50.0, sampled=True)
    ours = {**of_two(0.1, 0.2, KL), **of_two(6.0, 7.0, PERPLEXITY), **of_two(80.0, 70.0, piqa)}
    lost = {place: replace(one, mean=math.nan) for place, one in of_two(80.0, 70.0, AVERAGE).items()}
    claims = [{"mechanism": BETTER, "columns": ["7B"], "quantity": name} for name in ("piqa", "average")]
    project = Double(PERPLEXITY, piqa, AVERAGE, stand_in=True)
    first, second = outcomes(project, table(*claims), Values({**ours, **lost}, {}), {})
    assert first.mechanism is not None
    assert second.mechanism is not None
    assert first.mechanism.second is None
    assert second.mechanism.here == "not checkable"
    assert repeated([first, second]) == {}


@pytest.mark.parametrize("change", [{"columns": ["7B", "13B"]}, {"mechanism": {"no_worse": BETTER["better"]}}])
def test_claims_of_other_columns_or_by_another_check_are_mechanisms_of_their_own(change: dict[str, Any]) -> None:
    claims = [{"mechanism": BETTER, "columns": ["7B"]}, {"mechanism": BETTER, "columns": ["7B"], **change}]
    ours = {**of_two(0.1, 0.2, KL), **of_two(6.0, 7.0, PERPLEXITY)}
    decided = outcomes(Double(PERPLEXITY, stand_in=True), table(*claims), Values(ours, {}), {})
    assert repeated(decided) == {}
    assert score(decided).total == 2


@pytest.mark.parametrize("prefixed", [(), ("QuaRot",), ("QUIK",), ("QuaRot", "QUIK")])
@pytest.mark.parametrize("recorded", [{}, {"reference": WITH_PREFIX}])
def test_the_divergence_compares_a_row_with_a_prefix_where_its_reference_has_the_same_prefix(
    prefixed: tuple[str, ...], recorded: dict[str, str]
) -> None:
    """A prefix moves the full-precision model too; runs from before that counted are compared among each other."""
    chosen, averages = table({"mechanism": BETTER, "columns": ["7B"]}), of_two(80.0, 70.0, AVERAGE)
    both = {**of_two(6.0, 7.0, PERPLEXITY), **of_two(0.2, 0.1, KL)}
    by_tasks = {**averages, **of_two(0.1, 0.2, LOG_ODDS)}
    for main, finer, ours in ((PERPLEXITY, KL, both), (AVERAGE, LOG_ODDS, by_tasks)):
        project = Double(main, stand_in=True)
        (found,) = outcomes(project, chosen, Values(ours, {}), with_prefix(ours, prefixed, **recorded))
        assert found.mechanism is not None
        differ = len(prefixed) == 1 and finer == KL and not recorded
        assert found.mechanism.on == (main if differ else finer)
        assert found.mechanism.here == ("reproduced" if differ else "endpoints disagree")


@pytest.mark.parametrize("case", CASES)
def test_a_question_of_how_much_is_lost_is_never_decided_on_the_finer_quantity(case: str) -> None:
    check = CASES[case][0]
    assert is_direction(check) == (case not in {"bound", "close", "at_most", "at_least", "across"})
    assert not is_direction({kind: {**arguments, "points": 0.1} for kind, arguments in check.items()})


def test_gains_in_percent_of_perplexity_are_gains_in_nats_of_divergence() -> None:
    """0.02 of 0.10 nats is less than 0.05 of 1.00, though a larger share of it."""
    given = numbers({("QuaRot", "7B"): 0.08, ("QUIK", "7B"): 0.10, ("Baseline", "7B"): 0.95, ("Atom", "7B"): 1.0}, KL)
    found = verdict({"gains_increasing": {"pairs": PAIR}}, given, ["7B"], KL)
    assert found.decision == "holds"
    (finding,) = found.findings
    assert finding.effect is not None
    assert finding.effect.compared == pytest.approx((0.05, 0.02))
    assert (finding.effect.of, finding.effect.unit) == ("gain", "nats")


def test_an_unknown_quantity_of_a_claim_is_named() -> None:
    chosen = table({"mechanism": BETTER, "quantity": "perplexety"})
    with pytest.raises(ConfigError, match=r"unknown quantity 'perplexety'.*perplexity"):
        outcomes(Double(PERPLEXITY), chosen, Values({}, {}), {})
