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
from reproduction.words.numbers import show_ratio

#: With more rows than these a summary is shown.
_ROWS = 6


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
        of_memory = all(grid.of_memory for grid in grids)
        for about, check in claim.checks.items():
            papers = [judge(claim, check, table, _ratios(table, numbers, gpu), gpu) for gpu in table.gpus]
            together = Verdict(
                tuple(finding for verdict in papers for finding in verdict.findings),
                tuple(place for verdict in papers for place in verdict.missing),
            )
            ours = judge(claim, check, table, _ratios(table, numbers))
            yield about, Answer(ours, together, about == "mechanism" or own or of_memory)

    return decided(table.claims, answers)


def _is_of(gpu: str, device: str) -> bool:
    """Whether a device is the paper's: "NVIDIA GeForce RTX 3090" has all words of "NVIDIA RTX 3090"."""
    return all(word in device.casefold() for word in re.split(r"[ -]+", gpu.casefold()))


def judge(claim: SpeedClaim, check: SpeedCheck, table: SpeedTable, ratio: Ratio, gpu: str = "") -> Verdict:
    """Decide a check of a claim by one set of ratios; `gpu` is named where it is not ours."""
    results = [
        result
        for grid in table.grids
        if matches(grid.name, claim.grid)
        for column in check.asked.columns
        for result in _findings(claim, check, grid, column, ratio, _prefix(table, grid, gpu))
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
        places = {row: f"{prefix}{row}, {compared}" for row in broken}
        yield from (Finding(place, f"{known[row].value}, not finite", "not checkable") for row, place in places.items())
        return
    prefix += f"{column}, " if len(asked.columns) > 1 else ""
    ratios = {row: _compared(asked, grid, value) for row, value in known.items()}
    if not isinstance(asked, SpeedBound):
        for (before, less), (after, more) in itertools.pairwise(ratios.items()):
            apart = (more.value - less.value, more.low - less.high, more.high - less.low)
            pair = (show_ratio(more.value), show_ratio(less.value))
            effect = Effect("by", *apart, ABOVE_ZERO, pair=pair, sign=">")
            place = f"{prefix}{after} after {before}"
            yield Finding(place, effect.compared, ABOVE_ZERO.decide(*apart[1:]), effect=effect)
    elif asked.of == "every":
        yield from _every(asked, prefix, ratios, upper=check.at_most is not None)
    else:
        row = max(ratios, key=lambda name: ratios[name])
        best = (f"best, {row}", ratios[row])
        mean = (f"mean of {len(ratios)}", Amount(*map(statistics.fmean, zip(*ratios.values(), strict=True))))
        place, amount = best if asked.of == "best" else mean
        yield _bounded(asked, f"{prefix}{place}", amount, upper=check.at_most is not None)


def _compared(asked: SpeedCompared, grid: SpeedGrid, value: Amount) -> Amount:
    """The value compared with the bound, from a speedup or a number in SI units."""
    if asked.compare == "amount":
        return value.times(1 / FACTORS[grid.unit])
    return value.inverse if asked.compare == "cost" else value


def _every(asked: SpeedBound, prefix: str, ratios: dict[str, Amount], *, upper: bool) -> Iterator[Finding]:
    """A finding per row; of many rows only the worst, which decides, with the range of all."""
    found = {row: _bounded(asked, f"{prefix}{row}", value, upper=upper) for row, value in ratios.items()}
    if len(found) <= _ROWS:
        yield from found.values()
        return
    worst = (max if upper else min)(ratios, key=lambda row: ratios[row].value)
    decisions = [finding.decision for finding in found.values()]
    others = "".join(f", {decisions.count(word)} {word}" for word in ("contradicted", "undecided") if word in decisions)
    values = [amount.value for amount in ratios.values()]
    numbers = f"{found[worst].numbers}; all {show_ratio(min(values))} to {show_ratio(max(values))}{others}"
    decision = Verdict(tuple(found.values())).decision
    yield Finding(f"{prefix}worst of {len(found)}, {worst}", numbers, decision, effect=found[worst].effect)


def _bounded(asked: SpeedBound, place: str, amount: Amount, *, upper: bool) -> Finding:
    region = Region(high=asked.value) if upper else Region(low=asked.value)
    spread = f" [{show_ratio(amount.low)}, {show_ratio(amount.high)}]" if amount.low < amount.high else ""
    numbers = f"{show_ratio(amount.value)}{spread} {'≤' if upper else '≥'} {asked.value:g}"
    effect = Effect("it is", *amount, region)
    return Finding(place, numbers, region.decide(amount.low, amount.high), effect=effect)


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


def _prefix(table: SpeedTable, grid: SpeedGrid, gpu: str) -> str:
    parts = [grid.name] if len(table.grids) > 1 else []
    parts += [gpu] if gpu and len(table.gpus) > 1 else []
    return "".join(f"{part}, " for part in parts)
