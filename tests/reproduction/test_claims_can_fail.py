"""No claim of a paper is vacuous, and none is counted twice: for each some arrangement of numbers says the opposite."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from reproduction.claims.claims import judge
from reproduction.frame.values import Number, Values, known_quantities, printed
from reproduction.tables.checks import Claim, bound_of, named_by, named_by_experiment, quantities_in
from reproduction.tables.quantities import Quantity
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.tables.tables import RunTable
from tests.helpers.project import shipped_project as project

Numbers = dict[tuple[str, str, str], Number]


def claims() -> Iterator[Any]:
    for name, table in project().of(RunTable).items():
        for number, claim in enumerate(table.claims, 1):
            for about, check in claim.checks.items():
                if about != "fact":
                    yield pytest.param(table, claim, check, id=f"{name}-{number}-{about}")


def given(table: RunTable, claim: Claim, check: dict[str, dict[str, Any]]) -> tuple[Numbers, Quantity]:
    """The paper's numbers of the claim's quantity; of what it does not print, rows and columns a third apart, on both
    sides of a bound that is asked, of both signs where that is 0."""
    bounds = [one for arguments in check.values() if isinstance(one := bound_of(arguments), int | float)]
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
            for other in quantities_in(check):
                found[row.name, column.name, other] = Number(1.1 * paper.mean)
    return found, quantity


def arranged(numbers: Numbers) -> Iterator[Numbers]:
    """The same numbers in other places."""
    generator = random.Random(0)
    for _ in range(500):
        yield dict(zip(numbers, generator.sample(list(numbers.values()), len(numbers)), strict=True))


@pytest.mark.parametrize(("table", "claim", "check"), list(claims()))
def test_some_arrangement_of_a_tables_numbers_contradicts_a_claim(
    table: RunTable, claim: Claim, check: dict[str, dict[str, Any]]
) -> None:
    numbers, quantity = given(table, claim, check)
    decisions = (judge(check, table, other, quantity, columns=claim.columns).decision for other in arranged(numbers))
    assert "contradicted" in decisions


def comparisons(kind: str, arguments: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """What a check compares, pair by pair where it is about pairs; a longer list of rows is no other check."""
    if "than" in arguments and "row" in arguments:
        name = "better" if kind == "no_worse" else kind
        yield from ((name, arguments["row"], other) for other in arguments["than"])
    elif "rows" in arguments:
        yield from (("better", *pair) for pair in itertools.pairwise(arguments["rows"]))
    else:
        yield (kind, *re.split('"', json.dumps(arguments, sort_keys=True)))


def test_no_comparison_is_counted_twice() -> None:
    """The same comparison of the same experiments, whatever their seeds, in claims of one page or of two."""
    seen: dict[tuple[str, ...], str] = {}
    for name, table in project().of(RunTable).items():
        behind: dict[tuple[str, str], list[str]] = {}
        for cell in project().cells(name):
            key = cell.runs[0].model_copy(update={"seed": 0}).model_dump_json()
            behind.setdefault((cell.row, cell.column), []).append(key)
        computed, main = {column for _, column in behind}, project().quantities(table)[0].name
        for number, claim in enumerate(table.claims, 1):
            for kind, arguments in (claim.mechanism or {}).items():
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
    for table in [*project().of(RunTable).values(), *project().of(SpeedTable).values()]:
        if table.paper in ("quarot", "spinquant") or table.id.startswith("prefixquant_figure"):
            unsaid = [claim.text for claim in table.claims if claim.quote is None and claim.section != "code"]
            assert not unsaid, (table.id, unsaid)


def test_examples_of_two_and_of_three_features_are_not_compared() -> None:
    """Figure 6: how much of the range is used depends on the number of features."""
    claims = project().table("spinquant_figure6").claims
    assert all(len({name[:3] for kind, name in named_by(claim) if kind == "row"}) == 1 for claim in claims)


def test_an_experiment_is_on_numbers_of_its_own_and_names_its_cause_as_a_statement() -> None:
    """Loading refuses rows that the target does not compute, and those of the claim itself on its own page."""
    for name, table in project().of(RunTable).items():
        for claim in table.claims:
            if (experiment := claim.experiment) is None:
                continue
            target = project().table(experiment.target or name)
            columns = [word for kind, word in named_by_experiment(experiment) if kind == "column"]
            assert not columns or {*columns} & {*project().columns(target)}, (name, claim.text, "computes no column")
            measured = {quantity.name for quantity in project().quantities(target)}
            assert (experiment.quantity or next(iter(measured))) in measured
            assert experiment.target != name, (name, claim.text, "its own page needs no target")
            assert not experiment.cause.endswith("."), claim.text
            assert not any(digit.isdigit() and "." in digit for digit in experiment.cause.split()), "a number is live"
