"""Experiments that explain what is not reproduced: each is computed, and can speak for its cause and against it."""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rotquant.reporting.claims import judge
from rotquant.study.checks import Claim, named_by_experiment
from rotquant.study.project import Project, load_project
from rotquant.study.tables import Table
from rotquant.study.values import Number, Place
from tests.project import REPOSITORY

DRAWS = 60


@functools.cache
def project() -> Project:
    return load_project(root=REPOSITORY)


def experiments() -> Iterator[Any]:
    for name, table in project().tables.items():
        for number, claim in enumerate(table.claims, 1):
            if claim.experiment is not None:
                yield pytest.param(table, claim, id=f"{name}-{number}")


def drawn(places: list[tuple[str, str]], quantity: str, seed: int) -> dict[Place, Number]:
    """A number for each row and column, of either sign and of sizes from a hundredth to ten thousand."""
    chosen = random.Random(seed)
    means = [chosen.choice((-1, 1)) * 10 ** chosen.uniform(-2, 4) for _ in places]
    spreads = [chosen.uniform(0, 1) for _ in places]
    numbers = (
        Number(mean, spread, (mean - spread, mean, mean + spread)) for mean, spread in zip(means, spreads, strict=True)
    )
    return {(row, column, quantity): number for (row, column), number in zip(places, numbers, strict=True)}


@pytest.mark.parametrize(("table", "claim"), list(experiments()))
def test_an_experiment_is_of_cells_that_its_target_computes_and_can_come_out_either_way(
    table: Table, claim: Claim
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
    found = {
        judge(experiment.check, target, drawn(computed, name, seed), measured[name], columns=columns).decision
        for seed in range(DRAWS)
    }
    assert {"holds", "contradicted"} <= found
