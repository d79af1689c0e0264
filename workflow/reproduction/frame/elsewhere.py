"""The numbers of a table that somebody else measured, as they were printed, with the origin of each."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from reproduction.frame.lines import ELSEWHERE, PUBLISHED, to_frame
from reproduction.frame.values import Number, Place
from reproduction.tables.elsewhere import ElsewhereTable
from reproduction.tables.tables import published_lines

NAMES = (
    *("row", "column", "quantity", "value", "deviation", "published", "published_deviation"),
    *("origin", "note"),
)
"""Columns of the frame."""


@dataclass(frozen=True)
class Elsewhere:
    """A table's numbers, the paper's, and the origin of each of the first, by (row, column, metric)."""

    numbers: dict[Place, Number]
    published: dict[Place, Number]
    origins: dict[Place, str]

    @property
    def frame(self) -> pd.DataFrame:
        """Every number, with the paper's at the same place."""
        lines = []
        for place in dict.fromkeys([*self.numbers, *self.published]):
            both = (self.numbers.get(place), self.published.get(place))
            amounts = (amount for one in both for amount in ((one.mean, one.deviation) if one else (None, None)))
            origin = PUBLISHED if both[0] is None else ELSEWHERE
            lines.append((*place, *amounts, origin, self.origins.get(place)))
        return to_frame(lines, NAMES)


def collect(table: ElsewhereTable, root: Path) -> Elsewhere:
    """The numbers in a table's rows and columns.

    Raises:
        ConfigError: one of its files is missing or damaged.
    """
    numbers, published, origins = {}, {}, {}
    for file, found in ((table.numbers, numbers), (table.published, published)):
        for place, one, line in published_lines(file, root) if file else ():
            if one.value is not None and table.shows(place):
                found[place] = Number(one.value, one.deviation)
                if found is numbers:
                    origins[place] = line.get("origin", "").strip() or table.origin
    return Elsewhere(numbers, published, origins)
