"""Claims: statements of a paper about a table, decided by the table's numbers, ours and the paper's own.

Lower is better for every metric so far. A number that is nan (the network broke down) ranks as worst, like inf. Where
the paper prints no number the pair is left out and said so.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rotquant.reporting.tables import Values
from rotquant.tables import Claim, Table

Numbers = Mapping[tuple[str, str], tuple[float, float | None]]
"""(row, column) to (mean, deviation over the seeds)."""


@dataclass(frozen=True)
class Finding:
    """One comparison of a claim: where, with which numbers, and whether it holds."""

    column: str
    numbers: str
    holds: bool


@dataclass(frozen=True)
class Verdict:
    """A claim's outcome. `missing` names what could not be compared for want of a number."""

    findings: tuple[Finding, ...]
    missing: tuple[str, ...]

    @property
    def holds(self) -> bool | None:
        """Whether every comparison holds; None when there was nothing to compare."""
        return all(finding.holds for finding in self.findings) if self.findings else None


def judge(claim: Claim, table: Table, numbers: Numbers) -> Verdict:
    """Decide a claim by the given numbers."""
    ((kind, arguments),) = claim.check.items()
    columns = [column for column in table.columns if claim.columns is None or column in claim.columns]
    findings, missing = CHECKS[kind](numbers, columns, **arguments)
    return Verdict(tuple(findings), tuple(missing))


def ours(values: Values) -> Numbers:
    """Our numbers of a table, with their deviation over the seeds."""
    return {cell: (value.mean, value.deviation) for cell, value in values.items()}


def papers(values: Values) -> Numbers:
    """The paper's numbers of a table."""
    return {cell: (value.published, None) for cell, value in values.items() if value.published is not None}


def score(table: Table, values: Values) -> tuple[int, int]:
    """How many of a table's claims hold by our numbers, of how many that could be checked."""
    verdicts = [judge(claim, table, ours(values)).holds for claim in table.claims]
    return sum(verdict is True for verdict in verdicts), sum(verdict is not None for verdict in verdicts)


Outcome = tuple[list[Finding], list[str]]


def _less(numbers: Numbers, columns: Iterable[str], row: str, than: list[str], points: float = 0.0) -> Outcome:
    def compare(column: str, mine: float, other: float) -> Finding:
        margin = f" - {points:g}" if points else ""
        return Finding(column, f"{_show(mine)} < {_show(other)}{margin}", _rank(mine) < _rank(other) - points)

    return _pairs(numbers, columns, row, than, lambda column, mine, other: compare(column, mine[0], other[0]))


def _no_worse(
    numbers: Numbers, columns: Iterable[str], row: str, than: list[str], points: float = 0.0, deviations: float = 0.0
) -> Outcome:
    def compare(column: str, mine: tuple[float, float | None], other: tuple[float, float | None]) -> Finding:
        spread = math.hypot(mine[1] or 0.0, other[1] or 0.0)
        allowed = points + deviations * (spread if math.isfinite(spread) else 0.0)
        margin = f" + {allowed:.3f}" if allowed else ""
        text = f"{_show(mine[0])} <= {_show(other[0])}{margin}"
        return Finding(column, text, _rank(mine[0]) <= _rank(other[0]) + allowed)

    return _pairs(numbers, columns, row, than, compare)


def _increase_at_most(numbers: Numbers, columns: Iterable[str], row: str, over: str, percent: float) -> Outcome:
    def compare(column: str, mine: tuple[float, Any], base: tuple[float, Any]) -> Finding:
        rise = 100.0 * (mine[0] - base[0]) / base[0]
        return Finding(column, f"{_show(base[0])} to {_show(mine[0])}: {rise:+.1f} % <= {percent:g} %", rise <= percent)

    return _pairs(numbers, columns, row, [over], compare)


def _difference_at_most(numbers: Numbers, columns: Iterable[str], row: str, over: str, points: float) -> Outcome:
    def compare(column: str, mine: tuple[float, Any], base: tuple[float, Any]) -> Finding:
        rise = mine[0] - base[0]
        # The paper's numbers have two decimals: 6.10 - 5.47 must not exceed 0.63 by a rounding error.
        return Finding(column, f"{_show(mine[0])} - {_show(base[0])} = {rise:.2f} <= {points:g}", rise <= points + 1e-9)

    return _pairs(numbers, columns, row, [over], compare)


def _decreasing(numbers: Numbers, columns: Iterable[str], row: str, over: str) -> Outcome:
    findings, missing = [], []
    losses = []
    for column in columns:
        if (row, column) in numbers and (over, column) in numbers:
            losses.append((column, numbers[row, column][0] - numbers[over, column][0]))
        else:
            missing.append(column)
    for (_, larger), (column, smaller) in itertools.pairwise(losses):
        findings.append(Finding(column, f"{smaller:.2f} < {larger:.2f}", _rank(smaller) < _rank(larger)))
    return findings, missing


CHECKS: dict[str, Callable[..., Outcome]] = {
    "less": _less,
    "no_worse": _no_worse,
    "increase_at_most": _increase_at_most,
    "difference_at_most": _difference_at_most,
    "decreasing": _decreasing,
}


def _pairs(
    numbers: Numbers, columns: Iterable[str], row: str, others: list[str], compare: Callable[..., Finding]
) -> Outcome:
    """Compare a row with each other row in each column; what lacks a number is named."""
    findings, missing = [], []
    for column in columns:
        for other in others:
            absent = [name for name in (row, other) if (name, column) not in numbers]
            if absent:
                missing.append(f"{absent[0]}, {column}")
                continue
            finding = compare(column, numbers[row, column], numbers[other, column])
            where = column if len(others) == 1 else f"{column}, {other}"
            findings.append(Finding(where, finding.numbers, finding.holds))
    return findings, missing


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _show(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else str(value)
