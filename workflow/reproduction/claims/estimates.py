"""Estimates with their noise: arithmetic on numbers that are means over seeds, and over windows or items.

An estimate holds its observations by seed and item. Differences, ratios and magnitudes of estimates are taken
observation by observation (ratios to first order, the delta method). Anything that two networks share, the seed's
rotation and sample, a difficult window or item, cancels: the comparison is paired.

Source: Cornfield and Tukey 1956 (variance components of two crossed random factors), Cameron, Gelbach and Miller 2011
(two-way clustering: the sum of both variances less their common part), Graybill and Wang 1980 (interval of a sum of
components: the root of the sum of the squares of each one's), Miller 2024 (paired comparison on items).
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import fdtr, fdtri, stdtrit

Array = NDArray[np.float64]

CONFIDENCE = 0.95
_TAIL = (1 + CONFIDENCE) / 2
#: Smaller chances count as none.
_LEAST = 1e-12
#: Most seeds, and most times as many items, that anybody is told to compute.
MOST_SEEDS, MOST_ITEMS = 30, 100


class Components(NamedTuple):
    """The variances of single observations due to seeds, items and both together, float64 [...] each, at least 0."""

    seeds: Array
    items: Array
    both: Array


def components(observed: Array) -> Components:
    """The variance components of observations float64 [..., seeds, items], by the analysis of variance.

    The interaction of seeds and items needs two of each; without it a single factor has all the variance.
    """
    count, items = observed.shape[-2:]
    by_seed, by_item = observed.mean(axis=-1), observed.mean(axis=-2)
    of_seeds = by_seed.var(axis=-1, ddof=1) if count > 1 else np.zeros(observed.shape[:-2])
    of_items = by_item.var(axis=-1, ddof=1) if items > 1 else np.zeros(observed.shape[:-2])
    both = np.zeros(observed.shape[:-2])
    if count > 1 and items > 1:
        rest = observed - by_seed[..., :, None] - by_item[..., None, :] + observed.mean(axis=(-2, -1))[..., None, None]
        both = (rest**2).sum(axis=(-2, -1)) / ((count - 1) * (items - 1))
    return Components(np.maximum(of_seeds - both / items, 0), np.maximum(of_items - both / count, 0), both)


def half_width(
    known: Components, seeds: Array | np.float64, items: Array | np.float64, level: float = CONFIDENCE
) -> Array:
    """Half of the interval of a mean over so many seeds and items (float64 [...]).

    The variance of the mean is the sum of the components' shares, so that the interaction of seeds and items counts
    once: the variance of the seeds' means, and the items' addition to it. Each is multiplied by the square of Student's
    t for its own degrees of freedom. Where seeds' means vary no more than their items explain, seeds have no share; so
    the sum is never negative and never below the larger of both factors' own.
    """
    of_seeds, of_items, both = known.seeds / seeds, known.items / items, known.both / (seeds * items)
    few, many = np.maximum(seeds - 1, 1), np.maximum(items - 1, 1)
    tail = (1 + level) / 2
    together = stdtrit(np.where(of_seeds > 0, few, few * many), tail) ** 2 * (of_seeds + both)
    return np.sqrt(together + stdtrit(many, tail) ** 2 * of_items)


@dataclass(frozen=True)
class Interval:
    """An effect with its 95 % interval.

    seeds, items: their numbers; 0 where nothing is random, and for unknown items.
    half_width: of the interval for other numbers of seeds and of items (float64 [n] each) at the same noise.
    tail: one-sided probability of an effect at least this far beyond a bound if the truth is on the bound. Both are
    None without noise.
    """

    effect: float
    low: float
    high: float
    seeds: int = 0
    items: int = 0
    half_width: Callable[[Array, Array], Array] | None = None
    tail: Callable[[float], float] | None = None

    def to_decide(self, bound: float) -> tuple[int, int] | None:
        """Numbers of seeds and items that would leave a bound outside the interval.

        More seeds alone where `MOST_SEEDS` are enough, else `MOST_ITEMS` times as many items at most; else None.
        """
        if self.half_width is None:
            return None
        seeds, times = np.arange(2.0, MOST_SEEDS + 1), np.arange(1.0, MOST_ITEMS + 1)
        ways = [(seeds, np.full_like(seeds, self.items))] if self.seeds else []
        for way in (*ways, (np.full_like(times, self.seeds), times * self.items)):
            enough = self.half_width(*way) < abs(self.effect - bound)
            if enough.any():
                return int(way[0][enough.argmax()]), int(way[1][enough.argmax()])
        return None


@dataclass(frozen=True)
class Estimate:
    """A number as the mean of observations.

    observed: float64 [seeds, items]; one column where items are unknown or there are none.
    seeds: of the rows; empty for the single row of a number that is not random.
    source: origin of the items. Items of two sources are no pairs, however many they are; None pairs with any.
    """

    observed: Array
    seeds: tuple[int, ...] = ()
    source: Hashable = None

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        """A number without noise."""
        return cls(np.array([[value]]))

    @property
    def mean(self) -> float:
        """The number."""
        return float(self.observed.mean())

    @property
    def items(self) -> int:
        """The number of windows or items; 0 where they are unknown."""
        return 0 if self.observed.shape[1] == 1 else self.observed.shape[1]

    def __neg__(self) -> "Estimate":
        return replace(self, observed=-self.observed)

    def __abs__(self) -> "Estimate":
        """The magnitude, to first order."""
        return -self if self.mean < 0 else self

    def __sub__(self, other: "Estimate") -> "Estimate":
        if not math.isfinite(self.mean - other.mean):  # a paper's Inf, or infinite decibels
            return Estimate.exact(0.0 if self.mean == other.mean else self.mean - other.mean)
        mine, others, seeds = _paired(self, other)
        return Estimate(mine - others, seeds, _common(self, other))

    def times(self, factor: float) -> "Estimate":
        """The estimate times a number."""
        return replace(self, observed=factor * self.observed)

    def percent_of(self, whole: "Estimate") -> "Estimate":
        """The estimate in percent of another; nan if that is 0."""
        base = whole.mean
        if not base or not math.isfinite(self.mean / base):
            return Estimate.exact(math.nan if not base else 100 * self.mean / base)
        part, wholes, seeds = _paired(self, whole)
        ratio = self.mean / base
        return Estimate(100 * (ratio + (part - ratio * wholes) / base), seeds, _common(self, whole))

    @property
    def is_nothing(self) -> bool:
        """Whether every observation is zero: the difference of one network and itself."""
        return self.observed.size > 1 and not self.observed.any()

    def interval(self) -> Interval:
        """The 95 % interval of the mean, from Student's t.

        Of drawn tables of 3, 5 and 10 seeds, 93 to 98 % have the true effect in the interval, whatever the shares of
        seeds, items and their interaction; it is widest with the interaction alone. A bootstrap over so few seeds would
        be too narrow by a fifth.
        """
        count, items = self.observed.shape
        if count == items == 1:
            return Interval(self.mean, self.mean, self.mean, len(self.seeds))
        known, mean = components(self.observed), self.mean
        counts = np.float64(count), np.float64(items)
        half = float(half_width(known, *counts))

        def width(seeds: Array, items: Array) -> Array:
            return half_width(known, np.maximum(seeds, 1), np.maximum(items, 1))

        def tail(bound: float) -> float:
            return _tail(lambda level: float(half_width(known, *counts, level)), abs(mean - bound))

        return Interval(mean, mean - half, mean + half, len(self.seeds), self.items, width, tail)


def deviation_ratio(mine: Array, others: Array) -> Interval:
    """The ratio of two deviations over seeds, float64 [seeds] each, with its 95 % interval from the F distribution.

    nan where both are zero.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.divide(mine.std(ddof=1), others.std(ddof=1)))
    first, second = len(mine) - 1.0, len(others) - 1.0
    low, high = ratio / math.sqrt(fdtri(first, second, _TAIL)), ratio * math.sqrt(fdtri(second, first, _TAIL))

    def width(seeds: Array, items: Array) -> Array:
        factor = np.sqrt(fdtri(seeds - 1, seeds - 1, _TAIL))
        return ratio * (factor - 1) if ratio < 1 else ratio * (1 - 1 / factor)

    def tail(bound: float) -> float:
        below = float(fdtr(first, second, (ratio / bound) ** 2))
        return min(below, 1 - below)

    return Interval(ratio, low, high, min(len(mine), len(others)), 0, width, tail)


def _tail(half: Callable[[float], float], distance: float) -> float:
    """Half the probability outside the interval that just reaches this far; its half width grows with the level."""
    if half(0.5) == 0 or half(1 - _LEAST) < distance:
        return 0.0 if distance else 0.5
    level: Any = brentq(lambda level: half(level) - distance, 0.0, 1 - _LEAST)
    return (1 - float(level)) / 2


def _paired(one: Estimate, other: Estimate) -> tuple[Array, Array, tuple[int, ...]]:
    """The observations of two estimates on the seeds and items of both.

    A number that is not random is the same on every seed. If one has no items, the other's are not used. Items of
    different texts are no pairs: each estimate is constant on the other's, and is stretched on its own.
    """
    seeds = one.seeds or other.seeds
    if one.seeds and other.seeds:
        seeds = tuple(seed for seed in one.seeds if seed in other.seeds)
    mine, others = (_on(estimate, seeds) for estimate in (one, other))
    first, second = mine.shape[1], others.shape[1]
    same = None in (one.source, other.source) or one.source == other.source
    if first == second and (same or first == 1):
        return mine, others, seeds
    if min(first, second) == 1:
        both = [array.mean(axis=1, keepdims=True) for array in (mine, others)]
        return both[0], both[1], seeds
    return _stretched(mine, 0, second), _stretched(others, first, 0), seeds


def _common(one: Estimate, other: Estimate) -> Hashable:
    return other.source if one.source is None else one.source


def _on(estimate: Estimate, seeds: tuple[int, ...]) -> Array:
    rows = [estimate.seeds.index(seed) for seed in seeds] if estimate.seeds else [0] * max(1, len(seeds))
    return estimate.observed[rows]


def _stretched(observed: Array, before: int, after: int) -> Array:
    """Observations with others' items before and after their own, of the same mean and standard error."""
    mean, own = observed.mean(axis=1, keepdims=True), observed.shape[1]
    stretched = mean + (observed - mean) * (before + own + after) / own
    return np.hstack([np.repeat(mean, before, axis=1), stretched, np.repeat(mean, after, axis=1)])
