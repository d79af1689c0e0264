"""Claims: statements of a paper about a table, decided by the table's numbers, ours and the paper's own.

Which of two numbers is better follows the quantity: lower for perplexity, higher for accuracy. What lacks a number,
because the paper prints none or because a column is not computed, is named and left out; a claim without anything to
compare has no verdict. Neither has one that would hold but for a number of ours that is not finite: what overflowed,
and whose fault it is, no claim says. An Inf or NaN that a paper prints is its word for a network that broke down, and
ranks worst.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rotquant.foundation.errors import lookup
from rotquant.study.project import Project
from rotquant.study.quantities import Quantity
from rotquant.study.speed.definitions import SpeedClaim
from rotquant.study.tables import Claim, Table
from rotquant.study.values import Number, Place, Values, known_quantities, percent_of

Numbers = Mapping[Place, Number]
"""Numbers by (row, column, quantity)."""

#: Slack of every bound: printed numbers have two decimals, and 6.10 - 5.47 must not exceed 0.63 by a rounding error.
EPSILON = 1e-9


@dataclass(frozen=True)
class Finding:
    """One comparison of a claim: where, with which numbers, and whether it holds; None for numbers that cannot say."""

    place: str
    numbers: str
    holds: bool | None


@dataclass(frozen=True)
class Verdict:
    """What one set of numbers says about a claim. `missing` names what could not be compared for want of a number."""

    findings: tuple[Finding, ...]
    missing: tuple[str, ...]

    @property
    def holds(self) -> bool | None:
        """Whether every comparison holds; None when none fails and not all can be decided, or there is nothing."""
        found = {finding.holds for finding in self.findings}
        return False if False in found else True if found == {True} else None


@dataclass(frozen=True)
class Outcome:
    """A claim with the verdict by our numbers and the verdict by the paper's own."""

    claim: Claim | SpeedClaim
    ours: Verdict
    papers: Verdict


@dataclass(frozen=True)
class Score:
    """How many claims hold, fail and are not checkable by our numbers."""

    holds: int
    fails: int
    unchecked: int

    @property
    def checked(self) -> int:
        """How many claims could be decided."""
        return self.holds + self.fails


def outcomes(project: Project, table: Table, values: Values) -> tuple[Outcome, ...]:
    """Every claim of a table, decided by our numbers and by all that the paper prints, column computed here or not.

    Without a column to compute nothing says what the claims are about, and none is decided.

    Raises:
        ConfigError: a claim about a quantity that is neither measured nor printed.
    """
    measured = project.quantities(table)
    if not measured:
        return ()
    known, main = known_quantities(project, table, values), measured[0]
    found = []
    for claim in table.claims:
        unknown = f"table {table.id}: a claim is about the unknown quantity"
        quantity = main if claim.quantity is None else lookup(known, claim.quantity, unknown)
        by_paper = judge(claim, table, values.published, quantity, printed=True)
        found.append(Outcome(claim, judge(claim, table, values.ours, quantity), by_paper))
    return tuple(found)


def score(decided: Sequence[Outcome]) -> Score:
    """Count the outcomes by our numbers."""
    verdicts = [outcome.ours.holds for outcome in decided]
    return Score(verdicts.count(True), verdicts.count(False), verdicts.count(None))


def judge(claim: Claim, table: Table, numbers: Numbers, quantity: Quantity, *, printed: bool = False) -> Verdict:
    """Decide a claim by the given numbers of one quantity, ours or (`printed`) the paper's."""
    ((kind, arguments),) = claim.check.items()
    columns = tuple(column.name for column in table.columns if claim.columns is None or column.name in claim.columns)
    chosen = {(row, column): number for (row, column, name), number in numbers.items() if name == quantity.name}
    view = View(quantity, columns, chosen, printed)
    results = list(CHECKS[kind](view, **arguments))
    findings = tuple(result for result in results if isinstance(result, Finding))
    return Verdict(findings, tuple(dict.fromkeys(result for result in results if isinstance(result, str))))


@dataclass(frozen=True)
class View:
    """What one claim is decided by: the numbers of one quantity, by (row, column), and the columns it is about."""

    quantity: Quantity
    columns: tuple[str, ...]
    numbers: Mapping[tuple[str, str], Number]
    printed: bool

    def cost(self, number: Number) -> float:
        """A mean such that less is better; infinite for a network that a paper says broke down."""
        value = number.mean
        return math.inf if not self.quantity.checkable(value) else value if self.quantity.better == "lower" else -value

    def loss(self, row: str, over: str, column: str, *, percent: bool) -> float:
        """How much worse a row is than another, in points or percent; inf if it broke down, nan if the other did."""
        value, reference = self.numbers[row, column].mean, self.numbers[over, column].mean
        if not self.quantity.checkable(reference):
            return math.nan
        if not self.quantity.checkable(value):
            return math.inf
        loss = self.quantity.loss(value, reference)
        share = percent_of(loss, reference) if percent else loss
        return math.nan if share is None else share

    def seeds(self, row: str, column: str) -> list[Number]:
        """Each seed's value of a place; none where there is no number, or no more than a mean."""
        return [Number(value) for value in self.numbers.get((row, column), Number(math.nan)).values]

    def deviation(self, row: str, column: str) -> float | None:
        """The deviation over the seeds of a place; None where there is none, or a seed's value is infinite."""
        found = self.numbers.get((row, column), Number(math.nan)).deviation
        return None if found is None or not math.isfinite(found) else found

    def lacking(self, column: str, *rows: str) -> "list[Finding | str]":
        """What keeps these places from being compared: those without a number, else those whose number is no result.

        Every check asks this before it compares.
        """
        absent: list[Finding | str] = [f"{row}, {column}" for row in rows if (row, column) not in self.numbers]
        return absent or [
            Finding(f"{row}, {column}", f"{_show(number.mean, 2)}, not finite", None)
            for row, number in ((row, self.numbers[row, column]) for row in rows)
            if not self.printed and not self.quantity.checkable(number.mean)
        ]

    def compared(self, mine: float, other: float, *, strict: bool, margin: float = 0.0) -> str:
        """Two numbers and the relation that is asked for, such as "6.10 < 8.87 + 1"; a negative margin narrows it."""
        lower = self.quantity.better == "lower"
        sign = ("<" if lower else ">") if strict else ("≤" if lower else "≥")
        shift = margin if lower else -margin
        text = f" {'+' if shift > 0 else '-'} {_digits(abs(shift))}" if shift else ""
        left, right = _apart(mine, other)
        return f"{left} {sign} {right}{text}"


Results = Iterator[Finding | str]
"""Findings, and the places that lack a number."""


def _better(view: View, row: str, than: list[str], points: float = 0.0) -> Results:
    for column, other in itertools.product(view.columns, than):
        if lacking := view.lacking(column, row, other):
            yield from lacking
            continue
        mine, theirs = view.numbers[row, column], view.numbers[other, column]
        text = view.compared(mine.mean, theirs.mean, strict=True, margin=-points)
        yield Finding(_place(column, than, other), text, view.cost(theirs) - view.cost(mine) > points + EPSILON)


def _no_worse(view: View, row: str, than: list[str], points: float = 0.0, deviations: float = 0.0) -> Results:
    for column, other in itertools.product(view.columns, than):
        if lacking := view.lacking(column, row, other):
            yield from lacking
            continue
        mine, theirs = view.numbers[row, column], view.numbers[other, column]
        spread = math.hypot(mine.deviation or 0.0, theirs.deviation or 0.0)
        margin = points + deviations * (spread if math.isfinite(spread) else 0.0)
        text = view.compared(mine.mean, theirs.mean, strict=False, margin=margin)
        yield Finding(_place(column, than, other), text, view.cost(mine) <= view.cost(theirs) + margin + EPSILON)


def _order(view: View, rows: list[str], points: float = 0.0, deviations: float = 0.0) -> Results:
    for row, after in itertools.pairwise(rows):
        for result in _no_worse(view, row, [after], points, deviations):
            named = isinstance(result, Finding)
            yield Finding(f"{result.place}, {row}", result.numbers, result.holds) if named else result


def _loss_at_most(view: View, row: str, over: str, **bound: float) -> Results:
    return _bounded(view, row, over, both_ways=False, **bound)


def _close(view: View, row: str, over: str, **bound: float) -> Results:
    return _bounded(view, row, over, both_ways=True, **bound)


def _bounded(
    view: View, row: str, over: str, *, both_ways: bool, percent: float | None = None, points: float | None = None
) -> Results:
    bound, unit = (cast(float, points), "") if percent is None else (percent, " %")
    limit = f"{'within ±' if both_ways else 'at most '}{bound:g}{unit}"
    for column in view.columns:
        if lacking := view.lacking(column, row, over):
            yield from lacking
            continue
        loss = view.loss(row, over, column, percent=percent is not None)
        before, after = _apart(view.numbers[over, column].mean, view.numbers[row, column].mean)
        text = f"{before} to {after}, a loss of {_show(loss, 2)}{unit}, {limit}"
        yield Finding(column, text, (abs(loss) if both_ways else loss) <= bound + EPSILON)


def _at_most(view: View, row: str, value: float) -> Results:
    for column in view.columns:
        if lacking := view.lacking(column, row):
            yield from lacking
            continue
        number = view.numbers[row, column]
        yield Finding(column, view.compared(number.mean, value, strict=False), view.cost(number) <= value + EPSILON)


def _loss_decreasing(view: View, row: str, over: str) -> Results:
    losses = []
    for column in view.columns:
        lacking = view.lacking(column, row, over)
        yield from lacking
        if not lacking:
            losses.append((column, view.loss(row, over, column, percent=False)))
    for (before, larger), (column, smaller) in itertools.pairwise(losses):
        left, right = _apart(smaller, larger)
        yield Finding(f"{column} after {before}", f"a loss of {left} < {right}", larger - smaller > EPSILON)


def _loss_larger(view: View, row: str, over: str, pairs: list[list[str]]) -> Results:
    for first, second in pairs:
        if lacking := [place for column in (first, second) for place in view.lacking(column, row, over)]:
            yield from lacking
            continue
        if all(view.numbers[name, first] == view.numbers[name, second] for name in (row, over)):
            yield f"a second model: {first} and {second} are computed on one"
            continue
        larger, smaller = (view.loss(row, over, column, percent=True) for column in (first, second))
        left, right = _apart(larger, smaller)
        yield Finding(f"{first} against {second}", f"a loss of {left} % > {right} %", larger - smaller > EPSILON)


def _gains_increasing(view: View, pairs: list[list[str]]) -> Results:
    """The gain of a pair is what its second row loses on its first; two broken second rows cannot be told apart."""
    for column in view.columns:
        gains: list[tuple[str, float]] = []
        for better, worse in pairs:
            lacking = view.lacking(column, better, worse)
            yield from lacking
            if not lacking:
                gains.append((f"{better} over {worse}", view.loss(worse, better, column, percent=True)))
        for (before, less), (after, more) in itertools.pairwise(gains):
            if less == more == math.inf:
                yield f"the larger gain of {before} and {after}, {column} (both broke down)"
                continue
            left, right = _apart(more, less)
            numbers = f"{after} gains {left} % > {right} % of {before}"
            yield Finding(column, numbers, more - less > EPSILON)


def _better_than_best(view: View, row: str, than: list[str]) -> Results:
    for column, other in itertools.product(view.columns, than):
        unknown = [] if view.seeds(other, column) else [f"{other}, {column}, by seed"]
        if lacking := view.lacking(column, row, other) or unknown:
            yield from lacking
            continue
        mine, best = view.numbers[row, column], min(view.seeds(other, column), key=view.cost)
        text = view.compared(mine.mean, best.mean, strict=True)
        yield Finding(_place(column, than, other), text, view.cost(best) - view.cost(mine) > EPSILON)


def _spread_smaller(view: View, row: str, than: list[str]) -> Results:
    for column, other in itertools.product(view.columns, than):
        unknown = [f"{name}, {column}, deviation" for name in (row, other) if view.deviation(name, column) is None]
        if lacking := view.lacking(column, row, other) or unknown:
            yield from lacking
            continue
        mine, theirs = cast("tuple[float, float]", (view.deviation(row, column), view.deviation(other, column)))
        left, right = _apart(mine, theirs)
        yield Finding(_place(column, than, other), f"a deviation of {left} < {right}", theirs - mine > EPSILON)


def _range_at_least(view: View, row: str, points: float) -> Results:
    for column in view.columns:
        values = [number.mean for number in view.seeds(row, column)]
        if lacking := view.lacking(column, row) or ([] if values else [f"{row}, {column}, by seed"]):
            yield from lacking
            continue
        low, high = min(values), max(values)
        text = f"{_show(low, 2)} to {_show(high, 2)} over {len(values)} seeds, {_show(high - low, 2)} ≥ {points:g}"
        yield Finding(column, text, math.isfinite(high - low) and high - low >= points - EPSILON)


def _best_column(view: View, row: str, column: str) -> Results:
    if lacking := view.lacking(column, row):
        yield from lacking
        return
    mine = view.numbers[row, column]
    for other in view.columns:
        if other == column:
            continue
        if lacking := view.lacking(other, row):
            yield from lacking
            continue
        theirs = view.numbers[row, other]
        text = view.compared(mine.mean, theirs.mean, strict=False)
        yield Finding(
            f"{column} against {other}", text, view.cost(mine) <= view.cost(theirs) and math.isfinite(mine.mean)
        )


CHECKS: dict[str, Callable[..., Results]] = {
    "better": _better,
    "no_worse": _no_worse,
    "order": _order,
    "loss_at_most": _loss_at_most,
    "close": _close,
    "at_most": _at_most,
    "loss_decreasing": _loss_decreasing,
    "loss_larger": _loss_larger,
    "gains_increasing": _gains_increasing,
    "better_than_best": _better_than_best,
    "spread_smaller": _spread_smaller,
    "range_at_least": _range_at_least,
    "best_column": _best_column,
}
"""Every kind of check of `study.checks`, which says what each asks."""


def _place(column: str, than: list[str], other: str) -> str:
    return column if len(than) == 1 else f"{column} against {other}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with two decimals, or four where they would look the same and are not."""
    texts = _show(one, 2), _show(other, 2)
    return texts if texts[0] != texts[1] or one == other else (_show(one, 4), _show(other, 4))


def _show(value: float, decimals: int) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf"
    return f"{value:.{decimals}f}" if abs(value) < 1e4 else f"{value:.2e}"
