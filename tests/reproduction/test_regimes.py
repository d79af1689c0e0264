"""What a claim takes for granted: a column where it is not so is not compared, and the numbers say whether it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from reproduction.claims.claims import Answer, Verdict, judge, outcomes
from reproduction.claims.effects import View
from reproduction.claims.regimes import outside
from reproduction.frame.values import Number, collect
from reproduction.tables.checks import Regime
from reproduction.tables.project import Project
from reproduction.tables.quantities import OUTLIER_TOKENS, PERPLEXITY
from tests.helpers import reports
from tests.helpers.claims import Measured, measured, table

DIFFER = Regime(differ=("QuaRot", "Atom"), otherwise="The two are one")
CHECK = {"better": {"row": "QuaRot", "than": ["QUIK"]}}


def cells(columns: dict[str, float]) -> Measured:
    """QuaRot better than QUIK in each column, and Atom worse than QuaRot by so many nats."""
    noise = np.random.default_rng(0).normal(size=(3, 20)) * 0.01
    found = {}
    for column, apart in columns.items():
        found |= {
            ("QuaRot", column): (6.0, noise),
            ("QUIK", column): (7.0, noise + np.random.default_rng(1).normal(size=(3, 20)) * 0.01),
            ("Atom", column): (6.0, noise + apart),
        }
    return measured(found)


def verdict(found: Measured, regime: Regime | None = DIFFER) -> Verdict:
    absent = {} if regime is None else outside(View(PERPLEXITY, ("7B", "13B"), *found, ()), regime)
    return judge(CHECK, table(), found[0], PERPLEXITY, found[1], absent=absent)


def test_a_claim_is_judged_where_its_rows_differ() -> None:
    assert verdict(cells({"7B": 0.1, "13B": 0.1})) == verdict(cells({"7B": 0.1, "13B": 0.1}), regime=None)
    assert verdict(cells({"7B": 0.1, "13B": 0.1})).decision == "holds"


def test_a_claim_is_not_testable_where_they_are_one_network_and_says_why() -> None:
    found = verdict(cells({"7B": 0.0, "13B": 0.0}))
    assert not found.testable
    assert Answer(found, Verdict(())).here == "not testable on this model"
    assert not found.missing
    assert [(one.place, one.reason) for one in found.findings] == [
        (column, "The two are one (QuaRot and Atom are equal in all that was measured)") for column in ("7B", "13B")
    ]


def test_a_column_that_is_left_out_leaves_the_verdict_to_the_others() -> None:
    found = verdict(cells({"7B": 0.0, "13B": 0.1}))
    assert found.decision == "holds"
    assert found.testable
    assert [one.place for one in found.findings if one.compares] == ["13B"]


def test_rows_of_the_same_runs_do_not_differ() -> None:
    numbers, results = cells({"7B": 0.1})
    numbers["Atom", "7B", "perplexity"] = numbers["QuaRot", "7B", "perplexity"]
    found = verdict((numbers, results))
    assert found.decision == "not checkable"
    assert found.findings[0].reason == "The two are one (QuaRot and Atom are the same runs)"


def test_what_is_given_and_not_measured_is_named() -> None:
    numbers, results = cells({"7B": 0.1})
    del numbers["Atom", "7B", "perplexity"]
    found = verdict((numbers, results))
    assert found.decision == "not checkable"
    assert found.testable  # as far as anybody knows
    assert found.missing[0] == "Atom, 7B"


@pytest.mark.parametrize("number", [0.0, 0.005, 0.01, 0.75])
def test_fewer_outlier_tokens_are_asked_of_a_model_that_has_some(project: Project, number: float) -> None:
    """Figures 4 and 7, with windows of which so many have an outlier token, and none behind the prefix."""
    for name in ("prefixquant_figure4", "prefixquant_figure7"):
        chosen = project.table(name)
        claim = next(one for one in chosen.claims if one.regime is not None)
        column = chosen.columns[0].name
        numbers = {
            ("Original", column, "number"): Number(number, None, (number,), runs=("a",)),
            ("Prefixed", column, "number"): Number(0.0, 0.0, (0.0,) * 3, (0, 1, 2), ("b", "c", "d")),
        }
        absent = outside(View(OUTLIER_TOKENS[0], [column], numbers, {}, ()), claim.regime)
        found = judge(claim.checks["mechanism"], chosen, numbers, OUTLIER_TOKENS[0], {}, [column], absent)
        assert found.decision == ("holds" if number >= 0.01 else "not checkable")
        assert number >= 0.01 or found.findings[0].reason.startswith("No token is an outlier, so")


@pytest.mark.parametrize(("tokens", "decision"), [("one", "not checkable"), ("several", "holds")])
def test_the_content_of_a_prefix_is_compared_where_it_has_several_tokens(
    project: Project, tokens: str, decision: str
) -> None:
    """Table 15: "only highest frequency" is the same prefix where that has one token, and another where it has more."""
    chosen = project.table("prefixquant_table15")
    noise = np.random.default_rng(0).normal(size=(3, 20)) * 0.01
    rows = {"default": (6.0, noise), "random": (9.0, np.random.default_rng(1).normal(size=(3, 20)) * 0.01)}
    highest = (6.0, noise) if tokens == "one" else (7.0, np.random.default_rng(2).normal(size=(3, 20)) * 0.01)
    cells = {(row, "Llama-2-7B"): one for row, one in (rows | {"only highest frequency": highest}).items()}
    numbers, results = measured(cells)
    for claim in chosen.claims:
        check = claim.checks["mechanism"]
        assert claim.regime is not None
        absent = outside(View(PERPLEXITY, ["Llama-2-7B"], numbers, results, ()), claim.regime)
        found = judge(check, chosen, numbers, PERPLEXITY, results, ["Llama-2-7B"], absent)
        assert found.decision == decision


@pytest.mark.parametrize(("times", "decision"), [(15.0, "holds"), (2.0, "not checkable")])
def test_a_number_may_be_asked_as_a_multiple_of_another_rows(times: float, decision: str) -> None:
    """What rotation repairs is there where rounding alone costs ten times the perplexity."""
    regime = Regime.model_validate(
        {"value": {"row": "Atom", "at_least": 10}, "over": "QuaRot", "otherwise": "Rounding alone costs little"}
    )
    found = verdict(cells({"7B": np.log(times)}), regime)
    assert found.decision == decision
    if decision != "holds":
        assert found.findings[0].reason == (
            "Rounding alone costs little (PPL of Atom over that of QuaRot: 2.00 times, at least 10.0 asked)"
        )


def test_columns_on_one_model_are_named_once() -> None:
    numbers, results = cells({"7B": 0.0})
    numbers |= {(row, "13B", name): one for (row, _, name), one in [*numbers.items()]}
    assert [one.place for one in verdict((numbers, results)).findings] == ["7B"]


def test_a_regime_may_be_that_of_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are those of the same checkpoint, and where it is not computed nothing is decided."""
    regime = {
        "value": {"row": "QuaRot", "at_least": 10},
        "over": "Baseline",
        "target": "quarot_table9",
        "otherwise": "Rounding alone costs little",
    }
    claim = {"text": "Better.", "section": "1", "mechanism": {"better": {"row": "Baseline", "than": ["QuaRot"]}}}
    other = reports.table(
        "table9",
        claims=[],
        published=None,
        columns=[{"name": "7B", "slot": "Llama-2-7B"}],
        rows=reports.rows("QuaRot"),
        figure=None,
    )
    asked = [{**claim, "regime": regime}]
    own = reports.table("table1", columns=["Llama-2-7B"], published=None, figure=None, claims=asked)
    project = reports.load(tmp_path, monkeypatch, own, other)
    reports.compute(project)

    def here() -> str:
        chosen = project.table("quarot_table1")
        (found,) = outcomes(project, chosen, *collect(project, chosen))
        assert found.mechanism is not None
        return found.mechanism.here

    assert here() == "not checkable"
    for value, said in ((150.0, "reproduced"), (20.0, "not testable on this model")):
        reports.compute(project, "quarot_table9", QuaRot=value)
        assert here() == said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"otherwise": "nothing"}, "either `differ` or `value`"),
        ({"differ": ["a", "b"], "value": {"row": "a", "at_least": 1}, "otherwise": "-"}, "either `differ` or"),
        ({"differ": ["a"], "otherwise": "-"}, "at least 2"),
        ({"differ": ["a", "b"]}, "otherwise"),
        ({"differ": ["a", "b"], "otherwise": "A full stop."}, "otherwise"),
    ],
)
def test_what_is_given_is_one_thing_with_a_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Regime.model_validate(given)


def test_its_rows_are_those_of_the_table() -> None:
    with pytest.raises(ValidationError, match="Another"):
        table({"mechanism": CHECK, "regime": {"differ": ["QuaRot", "Another"], "otherwise": "-"}})
