"""Estimates with their noise: arithmetic on numbers that are means over seeds, and over windows or items.

An estimate keeps what it is the mean of, seed by seed and item by item. Differences, ratios and magnitudes of estimates
are taken observation by observation (ratios to first order, the delta method), so that whatever two networks share, the
seed's rotation and sample, a difficult window or item, cancels: the comparison is paired.

Source: Cornfield and Tukey 1956 (means over two crossed factors), Owen 2007, "The pigeonhole bootstrap" (why the two
variances are added), Satterthwaite 1946 (degrees of freedom of such a sum), Miller 2024 (paired comparison on items).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri, stdtrit

Array = NDArray[np.float64]

CONFIDENCE = 0.95
_TAIL = (1 + CONFIDENCE) / 2
#: More seeds, or times more items, than these are not counted out.
MOST = 1000


@dataclass(frozen=True)
class Interval:
    """An effect with its 95 % interval.

    seeds, items: over how many it was taken; 0 where nothing is random, and for items that are not known.
    half_width: of the interval that other numbers of seeds and of items (float64 [n] each) give at the same noise.
    """

    effect: float
    low: float
    high: float
    seeds: int = 0
    items: int = 0
    half_width: Callable[[Array, Array], Array] | None = None

    def to_decide(self, bound: float) -> tuple[int, int] | None:
        """How many seeds and items would leave a bound outside the interval.

        More seeds alone where these are enough, else more items alone, else the same multiple of both; None where more
        than `MOST` seeds, or `MOST` times as many, would not do.
        """
        if self.half_width is None:
            return None
        times = np.arange(1.0, MOST + 1)
        seeds, items = np.full_like(times, self.seeds), np.full_like(times, self.items)
        ways = ((times + 1, items),) * (self.seeds > 0) + ((seeds, times * items), (times * seeds, times * items))
        for way in ways:
            enough = self.half_width(*way) < abs(self.effect - bound)
            if enough.any():
                return int(way[0][enough.argmax()]), int(way[1][enough.argmax()])
        return None


@dataclass(frozen=True)
class Estimate:
    """A number as the mean of observations.

    observed: float64 [seeds, items]; one column where items are not known or there are none.
    seeds: of the rows; empty for the single row of what is not random.
    """

    observed: Array
    seeds: tuple[int, ...] = ()

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
        """How many windows or items; 0 where they are not known."""
        return 0 if self.observed.shape[1] == 1 else self.observed.shape[1]

    def __neg__(self) -> "Estimate":
        return Estimate(-self.observed, self.seeds)

    def __abs__(self) -> "Estimate":
        """Its magnitude, to first order."""
        return -self if self.mean < 0 else self

    def __sub__(self, other: "Estimate") -> "Estimate":
        if not math.isfinite(self.mean - other.mean):  # of a paper's Inf, or of infinite decibels
            return Estimate.exact(0.0 if self.mean == other.mean else self.mean - other.mean)
        mine, others, seeds = _paired(self, other)
        return Estimate(mine - others, seeds)

    def percent_of(self, whole: "Estimate") -> "Estimate":
        """It in percent of another; nan of nothing."""
        base = whole.mean
        if not base or not math.isfinite(self.mean / base):
            return Estimate.exact(math.nan if not base else 100 * self.mean / base)
        part, wholes, seeds = _paired(self, whole)
        ratio = self.mean / base
        return Estimate(100 * (ratio + (part - ratio * wholes) / base), seeds)

    def interval(self) -> Interval:
        """Its 95 % interval, from Student's t.

        The squared standard error is that of the seeds' means plus that of the items' means. What seeds and items do
        together is in both, so that it errs on the wide side there. The degrees of freedom are few where seeds make
        most of the noise, and many where windows or items do. Of drawn tables of three seeds 93 to 95 % have the true
        effect in the interval, whatever the shares; a bootstrap over so few seeds would be too narrow by a fifth.
        """
        count, items = self.observed.shape
        by_seed, by_item = self.observed.mean(axis=1), self.observed.mean(axis=0)
        over_seeds = float(by_seed.var(ddof=1)) if count > 1 else 0.0
        over_items = float(by_item.var(ddof=1)) if items > 1 else 0.0
        if count == items == 1:
            return Interval(self.mean, self.mean, self.mean, len(self.seeds))

        def half_width(seeds: Array, items: Array) -> Array:
            parts = over_seeds / np.maximum(seeds, 1), over_items / np.maximum(items, 1)
            freedom = np.maximum(seeds - 1, 1), np.maximum(items - 1, 1)
            total = parts[0] + parts[1]
            inverse = parts[0] ** 2 / freedom[0] + parts[1] ** 2 / freedom[1]
            with np.errstate(divide="ignore", invalid="ignore"):
                width = np.sqrt(total) * stdtrit(total**2 / inverse, _TAIL)
            return np.where(total > 0, width, 0.0)

        half = float(half_width(np.array([float(count)]), np.array([float(items)]))[0])
        return Interval(self.mean, self.mean - half, self.mean + half, len(self.seeds), self.items, half_width)


def deviation_ratio(mine: Array, others: Array) -> Interval:
    """The ratio of two deviations over seeds, float64 [seeds] each, with its 95 % interval from the F distribution.

    nan where neither has any.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.divide(mine.std(ddof=1), others.std(ddof=1)))
    first, second = len(mine) - 1.0, len(others) - 1.0
    low, high = ratio / math.sqrt(fdtri(first, second, _TAIL)), ratio * math.sqrt(fdtri(second, first, _TAIL))

    def half_width(seeds: Array, items: Array) -> Array:
        factor = np.sqrt(fdtri(seeds - 1, seeds - 1, _TAIL))
        return ratio * (factor - 1) if ratio < 1 else ratio * (1 - 1 / factor)

    return Interval(ratio, low, high, min(len(mine), len(others)), 0, half_width)


def _paired(one: Estimate, other: Estimate) -> tuple[Array, Array, tuple[int, ...]]:
    """The observations of two estimates on the seeds and items of both.

    What is not random has the same numbers on every seed. Without the items of one the other's are of no use. Different
    numbers of items are of different texts: each estimate stands still on the other's, and is stretched on its own.
    """
    seeds = one.seeds or other.seeds
    if one.seeds and other.seeds:
        seeds = tuple(seed for seed in one.seeds if seed in other.seeds)
    mine, others = (_on(estimate, seeds) for estimate in (one, other))
    first, second = mine.shape[1], others.shape[1]
    if first == second:
        return mine, others, seeds
    if min(first, second) == 1:
        both = [array.mean(axis=1, keepdims=True) for array in (mine, others)]
        return both[0], both[1], seeds
    return _stretched(mine, 0, second), _stretched(others, first, 0), seeds


def _on(estimate: Estimate, seeds: tuple[int, ...]) -> Array:
    rows = [estimate.seeds.index(seed) for seed in seeds] if estimate.seeds else [0] * max(1, len(seeds))
    return estimate.observed[rows]


def _stretched(observed: Array, before: int, after: int) -> Array:
    """Observations with others' items before and after their own, of the same mean and standard error."""
    mean, own = observed.mean(axis=1, keepdims=True), observed.shape[1]
    stretched = mean + (observed - mean) * (before + own + after) / own
    return np.hstack([np.repeat(mean, before, axis=1), stretched, np.repeat(mean, after, axis=1)])
