"""Experiments that explain what is not reproduced: each is computed, and can speak for its cause and against it."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from reproduction.claims.claims import judge
from reproduction.frame.values import Number, Place
from reproduction.tables.checks import Claim, named_by_experiment, quantities_in
from reproduction.tables.tables import RunTable
from tests.helpers.project import shipped_project as project

DRAWS = 100


def experiments() -> Iterator[Any]:
    for name, table in project().of(RunTable).items():
        for number, claim in enumerate(table.claims, 1):
            if claim.experiment is not None:
                yield pytest.param(table, claim, id=f"{name}-{number}")


def drawn(places: list[tuple[str, str]], quantity: str, seed: int) -> dict[Place, Number]:
    """A number for each row and column, of either sign and of many sizes; every second seed has the rows in one order
    in all columns."""
    chosen = random.Random(seed)
    parts = [tuple(dict.fromkeys(names)) for names in zip(*places, strict=True)]
    by_row, by_column = ({name: 10 ** chosen.uniform(-1, 2) for name in names} for names in parts)
    sign = chosen.choice((-1, 1))
    found = {}
    for row, column in places:
        mean = sign * by_row[row] * by_column[column] * (1 if seed % 2 else 10 ** chosen.uniform(-1, 1))
        spread = chosen.uniform(0, 1) * by_row[row]
        found[row, column, quantity] = Number(mean, spread, (mean - spread, mean, mean + spread))
    return found


@pytest.mark.parametrize(("table", "claim"), list(experiments()))
def test_an_experiment_is_of_cells_that_its_target_computes_and_can_come_out_either_way(
    table: RunTable, claim: Claim
) -> None:
    experiment = claim.experiment
    assert experiment is not None
    target = project().table(experiment.target or table.id)
    own = target.id == table.id
    columns = experiment.columns or (claim.columns if own else None) or [column.name for column in target.columns]
    measured = {quantity.name: quantity for quantity in project().quantities(target)}
    name = experiment.quantity or (claim.quantity if own else None) or next(iter(measured))
    cells = {
        (cell.row, cell.column)
        for cell in project().cells(target.id)
        if name in [quantity.name for quantity in cell.quantities]
    }
    rows = dict.fromkeys(word for kind, word in named_by_experiment(experiment) if kind == "row")
    computed = [place for place in itertools.product(rows, columns) if place in cells]
    assert {row for row, _ in computed} == {*rows}
    found: set[str] = set()
    for seed in range(DRAWS):
        numbers = drawn(computed, name, seed)
        for place, bound in enumerate(quantities_in(experiment.check)):
            assert bound in measured
            numbers |= drawn(computed, bound, DRAWS * (place + 1) + seed)
        found.add(judge(experiment.check, target, numbers, measured[name], columns=columns).decision)
        if {"holds", "contradicted"} <= found:
            return
    pytest.fail(f"whatever the numbers of {target.id}, the experiment says {found} of: {experiment.cause}")
