"""No claim of a paper is vacuous, and none is counted twice: for each some arrangement of numbers says the opposite."""

import functools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rotquant.reporting.claims import judge
from rotquant.study.checks import Claim, checks_of
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


def given(table: Table, claim: Claim) -> tuple[Numbers, Quantity]:
    """The paper's numbers of the claim's quantity; of what it does not print, rows a third apart."""
    values = Values({}, printed(project(), table))
    measured = project().quantities(table)
    known = known_quantities(project(), table, values)
    quantity = measured[0] if claim.quantity is None else known[claim.quantity]
    found = {}
    for place, row in enumerate(table.rows):
        for column in table.columns:
            paper = values.published.get((row.name, column.name, quantity.name), Number(10 * 1.3**place))
            spread = paper.deviation or 0.1 * (place + 1)
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
    numbers, quantity = given(table, claim)
    assert any(judge(claim, check, table, other, quantity).decision == "contradicted" for other in arranged(numbers))


def test_no_comparison_is_counted_twice() -> None:
    """The same check of the same runs, in claims of one page or of two; a longer list of rows is another check."""
    seen: dict[tuple[str, ...], str] = {}
    for name, table in project().tables.items():
        keys: dict[tuple[str, str], list[str]] = {}
        for cell in project().cells(name):
            keys.setdefault((cell.row, cell.column), []).extend(run.key for run in cell.runs)
        for number, claim in enumerate(table.claims, 1):
            for column in claim.columns or [column.name for column in table.columns]:
                behind = {row: ",".join(found) for (row, where), found in keys.items() if where == column}
                if claim.check is not None and behind:
                    words = re.split('"', json.dumps(claim.check))
                    check = "".join(behind.get(word, word) for word in words)
                    place = f"{name}, claim {number}"
                    assert seen.setdefault((check, claim.quantity or ""), place) == place
