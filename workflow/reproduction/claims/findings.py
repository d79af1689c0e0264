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

Decision = Literal["holds", "contradicted", "no effect", "undecided", "not checkable"]

#: Decisions against a claim.
AGAINST: tuple[Decision, ...] = ("contradicted", "no effect")


@dataclass(frozen=True)
class Effect:
    """The effect of a comparison, as data; `render.pages.comparisons` prints it.

    kind: the gain of a row over another, its loss on one, a single number, by how much one effect exceeds another
    (apart), or a ratio. low, high: the ends of its interval, both the effect itself without noise; seeds, items: what
    the interval is over. unit: that of the effect.
    compared: the compared numbers, empty for a single one; of: what they are, where they are no numbers of a table.
    """

    kind: Literal["gain", "loss", "number", "apart", "ratio"]
    size: float
    low: float
    high: float
    region: "Region"
    unit: str = ""
    compared: tuple[float, ...] = ()
    of: Literal["", "gain", "loss", "difference", "deviation"] = ""
    seeds: int = 0
    items: int = 0

    @property
    def is_none(self) -> bool:
        """Whether it counts as none."""
        return self.region.is_none(self.low, self.high)

    @property
    def margin(self) -> float:
        """Distance of the effect inside the region; negative outside, inf for no number."""
        margin = min(self.size - self.region.low, self.region.high - self.size)
        return math.inf if math.isnan(margin) else margin


@dataclass(frozen=True)
class Finding:
    """One comparison of a claim: its place, its effect, and its own decision.

    effect: None where nothing can be compared. reason: why not; for an undecided one, what would decide it.
    compares: whether it compares two networks, and not one with itself under two names.
    chance: for one that is contradicted or without an effect, the probability of an effect this far from the border if
    the truth is on it; 1 for others, None where nothing is random.
    device: that of a paper's number, where the paper names several.
    """

    place: str
    decision: Decision
    effect: Effect | None = None
    reason: str = ""
    compares: bool = True
    chance: float | None = None
    device: str = ""


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
            told[at] = replace(found[at], decision="undecided", reason=f"too near the bound for one of {len(ranked)}")
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
