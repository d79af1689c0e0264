"""No claim of a paper is vacuous, and none is counted twice: for each some arrangement of numbers says the opposite."""

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rotquant.reporting.claims import judge
from rotquant.study.checks import Claim, checks_of, named_by
from rotquant.study.project import Project, load_project
from rotquant.study.quantities import Quantity
from rotquant.study.tables import Table
from rotquant.study.values import Number, Values, known_quantities, printed
from tests.project import REPOSITORY

Numbers = dict[tuple[str, str, str], Number]


@functools.cache
def project() -> Project:
    return load_project(root=REPOSITORY)


def claims() -> Iterator[Any]:
    for name, table in project().tables.items():
        for number, claim in enumerate(table.claims, 1):
            for kind, arguments in checks_of(claim):
                yield pytest.param(table, claim, {kind: arguments}, id=f"{name}-{number}-{kind}")


def given(table: Table, claim: Claim, check: dict[str, dict[str, Any]]) -> tuple[Numbers, Quantity]:
    """The paper's numbers of the claim's quantity; of what it does not print, rows and columns a third apart, on both
    sides of a bound that is asked, of both signs where that is 0."""
    bounds = [arguments["value"] for arguments in check.values() if "value" in arguments]
    lowest = bounds[0] / 1.2 if bounds and bounds[0] else 10
    step = -1.3 if bounds and not bounds[0] else 1.3
    values = Values({}, printed(project(), table))
    measured = project().quantities(table)
    known = known_quantities(project(), table, values)
    quantity = measured[0] if claim.quantity is None else known[claim.quantity]
    found = {}
    for place, row in enumerate(table.rows):
        for at, column in enumerate(table.columns):
            paper = values.published.get((row.name, column.name, quantity.name), Number(lowest * step ** (place + at)))
            spread = paper.deviation or 0.01 * lowest * (place + 1)
            seeds = tuple(paper.mean + spread * step for step in (-1, 0, 1))
            found[row.name, column.name, quantity.name] = Number(paper.mean, spread, seeds)
    return found, quantity


def arranged(numbers: Numbers) -> Iterator[Numbers]:
    """The same numbers in other places."""
    generator = random.Random(0)
    for _ in range(500):
        yield dict(zip(numbers, generator.sample(list(numbers.values()), len(numbers)), strict=True))


@pytest.mark.parametrize(("table", "claim", "check"), list(claims()))
def test_some_arrangement_of_a_tables_numbers_contradicts_a_claim(
    table: Table, claim: Claim, check: dict[str, dict[str, Any]]
) -> None:
    numbers, quantity = given(table, claim, check)
    assert any(judge(claim, check, table, other, quantity).decision == "contradicted" for other in arranged(numbers))


def comparisons(kind: str, arguments: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """What a check compares, pair by pair where it is about pairs; a longer list of rows is no other check."""
    if "than" in arguments and "row" in arguments:
        name = "better" if kind == "no_worse" else kind
        yield from ((name, arguments["row"], other) for other in arguments["than"])
    elif kind == "order":
        yield from (("better", *pair) for pair in itertools.pairwise(arguments["rows"]))
    else:
        yield (kind, *re.split('"', json.dumps(arguments, sort_keys=True)))


def test_no_comparison_is_counted_twice() -> None:
    """The same comparison of the same experiments, whatever their seeds, in claims of one page or of two."""
    seen: dict[tuple[str, ...], str] = {}
    for name, table in project().tables.items():
        behind: dict[tuple[str, str], list[str]] = {}
        for cell in project().cells(name):
            key = cell.runs[0].model_copy(update={"seed": 0}).model_dump_json()
            behind.setdefault((cell.row, cell.column), []).append(key)
        computed, main = {column for _, column in behind}, project().quantities(table)[0].name
        for number, claim in enumerate(table.claims, 1):
            for kind, arguments in (claim.check or {}).items():
                names = [name for name in claim.columns or [one.name for one in table.columns] if name in computed]
                keys = {
                    ("|".join("".join(behind.get((word, column), [word])) for word in words), claim.quantity or main)
                    for column in names
                    for words in comparisons(kind, arguments)
                }
                for key in keys:  # columns that share a stand-in count once within a claim
                    place = f"{name}, claim {number}"
                    assert seen.setdefault(key, place) == place


def test_every_claim_of_a_paper_names_its_words() -> None:
    """What users report of the authors' code rests on no sentence of the paper."""
    for table in [*project().tables.values(), *project().speed.values()]:
        if table.paper in ("quarot", "spinquant") or table.id.startswith("prefixquant_figure"):
            unsaid = [claim.text for claim in table.claims if claim.quote is None and claim.section != "code"]
            assert not unsaid, (table.id, unsaid)


def test_no_amount_in_the_papers_units_is_asked_of_other_models() -> None:
    """Points of perplexity, and points gained, are magnitudes; words such as "the same" have a bound on any model."""
    for name, table in project().tables.items():
        for claim in table.claims:
            for kind, arguments in (claim.check or {}).items():
                perplexity = (claim.quantity or project().quantities(table)[0].name) == "perplexity"
                assert kind != "range_at_least", (name, claim.text)
                assert not arguments.get("points") or (kind in ("close", "loss_at_most") and not perplexity)


def test_examples_of_two_and_of_three_features_are_not_compared() -> None:
    """Figure 6: how much of the range is used depends on the number of features."""
    claims = project().table("spinquant_figure6").claims
    assert all(len({name[:3] for kind, name in named_by(claim) if kind == "row"}) == 1 for claim in claims)


def test_an_experiment_is_computed_and_is_not_what_it_explains() -> None:
    for name, table in project().tables.items():
        computed = {row.name for row in table.computed_rows}
        for claim in table.claims:
            if claim.experiment is not None:
                asked = {row for kind, row in named_by(claim.model_copy(update={"experiment": None})) if kind == "row"}
                assert set(claim.experiment.rows) <= computed - asked, (name, claim.text)
                assert claim.experiment.target != name, claim.text
