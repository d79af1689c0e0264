"""The values of a table of runs: all our numbers, seed by seed, and the paper's.

Pages, figures, claims and MLflow read them from `Values`, which holds the same numbers by place. A number that no run
file holds is never printed: collecting fails instead.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from reproduction.frame.lines import COMPUTED, PUBLISHED, to_frame
from reproduction.identity.run import same_tasks
from reproduction.run.results import RunResult, read_result
from reproduction.run.samples import flipped, observations
from reproduction.tables.project import Cell, Project
from reproduction.tables.quantities import ANSWER_FLIPS, Quantity, quantities
from reproduction.tables.tables import RunTable
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import TASKS
from rotquant.foundation.errors import ResultError

Place = tuple[str, str, str]
"""Row, column and quantity."""

#: Columns of the frame. A line is one of our seeds, or (`origin` published) a number that only the paper has.
#: Non-numeric results are in `text` and `published_text`.
NAMES = (
    *("row", "column", "quantity", "seed", "value", "mean", "deviation", "standard_error"),
    *("published", "published_deviation", "origin", "run", "text", "published_text"),
)

#: Marks an empty text in a file, where an empty field means no text; measured texts have no spaces.
EMPTY = "no text"


@dataclass(frozen=True)
class Number:
    """A mean, its deviation over seeds (None for a single value), and for ours each seed's value and run key.

    standard_error: of the mean over windows or items; None where the runs store none (`study.samples`).
    """

    mean: float
    deviation: float | None = None
    values: tuple[float, ...] = ()
    seeds: tuple[int, ...] = field(default=(), compare=False)
    runs: tuple[str, ...] = field(default=(), compare=False)
    standard_error: float | None = field(default=None, compare=False)

    @classmethod
    def of_seeds(
        cls,
        values: tuple[float, ...],
        seeds: tuple[int, ...],
        runs: tuple[str, ...],
        standard_error: float | None = None,
    ) -> "Number":
        """Mean and sample standard deviation over the seeds; inf or nan when a value is."""
        deviation = None
        if len(values) > 1:
            deviation = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
        return cls(sum(values) / len(values), deviation, values, seeds, runs, standard_error)


@dataclass(frozen=True)
class Text:
    """Non-numeric results of the seeds, and the seeds' run keys."""

    values: tuple[str, ...]
    seeds: tuple[int, ...] = field(default=(), compare=False)
    runs: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Values(Mapping[Place, Number]):
    """A table's numbers by place: ours by indexing, and the paper's.

    texts, published_texts: shown but not compared.
    """

    ours: Mapping[Place, Number]
    published: Mapping[Place, Number]
    texts: Mapping[Place, Text] = field(default_factory=dict)
    published_texts: Mapping[Place, str] = field(default_factory=dict)

    def __getitem__(self, place: Place) -> Number:
        return self.ours[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self.ours)

    def __len__(self) -> int:
        return len(self.ours)

    @property
    def frame(self) -> pd.DataFrame:
        """Every number as a line of `NAMES`: ours seed by seed, then those only the paper has."""
        lines = []
        for place, number in self.ours.items():
            paper = self.published.get(place)
            beside = (number.mean, number.deviation, number.standard_error)
            beside = (*beside, paper and paper.mean, paper and paper.deviation, COMPUTED)
            for seed, value, run in zip(number.seeds, number.values, number.runs, strict=True):
                lines.append((*place, seed, value, *beside, run, None, None))
        for place, paper in self.published.items():
            if place not in self.ours:
                alone = (None, None, None, None, None, paper.mean, paper.deviation, PUBLISHED)
                lines.append((*place, *alone, None, None, None))
        return to_frame([*lines, *self._lines_of_texts()], NAMES)

    def _lines_of_texts(self) -> Iterator[tuple[Any, ...]]:
        """Non-numeric results as lines of the frame."""
        for place, ours in self.texts.items():
            for seed, text, run in zip(ours.seeds, ours.values, ours.runs, strict=True):
                yield (*place, seed, *[None] * 6, COMPUTED, run, text or EMPTY, self.published_texts.get(place))
        for place, text in self.published_texts.items():
            if place not in self.texts:
                yield (*place, *[None] * 7, PUBLISHED, None, None, text)


def collect(project: Project, table: RunTable) -> tuple[Values, dict[str, RunResult]]:
    """Collect a table's numbers, and their run results by key.

    Raises:
        ResultError: no column is computed, a run is not computed yet, or its file is damaged.
    """
    if not project.columns(table):
        slots = ", ".join(dict.fromkeys(column.slot for column in table.columns))
        raise ResultError(f"table {table.id} has no column to compute: its slots ({slots}) have `compute: false`.")
    results = _results_of(project, table)
    texts: dict[Place, Text] = {}
    for cell in project.cells(table.id):
        seeds, keys = tuple(run.seed for run in cell.runs), tuple(run.key for run in cell.runs)
        for quantity in (one for one in cell.quantities if one.text):
            found = tuple(results[key].texts[quantity.key] for key in keys)
            texts[cell.row, cell.column, quantity.name] = Text(found, seeds, keys)
    ours = numbers_of(project.cells(table.id), results, unquantized(project, results))
    return Values(ours, printed(project, table), texts, printed_texts(project, table)), results


def numbers_of(
    cells: Iterable[Cell], results: Mapping[str, RunResult], floats: Mapping[str, RunResult] | None = None
) -> dict[Place, Number]:
    """Numbers of cells, from the results of all their runs by key.

    Endpoints that a file lacks are left out.

    Args:
        floats: for runs of tasks, the results of the unquantized network by the runs' keys.
    """
    found = {}
    for cell in cells:
        seeds, keys = tuple(run.seed for run in cell.runs), tuple(run.key for run in cell.runs)
        for quantity in (one for one in (*cell.quantities, *cell.endpoints) if not one.text):
            numbers = tuple(number_of(results[key], quantity, floats) for key in keys)
            known = tuple(number for number in numbers if number is not None)
            if len(known) < len(keys) and quantity in cell.endpoints:
                continue
            error = standard_error([observed(results[key], quantity.key) for key in keys])
            found[cell.row, cell.column, quantity.name] = Number.of_seeds(known, seeds, keys, error)
    return found


def number_of(result: RunResult, quantity: Quantity, floats: Mapping[str, RunResult] | None = None) -> float | None:
    """A run's number; None for an endpoint that its file lacks, or without the unquantized run."""
    if quantity.key == ANSWER_FLIPS.name:
        plain = (floats or {}).get(result.run.key)
        return None if plain is None else flipped(result.run.metric, result.samples, plain.samples)
    return result.metrics.get(quantity.key)


def unquantized(project: Project, results: Mapping[str, RunResult]) -> dict[str, RunResult]:
    """Results of the unquantized network on the same items as each run of tasks, where the file exists."""
    found: dict[str, RunResult] = {}
    read: dict[str, RunResult | None] = dict(results)
    for key, result in results.items():
        if result.run.metric.kind == "zero_shot":
            plain = result.run.unquantized.key
            if plain not in read:
                with suppress(ResultError):
                    read[plain] = read_result(project.results.run(plain))
            other = read.setdefault(plain, None)
            if other is not None and same_tasks(result.provenance.get("tasks"), other.provenance.get("tasks")):
                found[key] = other
    return found


def observed(result: RunResult, quantity: str) -> NDArray[np.float64] | None:
    """A run's quantity window by window or item by item (`study.samples.observations`)."""
    return observations(result.run.metric, quantity, result.metrics, result.samples)


def standard_error(seeds: Sequence[NDArray[np.float64] | None]) -> float | None:
    """Standard error, over windows or items, of a mean over seeds (float64 [n] for each seed).

    None unless every seed has the same number of them, at least two.
    """
    known = [one for one in seeds if one is not None]
    if len(known) < len(seeds) or len({one.shape for one in known}) != 1 or len(known[0]) < 2:
        return None
    mean = np.mean(known, axis=0)
    return float(mean.std(ddof=1) / math.sqrt(len(mean)))


def printed(project: Project, table: RunTable) -> dict[Place, Number]:
    """The paper's numbers in a table, with their deviations."""
    numbers = project.published(table).items()
    return {place: Number(one.value, one.deviation) for place, one in numbers if one.value is not None}


def printed_texts(project: Project, table: RunTable) -> dict[Place, str]:
    """The paper's non-numeric entries in a table."""
    return {place: one.text for place, one in project.published(table).items() if one.text is not None}


def _results_of(project: Project, table: RunTable) -> dict[str, RunResult]:
    """The results of all runs of a table, by key.

    Raises:
        ResultError: one is missing or damaged.
    """
    keys = dict.fromkeys(run.key for cell in project.cells(table.id) for run in cell.runs)
    paths = {key: project.results.run(key) for key in keys}
    missing = [path for path in paths.values() if not path.exists()]
    if missing:
        raise ResultError(
            f"{len(missing)} of {len(keys)} runs of {table.id} are not computed, such as {missing[0].name}; "
            f"`snakemake --cores all reports/{table.id}.md` computes them, with --configfile where --config is given."
        )
    return {key: read_result(path) for key, path in paths.items()}


def known_quantities(project: Project, table: RunTable, values: Values) -> dict[str, Quantity]:
    """Quantities by name: those the table measures, and those the paper prints there if its tasks differ from ours."""
    both = (*printed_accuracies(values), *project.quantities(table), *project.endpoints(table))
    return {quantity.name: quantity for quantity in both}


def printed_accuracies(values: Values) -> tuple[Quantity, ...]:
    """The accuracies that the paper prints in a table: the average first, then its tasks."""
    printed = {name for _, _, name in values.published}
    tasks = tuple(name for name in TASKS["paper"] if name in printed)
    papers = quantities(ZeroShot(suite="paper", tasks=tasks))
    return tuple(quantity for quantity in papers if quantity.name in printed)


def main_quantities(project: Project, table: RunTable) -> tuple[Quantity, ...]:
    """Quantities that compare a table's rows: all except the accuracies of single tasks."""
    return tuple(quantity for quantity in project.quantities(table) if quantity.chance is None)


def loss_percent(quantity: Quantity, value: float | None, baseline: float | None) -> float | None:
    """Loss of a value against the baseline, in percent of the baseline.

    None without both, for a zero baseline, and for quantities not compared in percent, such as decibels.
    """
    if value is None or baseline is None or not quantity.relative:
        return None
    return percent_of(quantity.loss(value, baseline), baseline)


def percent_of(part: float | None, whole: float) -> float | None:
    """A part in percent; None without a part, or if the whole is zero."""
    return None if part is None or whole == 0 else 100.0 * part / whole
