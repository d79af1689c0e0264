"""The kinds of checks (`tables.checks`): each names its effects and the region that they must lie in.

The quantity says which of two numbers is better: lower for perplexity, higher for accuracy. A gain is by how much a row
is better than another, a loss by how much it is worse. Places without a number are named and left out.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from reproduction.claims.estimates import Array, Estimate, Interval, deviation_ratio
from reproduction.claims.findings import ABOVE_ZERO, AGAINST, NO_DIFFERENCE, Effect, Finding, Region
from reproduction.claims.guessing import knowing_nothing
from reproduction.claims.pairing import same_items, source
from reproduction.frame.values import Number, Place, observed
from reproduction.run.results import RunResult
from reproduction.tables.quantities import KL, OF_WINDOWS, PERPLEXITY, Quantity
from reproduction.words.numbers import show

Numbers = Mapping[Place, Number]
"""Numbers by (row, column, quantity)."""

Results = Iterator[Finding | str]
"""Findings, and the places that lack a number."""


_OTHER_ITEMS = "measured on different windows or items, so that they cannot be paired; compute them again together"
_ONE_RUN = "the same run, so that nothing is compared"
_SAME_NETWORK = "equal on all {}: one network under two names, so that nothing is compared"
_AT_CHANCE = "at chance: none is above {}, which knowing nothing scores"
_BROKEN = Estimate.exact(math.nan)


class View:
    """The data of one check: the numbers of one quantity, and its columns, none computed twice.

    results: the runs of our numbers; None for the paper's. rows: those of the check; columns with the same runs in all
    of them are one. direction: whether the check asks which of its rows is better or nearer. Rows that are all at
    chance cannot answer that; a bound on a difference or on one row they can miss.
    """

    def __init__(
        self,
        quantity: Quantity,
        columns: Sequence[str],
        numbers: Numbers,
        results: Mapping[str, RunResult] | None,
        rows: Sequence[str],
        *,
        direction: bool = False,
    ) -> None:
        self.quantity, self.results, self.direction, self._all = quantity, results, direction, numbers
        self.numbers = {(row, column): one for (row, column, name), one in numbers.items() if name == quantity.name}
        runs: dict[object, str] = {}
        for column in columns:
            same = tuple(self.numbers[row, column].runs for row in rows if (row, column) in self.numbers)
            runs.setdefault(same if any(same) else column, column)
        self.columns = tuple(runs.values())
        self._estimates: dict[tuple[str, str], Estimate] = {}

    @property
    def printed(self) -> bool:
        """Whether the numbers are the paper's."""
        return self.results is None

    def estimate(self, row: str, column: str) -> Estimate:
        """A number as an estimate; inf where a paper reports that the network broke down."""
        if (row, column) not in self._estimates:
            self._estimates[row, column] = self._estimate(self.numbers[row, column])
        return self._estimates[row, column]

    def _estimate(self, number: Number) -> Estimate:
        if not self.quantity.checkable(number.mean):
            return Estimate.exact(math.inf if self.quantity.better == "lower" else -math.inf)
        if self.results is None or not number.values or not math.isfinite(number.mean):
            return Estimate.exact(number.mean)
        return self._observed(self.quantity.key, number)

    def _observed(self, key: str, number: Number) -> Estimate:
        """Our number, by its key in result files, with the windows or items of its runs where they are known."""
        runs = [(self.results or {}).get(run) for run in number.runs]
        random = len(number.values) > 1 or any(run is not None and run.run.recipe.is_random for run in runs)
        items = [observed(run, key) for run in runs if run is not None]
        kept = [one for one in items if one is not None]
        alike = len(kept) == len(number.values) and len({len(one) for one in kept}) == 1
        rows = np.stack(kept) if alike else np.array(number.values)[:, None]
        first = next((run for run in runs if run is not None), None)
        return Estimate(rows, number.seeds if random else (), None if first is None else source(first))

    def beside(self, row: str, column: str, name: str) -> Estimate | None:
        """Another quantity of the same place; None where it is unknown or not a result."""
        number = self._all.get((row, column, name))
        if number is None or not math.isfinite(number.mean):
            return None
        return self._observed(name, number) if number.values and not self.printed else Estimate.exact(number.mean)

    def gain(self, row: str, over: str, column: str) -> Estimate:
        """Gain of a row over another, in the quantity's unit."""
        mine, other = self.estimate(row, column), self.estimate(over, column)
        return other - mine if self.quantity.better == "lower" else mine - other

    def loss(self, row: str, over: str, column: str, *, percent: bool) -> Estimate:
        """Loss of a row against another, in points or percent; inf if it broke down, nan if the other did.

        A quantity that is never compared in percent keeps its unit: nats of KL divergence correspond to percents of
        perplexity.
        """
        reference = self.estimate(over, column)
        if self.printed and not math.isfinite(reference.mean):
            return Estimate.exact(math.nan)
        loss = self.gain(over, row, column)
        percent = percent and self.quantity.decides is None
        return loss.percent_of(reference) if percent and math.isfinite(loss.mean) else loss

    @property
    def unit(self) -> str:
        """The unit of a difference of two numbers."""
        return "points" if self.quantity.unit == "%" else self.quantity.unit

    @property
    def percent(self) -> str:
        """The unit of losses in percent."""
        return "%" if self.quantity.decides is None else self.quantity.unit

    def values(self, row: str, column: str) -> Array:
        """Each seed's value of a place, float64 [seeds]; empty where there is no number, or only a mean."""
        number = self.numbers.get((row, column))
        return np.array(number.values if number else ())

    def lacking(self, column: str, *rows: str) -> "list[Finding | str]":
        """Obstacles to a comparison of these places: those without a number, else those whose number is no result.

        Every check calls this before it compares.
        """
        absent: list[Finding | str] = [f"{row}, {column}" for row in rows if (row, column) not in self.numbers]
        if absent:
            return absent
        found = {row: self.numbers[row, column] for row in rows}
        if others := self._on_other_items(found):
            return [Finding(f"{' and '.join(others)}, {column}", "not checkable", reason=_OTHER_ITEMS)]
        broken: list[Finding | str] = [
            Finding(f"{row}, {column}", "not checkable", reason=f"{show(number.mean)}, not finite")
            for row, number in found.items()
            if not self.printed and not self.quantity.checkable(number.mean)
        ]
        runs = [number.runs for number in found.values()]
        alike = " and ".join(row for row, number in found.items() if number.runs and runs.count(number.runs) > 1)
        if alike and not broken:
            return [Finding(f"{alike}, {column}", "not checkable", reason=_ONE_RUN, compares=False)]
        return broken or (self.at_chance(*((row, column) for row in rows)) if len(rows) > 1 else [])

    def at_chance(self, *places: tuple[str, str]) -> "list[Finding | str]":
        """Obstacles to a comparison of (row, column)s: none is known to score above knowing nothing."""
        scores = [self._score(*place) for place in places] if self.direction else []
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(scores) or any(score.low > guess for score, guess in known):
            return []
        rows, columns = (dict.fromkeys(names) for names in zip(*places, strict=True))
        shown = " and ".join(f"{show(score.effect)} [{show(score.low)}, {show(score.high)}]" for score, _ in known)
        least = show(max(guess for _, guess in known))
        where = f"{' and '.join(rows)}, {' and '.join(columns)}"
        return [Finding(where, "not checkable", reason=f"an accuracy of {shown}, {_AT_CHANCE.format(least)}")]

    def _score(self, row: str, column: str) -> tuple[Interval, float] | None:
        """The accuracy of a place and the score of knowing nothing there; None unless each of its runs has one."""
        number, known = self.numbers[row, column], self.results or {}
        runs = [known[key] for key in number.runs if key in known]
        found = knowing_nothing(runs[0].run.metric, self.quantity.key) if runs else None
        if found is None or len(runs) < len(number.runs):
            return None
        name, guess = found
        values = tuple(run.metrics[name] for run in runs)
        return self._observed(name, replace(number, mean=fmean(values), values=values)).interval(), guess

    def _on_other_items(self, found: Mapping[str, Number]) -> list[str]:
        """The rows with a run on other windows or items than the first row's first run."""
        known = self.results or {}
        runs = [(row, known[key]) for row, number in found.items() for key in number.runs if key in known]
        others = dict.fromkeys(row for row, run in runs[1:] if not same_items(runs[0][1], run))
        return list(dict.fromkeys((runs[0][0], *others))) if others else []

    def find(self, place: str, effect: Estimate, region: Region, **what: Any) -> Finding:
        """Decide one comparison; what: fields of its `Effect`."""
        if not self.printed and effect.is_nothing:
            reason = _SAME_NETWORK.format(items_of(self.quantity))
            return Finding(place, "not checkable", reason=reason, compares=False)
        return self.decide(place, effect.interval(), region, **what)

    def decide(self, place: str, found: Interval, region: Region, **what: Any) -> Finding:
        """Decide one comparison by an effect with its interval."""
        effect = Effect(size=found.effect, low=found.low, high=found.high, region=region, **what)
        if self.printed or (found.half_width is None and not found.seeds and not self.quantity.sampled):
            return Finding(place, region.decide(found.effect, found.effect), effect)
        if found.half_width is None and not found.seeds:
            return Finding(place, "not checkable", effect, "no run file holds its windows or items")
        effect = replace(effect, seeds=found.seeds, items=found.items)
        if found.seeds == 1:
            return Finding(place, "undecided", effect, "3 seeds could decide")
        decision = region.decide(found.low, found.high)
        reason = self._needed(found, region) if decision == "undecided" else ""
        borders = (-region.matters, region.matters) if decision == "no effect" else (region.border(found.effect),)
        tail = found.tail if decision in AGAINST else None
        return Finding(place, decision, effect, reason, chance=1.0 if tail is None else max(map(tail, borders)))

    def matters(self, other: str, column: str) -> float:
        """The smallest difference from a row that matters; 0 but for our KL divergences."""
        return (
            NO_DIFFERENCE * self.numbers[other, column].mean
            if self.quantity.key == KL.name and not self.printed
            else 0.0
        )

    def _needed(self, found: Interval, region: Region) -> str:
        counts = found.to_decide(region.border(found.effect))
        if counts is None:
            return "cannot be decided here"
        seeds = [f"{counts[0]:,} seeds"] * (counts[0] != found.seeds)
        items = [f"{counts[1]:,} {items_of(self.quantity)}"] * (counts[1] != found.items)
        return f"{' and '.join(seeds + items)} would decide"


def items_of(quantity: Quantity) -> str:
    """What a quantity is a mean over."""
    return "windows" if quantity.key in (PERPLEXITY.name, *(one.name for one in OF_WINDOWS)) else "items"


def _better(
    view: View, row: str = "", than: Sequence[str] = (), rows: Sequence[str] = (), points: float = 0.0
) -> Results:
    """Compare a row with others, or each of several rows with the next."""
    pairs = list(itertools.pairwise(rows)) or [(row, other) for other in than]
    for column, (first, other) in itertools.product(view.columns, pairs):
        lacking = view.lacking(column, first, other)
        yield from lacking
        if not lacking:
            place = f"{column}, {first} before {other}" if rows else _place(column, than, other)
            region = Region(low=points, open=True, matters=0.0 if points else view.matters(other, column))
            means = tuple(view.numbers[name, column].mean for name in (first, other))
            gain = view.gain(first, other, column)
            yield view.find(place, gain, region, kind="gain", unit=view.unit, compared=means)


def _bounded(
    view: View, row: str, than: Sequence[str], points: float = 0.0, percent: float | None = None, *, both_ways: bool
) -> Results:
    limit, unit = (points, view.unit) if percent is None else (percent, view.percent)
    for column, other in itertools.product(view.columns, than):
        lacking = view.lacking(column, row, other)
        yield from lacking
        if not lacking:
            means = tuple(view.numbers[name, column].mean for name in (other, row))
            matters = 0.0 if limit else view.matters(other, column)
            region = Region(-limit if both_ways else -math.inf, limit, matters=matters)
            loss = view.loss(row, other, column, percent=percent is not None)
            place = _place(column, than, other)
            yield view.find(place, loss, region, kind="loss", unit=unit, compared=means)


def _limited(view: View, row: str, at_most: float | str | None = None, at_least: float | str | None = None) -> Results:
    """Compare a row with a bound; a bound that is another quantity of the row has noise and is compared by seed."""
    upper = at_most is not None
    value = at_most if upper else at_least
    for column in view.columns:
        bound = view.beside(row, column, value) if isinstance(value, str) else Estimate.exact(value or 0.0)
        lacking = view.lacking(column, row) or ([f"{value} of {row}, {column}"] if bound is None else [])
        yield from lacking
        if lacking or bound is None:
            continue
        result = view.quantity.checkable(view.numbers[row, column].mean)
        mine = view.estimate(row, column) if result else _BROKEN
        if isinstance(value, str):
            region, means = Region(high=0.0) if upper else Region(low=0.0), (mine.mean, bound.mean)
            yield view.find(column, mine - bound, region, kind="apart", unit=view.unit, compared=means)
        else:
            region = Region(high=bound.mean) if upper else Region(low=bound.mean)
            yield view.find(column, mine, region, kind="number", unit=view.quantity.unit)


def _across(
    view: View, row: str, pairs: Sequence[Sequence[str]], over: str | None = None, *, percent: bool = True
) -> Results:
    """Compare a row's loss on `over`, or its own number, in one column with that in another."""
    rows = [row] if over is None else [row, over]
    for first, second in pairs:
        if not {first, second} <= set(view.columns):
            if set(view.columns) & {first, second} or over is not None:
                yield f"a second model: {first} and {second} are computed on one"
            continue
        lacking = [place for column in (first, second) for place in view.lacking(column, *rows)]
        lacking = lacking or (view.at_chance((row, first), (row, second)) if over is None else [])
        yield from lacking
        if lacking:
            continue
        place = f"{first} against {second}"
        if over is not None:
            larger, smaller = (view.loss(row, over, column, percent=percent) for column in (first, second))
            yield _larger(view, place, "loss", larger, smaller, view.percent if percent else view.unit)
        else:
            worse, better = view.estimate(row, first), view.estimate(row, second)
            lower = view.quantity.better == "lower"
            region = Region(low=0.0, matters=view.matters(row, first))
            gain, means = worse - better if lower else better - worse, (better.mean, worse.mean)
            yield view.find(f"{second} against {first}", gain, region, kind="gain", unit=view.unit, compared=means)


def _gains_increasing(view: View, pairs: Sequence[Sequence[str]]) -> Results:
    """Compare gains: a pair's gain is its second row's loss on its first; two broken second rows do not compare."""
    for column in view.columns:
        gains: list[tuple[str, Estimate]] = []
        for better, worse in pairs:
            lacking = view.lacking(column, better, worse)
            yield from lacking
            if not lacking:
                gains.append((f"{better} over {worse}", view.loss(worse, better, column, percent=True)))
        for (before, less), (after, more) in itertools.pairwise(gains):
            if less.mean == more.mean == math.inf:
                yield f"the larger gain of {before} and {after}, {column} (both broke down)"
            else:
                yield _larger(view, f"{column}, {after} against {before}", "gain", more, less, view.percent)


def _difference_smaller(view: View, of: Sequence[str], than: Sequence[str]) -> Results:
    """Compare magnitudes of differences to first order, with the sign of the mean even near 0."""
    for column in view.columns:
        lacking = view.lacking(column, *of, *than)
        for pair in () if lacking else (of, than):
            lacking += view.at_chance(*((row, column) for row in pair))
        yield from lacking
        if not lacking:
            near, far = (abs(view.loss(first, second, column, percent=True)) for first, second in (of, than))
            yield _larger(view, f"{column}, {' and '.join(than)}", "difference", far, near, view.percent)


def _larger(view: View, place: str, of: str, larger: Estimate, smaller: Estimate, unit: str) -> Finding:
    means = (larger.mean, smaller.mean)
    return view.find(place, larger - smaller, ABOVE_ZERO, kind="apart", unit=unit, compared=means, of=of)


def _spread_smaller(view: View, row: str, than: Sequence[str]) -> Results:
    for column, other in itertools.product(view.columns, than):
        found = [view.numbers.get((name, column), Number(math.nan)).deviation for name in (row, other)]
        both = zip((row, other), found, strict=True)
        unknown = [f"{name}, {column}, deviation" for name, one in both if one is None or not math.isfinite(one)]
        lacking = view.lacking(column, row, other) or unknown
        yield from lacking
        if lacking:
            continue
        mine, theirs = (one or 0.0 for one in found)
        if view.printed:
            ratio = Estimate.exact(mine / theirs if theirs else math.inf).interval()
        else:
            ratio = deviation_ratio(view.values(row, column), view.values(other, column))
        region, place = Region(high=1.0, open=True), _place(column, than, other)
        yield view.decide(place, ratio, region, kind="ratio", compared=(mine, theirs), of="deviation")


CHECKS: dict[str, Callable[..., Results]] = {
    "better": _better,
    "no_worse": partial(_bounded, both_ways=False),
    "close": partial(_bounded, both_ways=True),
    "value": _limited,
    "across": _across,
    "gains_increasing": _gains_increasing,
    "difference_smaller": _difference_smaller,
    "spread_smaller": _spread_smaller,
}
"""Every kind of check of `tables.checks`, which says what each asks."""


def _place(column: str, than: Sequence[str], other: str) -> str:
    return column if len(than) == 1 else f"{column} against {other}"
