"""Effects over the width of models: by how much one row is above another on each, and a fitted line.

The line is a least-squares fit of the logarithms of the ratios over the logarithm of the width. Each model counts once,
so that the interval includes the variation between trainings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from reproduction.claims.effects import View
from reproduction.claims.estimates import CONFIDENCE, Interval
from reproduction.frame.values import Values, main_quantities
from reproduction.run.results import RunResult
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable, WidthEffect

Way = Literal["towards it", "away from it", "undecided"]


@dataclass(frozen=True)
class Line:
    """A line through logarithms of ratios over log2 of widths: its value at the least width, and its slope.

    low, high: the slope's 95 % interval.
    """

    start: float
    slope: float
    low: float
    high: float

    def at(self, doublings: float) -> float:
        """The logarithm of the ratio so many doublings above the least width."""
        return self.start + self.slope * doublings


@dataclass(frozen=True)
class Course:
    """An effect on models of several widths.

    rises: by column in percent. widths: by column. papers: the paper's, in percent. line: None for fewer than three
    widths, and where a number is not finite.
    """

    effect: WidthEffect
    rises: Mapping[str, Interval]
    widths: Mapping[str, int]
    papers: float
    line: Line | None

    @property
    def way(self) -> Way | None:
        """Whether wider models approach the paper's number; undecided where the slope's interval has zero."""
        if self.line is None:
            return None
        if self.line.low <= 0 <= self.line.high:
            return "undecided"
        target = math.log1p(self.papers / 100)
        doublings = math.log2(max(self.widths.values()) / min(self.widths.values()))
        nearer = abs(target - self.line.at(doublings)) < abs(target - self.line.start)
        return "towards it" if nearer else "away from it"


def courses(project: Project, table: RunTable, values: Values, results: Mapping[str, RunResult]) -> list[Course]:
    """The effects named by a table's figure, as far as their rows have numbers."""
    effects = table.figure.effects if table.figure else ()
    quantity = main_quantities(project, table)[0]
    found = []
    for effect in effects:
        view = View(quantity, project.columns(table), values.ours, results, (effect.row, effect.over))
        there = [column for column in view.columns if not view.lacking(column, effect.row, effect.over)]
        rises = {column: view.loss(effect.row, effect.over, column, percent=True).interval() for column in there}
        widths = {column: width_of(column) for column in there}
        ratios = {column: 1 + rise.effect / 100 for column, rise in rises.items()}
        line = line_through(widths, ratios)
        row, over = effect.published
        found.append(Course(effect, rises, widths, 100 * (row / over - 1), line))
    return found


def width_of(column: str) -> int:
    """The width at the start of a column's name, "256, seed 1"."""
    return int(column.split(",")[0])


def line_through(widths: Mapping[str, int], ratios: Mapping[str, float]) -> Line | None:
    """The least-squares line; None for fewer than three widths, and where a ratio has no logarithm."""
    if len(set(widths.values())) < 3 or not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values()):
        return None
    x = np.log2([widths[column] for column in ratios])
    y = np.log(list(ratios.values()))
    spread = x - x.mean()
    slope = float(spread @ y / (spread @ spread))
    rest = y - y.mean() - slope * spread
    error = math.sqrt(float(rest @ rest) / (len(x) - 2) / float(spread @ spread))
    half = float(stdtrit(len(x) - 2, (1 + CONFIDENCE) / 2)) * error
    start = float(y.mean() + slope * (x.min() - x.mean()))
    return Line(start, slope, slope - half, slope + half)
