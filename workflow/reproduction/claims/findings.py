"""What single comparisons say: the region that an effect must lie in, and what allows for how many there are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reproduction.claims.estimates import CONFIDENCE

#: Slack of every bound: printed numbers have two decimals, and 6.10 - 5.47 must not exceed 0.63 by a rounding error.
EPSILON = 1e-9

#: How probable a claim of one comparison or of many is contradicted at most where the truth lies on a border.
LEVEL = (1 - CONFIDENCE) / 2

Decision = Literal["holds", "contradicted", "undecided", "not checkable"]


@dataclass(frozen=True)
class Effect:
    """What a comparison compares, in the parts that a sentence about it is made of.

    compared: the numbers, such as "6.10 < 8.87". name: what the effect is, "a gain of". asked: the bound in words, "at
    most 0.63"; "" where a sign is asked. low, high: the ends of its interval, both the effect itself without noise.
    unit: that of the effect, where it is not the quantity's.
    """

    compared: str
    name: str
    asked: str
    size: float
    low: float
    high: float
    region: "Region"
    unit: str = ""

    @property
    def margin(self) -> float:
        """How far it lies inside the region; outside negative."""
        return min(self.size - self.region.low, self.region.high - self.size)

    @property
    def clearness(self) -> float:
        """How many half widths of its interval it is away from the border; inf without noise."""
        half = (self.high - self.low) / 2
        return abs(self.margin) / half if half > 0 else math.inf


@dataclass(frozen=True)
class Finding:
    """One comparison of a claim: where, with which numbers, and what it says by itself.

    needed: of an undecided one, what would decide it.
    compares: whether it compares two networks, and not one with itself under two names.
    chance: of a contradicted one how probable an effect this far outside is where the truth lies on the border; 1 of
    others, None where nothing is random.
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
    """Findings of one claim, contradicted only as far as their number allows (Holm 1979).

    Of n comparisons with noise the most improbable contradicts where its chance is at most `LEVEL` / n, the next where
    its is at most `LEVEL` / (n - 1), and so on until one does not: that and the rest are undecided.
    """
    ranked = sorted(
        (at for at, one in enumerate(found) if one.chance is not None), key=lambda at: found[at].chance or 0.0
    )
    told, rejects = list(found), True
    for rank, at in enumerate(ranked):
        left = len(ranked) - rank
        rejects = rejects and (found[at].chance or 0.0) <= LEVEL / left
        if found[at].decision == "contradicted" and not rejects:
            told[at] = replace(found[at], decision="undecided", needed=f"too near the bound for one of {len(ranked)}")
    return tuple(told)


@dataclass(frozen=True)
class Region:
    """Where an effect must lie: from `low` to `high`; without an end that is `open`."""

    low: float = -math.inf
    high: float = math.inf
    open: bool = False

    def decide(self, low: float, high: float) -> Literal["holds", "contradicted", "undecided"]:
        """What an interval says: it lies inside, outside or on a border. What is no number lies outside."""
        slack = -EPSILON if self.open else EPSILON
        if self.low - slack <= low and high <= self.high + slack:
            return "holds"
        inside = high >= self.low - slack and low <= self.high + slack
        return "undecided" if inside else "contradicted"

    def border(self, effect: float) -> float:
        """The nearest end."""
        return min((self.low, self.high), key=lambda end: abs(end - effect))


ABOVE_ZERO = Region(low=0.0, open=True)
