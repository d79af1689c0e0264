"""Claims about speed, decided by our measurements, and by the paper's on each of its GPUs.

A claim compares two columns by their ratio, or bounds the numbers of one. Our number ranges from the tenth to the
ninetieth percentile of its replays, a ratio from the least to the largest that these allow: no confidence interval. The
claim holds where the whole range meets the bound, is contradicted where none does, and is undecided otherwise. A number
without replays, and the paper's, is compared directly. Places without a number are named and left out; a claim with
nothing to compare has no verdict. A claim about times on the paper's GPU is judged on that GPU alone; memory is the
same on all.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from reproduction.claims.claims import Answer, Outcome, Verdict, decided
from reproduction.claims.findings import ABOVE_ZERO, Effect, Finding, Region
from reproduction.frame.speed import SpeedNumber, SpeedNumbers, row_names
from reproduction.tables.checks import About
from reproduction.tables.speed.definitions import (
    FACTORS,
    SpeedBound,
    SpeedCheck,
    SpeedClaim,
    SpeedCompared,
    SpeedGrid,
    SpeedTable,
    matches,
)


class Amount(NamedTuple):
    """A number or a ratio, and the range of its replays."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Amount":
        """The amount in another unit."""
        return Amount(*(factor * one for one in self))

    def over(self, other: "Amount") -> "Amount":
        """The ratio of the amount to another."""
        return Amount(self.value / other.value, self.low / other.high, self.high / other.low)

    @property
    def inverse(self) -> "Amount":
        """The inverse of the amount."""
        return Amount(1 / self.value, 1 / self.high, 1 / self.low)


Ratio = Callable[[str, str, str, str | None], Amount | None]
"""The number of a grid's row in column `over` by that in another column: (grid, row, column, over).

Without `over` the number itself, in SI units.
"""


def outcomes(table: SpeedTable, numbers: SpeedNumbers, device: str = "") -> tuple[Outcome, ...]:
    """Decide every claim of a table. device: the GPU or CPU of our measurements."""
    own = any(_is_of(gpu, device) for gpu in table.gpus)

    def answers(claim: SpeedClaim) -> Iterator[tuple[About, Answer]]:
        grids = [grid for grid in table.grids if matches(grid.name, claim.grid)]
        timeless = all(grid.timeless for grid in grids)
        for about, check in claim.checks.items():
            papers = [(gpu, judge(claim, check, table, _ratios(table, numbers, gpu))) for gpu in table.gpus]
            named = [(gpu if len(papers) > 1 else "", verdict) for gpu, verdict in papers]
            together = Verdict(
                tuple(replace(one, device=gpu) for gpu, verdict in named for one in verdict.findings),
                tuple(f"{place}, {gpu}".rstrip(", ") for gpu, verdict in named for place in verdict.missing),
            )
            ours = judge(claim, check, table, _ratios(table, numbers))
            yield about, Answer(ours, together, about == "mechanism" or own or timeless)

    return decided(table.claims, answers)


def _is_of(gpu: str, device: str) -> bool:
    """Whether a device is the paper's: "NVIDIA GeForce RTX 3090" has all words of "NVIDIA RTX 3090"."""
    return all(word in device.casefold() for word in re.split(r"[ -]+", gpu.casefold()))


def judge(claim: SpeedClaim, check: SpeedCheck, table: SpeedTable, ratio: Ratio) -> Verdict:
    """Decide a check of a claim by one set of ratios."""
    results = [
        result
        for grid in table.grids
        if matches(grid.name, claim.grid)
        for column in check.asked.columns
        for result in _findings(claim, check, grid, column, ratio, f"{grid.name}, " if len(table.grids) > 1 else "")
    ]
    findings = tuple(result for result in results if isinstance(result, Finding))
    return Verdict(findings, tuple(result for result in results if isinstance(result, str)))


def _findings(
    claim: SpeedClaim, check: SpeedCheck, grid: SpeedGrid, column: str, ratio: Ratio, prefix: str
) -> Iterator[Finding | str]:
    asked = check.asked
    chosen = [row for row in row_names(grid) if matches(row, *claim.rows)]
    compared = column if asked.over is None else f"{column} over {asked.over}"
    values = {row: ratio(grid.name, row, column, asked.over) for row in chosen}
    known = {row: value for row, value in values.items() if value is not None}
    if not known:
        yield from [f"{prefix}{compared}"] if chosen else []
        return
    yield from (f"{prefix}{row}, {compared}" for row in chosen if row not in known)
    if broken := [row for row, (value, _, _) in known.items() if not math.isfinite(value)]:
        for row in broken:
            reason = f"{known[row].value}, not finite"
            yield Finding(f"{prefix}{row}, {compared}", "not checkable", reason=reason)
        return
    prefix += f"{column}, " if len(asked.columns) > 1 else ""
    ratios = {row: _compared(asked, grid, value) for row, value in known.items()}
    unit = grid.unit if asked.compare == "amount" else "x"
    if not isinstance(asked, SpeedBound):
        for (before, less), (after, more) in itertools.pairwise(ratios.items()):
            apart = (more.value - less.value, more.low - less.high, more.high - less.low)
            effect = Effect("apart", *apart, ABOVE_ZERO, unit, (more.value, less.value))
            yield Finding(f"{prefix}{after} after {before}", ABOVE_ZERO.decide(*apart[1:]), effect)
        return
    if asked.of == "best":
        row = max(ratios, key=lambda name: ratios[name])
        ratios = {f"best, {row}": ratios[row]}
    elif asked.of != "every":
        mean = Amount(*map(statistics.fmean, zip(*ratios.values(), strict=True)))
        ratios = {f"mean of {len(ratios)}": mean}
    region = Region(low=asked.value) if check.at_most is None else Region(high=asked.value)
    for place, amount in ratios.items():
        yield Finding(f"{prefix}{place}", region.decide(*amount[1:]), Effect("number", *amount, region, unit))


def _compared(asked: SpeedCompared, grid: SpeedGrid, value: Amount) -> Amount:
    """The value compared with the bound, from a speedup or a number in SI units."""
    if asked.compare == "amount":
        return value.times(1 / FACTORS[grid.unit])
    return value.inverse if asked.compare == "cost" else value


def _ratios(table: SpeedTable, numbers: SpeedNumbers, gpu: str = "") -> Ratio:
    """Ratios of our numbers, or of the paper's on a GPU, where a printed ratio has priority over two numbers."""

    def ratio(grid: str, row: str, column: str, over: str | None) -> Amount | None:
        number = numbers[grid, row, column]
        value = _amount(number, gpu)
        if over is None:
            return value
        printed = number.paper(gpu) if gpu else None
        own = table.grid(grid).over(table.grid(grid).column(column))
        if printed is not None and printed.ratio is not None and own == over:
            return Amount(*[printed.ratio] * 3)
        base = _amount(numbers[grid, row, over], gpu)
        return base.over(value) if value is not None and value.value and base is not None else None

    return ratio


def _amount(number: SpeedNumber, gpu: str) -> Amount | None:
    """Our measurement or, for a GPU, the paper's number, in SI units."""
    if not gpu:
        ours = number.ours
        if ours is None:
            return None
        known = (ours.low, ours.high)
        return Amount(ours.value, *(ours.value if one is None else one for one in known))
    paper = number.paper(gpu)
    return None if paper is None or paper.value is None else Amount(*[paper.value] * 3)
