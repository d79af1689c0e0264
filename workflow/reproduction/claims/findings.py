"""Single comparisons: the region that an effect must lie in, and the correction for their number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reproduction.claims.estimates import CONFIDENCE

#: Slack of every bound: printed numbers have two decimals, and 6.10 - 5.47 must not exceed 0.63 by a rounding error.
EPSILON = 1e-9

#: Largest probability that a claim of any number of comparisons is contradicted if the truth is on a border.
LEVEL = (1 - CONFIDENCE) / 2

#: The smallest difference that matters, as a share of the other row's KL divergence. Another CPU's arithmetic moves
#: perplexities by 0.3 % in the median (workflow/resources/machines.json), 3 % of the divergences of 4-bit models.
NO_DIFFERENCE = 0.05
NONE = f"a difference of less than {100 * NO_DIFFERENCE:g} % either way"

Decision = Literal["holds", "contradicted", "no effect", "undecided", "not checkable"]

#: Decisions against a claim.
AGAINST: tuple[Decision, ...] = ("contradicted", "no effect")


@dataclass(frozen=True)
class Effect:
    """The effect of a comparison.

    name: "a gain of". low, high: the ends of its interval, both the effect itself without noise. unit: that of the
    effect, where it is not the quantity's. pair: the compared numbers as printed, empty for a single one; sign: what
    stands between them, "<" or "to"; of: what they are, where they are effects themselves.
    """

    name: str
    size: float
    low: float
    high: float
    region: "Region"
    unit: str = ""
    pair: tuple[str, ...] = ()
    sign: str = ""
    of: str = ""

    @property
    def compared(self) -> str:
        """The compared numbers, such as "6.10 < 8.87"."""
        return f"{self.of}{f' {self.sign} '.join(self.pair)}{self.unit if self.of else ''}"

    @property
    def asked(self) -> str:
        """The bound in words, "at most 0.63"; "" where a sign or another number is asked."""
        low, high, single = self.region.low, self.region.high, self.name == "it is"
        if self.name not in (*("a gain of", "a loss of"), "it is"):
            return ""
        if math.isfinite(high) and low == -high and high:
            return f"within ±{high:g}{self.unit}"
        if math.isfinite(high) and (high or single):
            return f"at most {high:g}{self.unit}"
        least = "more than" if self.region.open else "at least"
        return f"{least} {low:g}{self.unit}" if math.isfinite(low) and (low or single) else ""

    @property
    def is_none(self) -> bool:
        """Whether it counts as none."""
        return self.region.is_none(self.low, self.high)

    @property
    def margin(self) -> float:
        """Distance of the effect inside the region; negative outside."""
        return min(self.size - self.region.low, self.region.high - self.size)

    @property
    def clearness(self) -> float:
        """Distance of the effect from the border in half widths of its interval; inf without noise."""
        half = (self.high - self.low) / 2
        return abs(self.margin) / half if half > 0 else math.inf


@dataclass(frozen=True)
class Finding:
    """One comparison of a claim: its place, its numbers, and its own decision.

    needed: for an undecided one, the seeds or items that would decide it.
    compares: whether it compares two networks, and not one with itself under two names.
    chance: for one that is contradicted or without an effect, the probability of an effect this far from the border if
    the truth is on it; 1 for others, None where nothing is random.
    effect: the same numbers in parts, where they are compared.
    """

    place: str
    numbers: str
    decision: Decision
    needed: str = ""
    compares: bool = True
    chance: float | None = None
    effect: Effect | None = None


def allowing_for_their_number(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings of one claim, which are against it only as far as their number allows (Holm 1979).

    Of n comparisons with noise the most improbable is against it where its chance is at most `LEVEL` / n, the next
    where its is at most `LEVEL` / (n - 1), and so on until one does not: that and the rest are undecided.
    """
    ranked = sorted(
        (at for at, one in enumerate(found) if one.chance is not None), key=lambda at: found[at].chance or 0.0
    )
    told, rejects = list(found), True
    for rank, at in enumerate(ranked):
        left = len(ranked) - rank
        rejects = rejects and (found[at].chance or 0.0) <= LEVEL / left
        if found[at].decision in AGAINST and not rejects:
            told[at] = replace(found[at], decision="undecided", needed=f"too near the bound for one of {len(ranked)}")
    return tuple(told)


@dataclass(frozen=True)
class Region:
    """Region of an allowed effect: from `low` to `high`, without an end that is `open`.

    matters: the smallest effect that matters, either way. An interval within it is no effect, whichever sign its ends
    have (two one-sided tests, Schuirmann 1987; Lakens 2017). A closed region contains such effects.
    """

    low: float = -math.inf
    high: float = math.inf
    open: bool = False
    matters: float = 0.0

    def decide(self, low: float, high: float) -> Literal["holds", "contradicted", "no effect", "undecided"]:
        """Decide an interval: it lies inside, outside, within what does not matter, or on a border; NaN outside."""
        first, last = self._ends
        if self.open and self.is_none(low, high):
            return "no effect"
        if first <= low and high <= last:
            return "holds"
        return "undecided" if high >= first and low <= last else "contradicted"

    def is_none(self, low: float, high: float) -> bool:
        """Whether an interval has no effect in it that matters."""
        return -self.matters < low and high < self.matters

    def border(self, effect: float) -> float:
        """The nearest end."""
        return min(self._ends, key=lambda end: abs(end - effect))

    @property
    def _ends(self) -> tuple[float, float]:
        slack = -EPSILON if self.open else max(EPSILON, self.matters)
        return self.low - slack, self.high + slack


ABOVE_ZERO = Region(low=0.0, open=True)
