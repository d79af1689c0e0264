"""Losses of a number against another, in percent of it: ours with its deviation over seeds, and the paper's."""

import math
from dataclasses import dataclass

from reproduction.frame.values import Values, loss_percent, percent_of
from reproduction.tables.quantities import Quantity


@dataclass(frozen=True)
class Change:
    """A loss in percent, negative for a gain; None without a number, inf or nan where a network broke down.

    spread: deviation of ours, 0 where there is none to draw.
    """

    ours: float | None
    papers: float | None
    spread: float

    @property
    def extent(self) -> list[float]:
        """All numbers that an axis must have room for: both numbers and the ends of the error bar."""
        ends = [] if self.ours is None else [self.ours - self.spread, self.ours + self.spread]
        return [*ends, *([] if self.papers is None else [self.papers])]


def change_between(values: Values, place: tuple[str, str], over: tuple[str, str], quantity: Quantity) -> Change:
    """Loss of the cell (row, column) `place` against the cell `over`; against itself, only the deviation matters."""
    mine, reference = (values.get((*cell, quantity.name)) for cell in (place, over))
    paper, papers_reference = (values.published.get((*cell, quantity.name)) for cell in (place, over))
    ours = loss_percent(quantity, mine and mine.mean, reference and reference.mean)
    papers = loss_percent(quantity, paper and paper.mean, papers_reference and papers_reference.mean)
    spread = percent_of(mine.deviation, reference.mean) if mine and reference else None
    drawn = spread if spread is not None and math.isfinite(spread) else 0.0
    return Change(ours, None if place == over else papers, drawn)
