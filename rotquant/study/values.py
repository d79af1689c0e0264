"""A table's numbers: collected from run files, averaged over seeds, beside the paper's, as CSV.

A number that no run file holds is never printed: collecting fails instead. Values of "-" mean that there is none.
"""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import write_text
from rotquant.metrics.zeroshot.suites import TASKS
from rotquant.recipes.schemes import ZeroShot
from rotquant.study.project import Project
from rotquant.study.quantities import Quantity, quantities
from rotquant.study.results import TABLES, RunResult, read_result, run_path
from rotquant.study.tables import Table

FIELDS = (
    *("row", "column", "quantity", "mean", "deviation", "values", "seeds", "published", "difference"),
    *("loss_percent", "published_loss_percent", "runs"),
)


@dataclass(frozen=True)
class Value:
    """One number of a cell: ours over the seeds, and the paper's (None where it prints none)."""

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    keys: tuple[str, ...]
    published: float | None

    @property
    def mean(self) -> float:
        """Mean over the seeds; inf or nan when a value is."""
        return sum(self.values) / len(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over the seeds; None for a single value."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) if all(map(math.isfinite, self.values)) else math.nan


Values = dict[tuple[str, str, str], Value]
"""A table's numbers by (row, column, quantity)."""


def table_path(name: str) -> Path:
    """The CSV of a table."""
    return TABLES / f"{name}.csv"


def collect(project: Project, table: Table) -> tuple[Values, dict[str, RunResult]]:
    """A table's numbers by (row, column, quantity), and the run results behind them by key.

    Raises:
        ResultError: no column is computed, a run is not computed yet, or its file is damaged.
    """
    if not project.columns(table):
        slots = ", ".join(dict.fromkeys(column.slot for column in table.columns))
        raise ResultError(f"table {table.id} has no column to compute: its slots ({slots}) have `compute: false`.")
    published = project.published(table)
    results: dict[str, RunResult] = {}
    values: Values = {}
    for cell in project.cells(table.id):
        for run in cell.runs:
            if run.key not in results:
                results[run.key] = read_result(project.root / run_path(run.key))
        seeds, keys = tuple(run.seed for run in cell.runs), tuple(run.key for run in cell.runs)
        for quantity in quantities(cell.metric):
            numbers = tuple(results[key].metrics[quantity.name] for key in keys)
            place = (cell.row, cell.column, quantity.name)
            values[place] = Value(numbers, seeds, keys, published.get(place))
    return values, results


def known_quantities(project: Project, table: Table) -> dict[str, Quantity]:
    """Quantities by name: what the table measures, and what the paper prints there if its tasks differ from ours."""
    both = (*printed_accuracies(project, table), *project.quantities(table))
    return {quantity.name: quantity for quantity in both}


def printed_accuracies(project: Project, table: Table) -> tuple[Quantity, ...]:
    """The accuracies that the paper prints in a table: the average first, then its tasks."""
    printed = {name for _, _, name in project.published(table)}
    tasks = tuple(name for name in TASKS["paper"] if name in printed)
    papers = quantities(ZeroShot(suite="paper", tasks=tasks))
    return tuple(quantity for quantity in papers if quantity.name in printed)


def main_quantities(project: Project, table: Table) -> tuple[Quantity, ...]:
    """What a table's rows are compared by: everything but the accuracies of single tasks."""
    return tuple(quantity for quantity in project.quantities(table) if quantity.chance is None)


def loss_percent(quantity: Quantity, value: float | None, baseline: float | None) -> float | None:
    """How much worse a value is than the baseline's, in percent of it.

    None without both, where the baseline is zero, and for quantities that are not compared so, such as decibels.
    """
    if value is None or baseline is None or not quantity.relative:
        return None
    return percent_of(quantity.loss(value, baseline), baseline)


def percent_of(part: float | None, whole: float) -> float | None:
    """A part in percent; None without one, and of nothing (an accuracy of zero)."""
    return None if part is None or whole == 0 else 100.0 * part / whole


def losses(
    values: Values, place: tuple[str, str], over: tuple[str, str], quantity: Quantity
) -> tuple[float | None, float | None]:
    """What the cell (row, column) `place` loses on the cell `over`, in percent: ours, the paper's."""
    value, reference = values[*place, quantity.name], values[*over, quantity.name]
    return (
        loss_percent(quantity, value.mean, reference.mean),
        loss_percent(quantity, value.published, reference.published),
    )


def write_csv(path: Path, project: Project, table: Table, values: Values) -> None:
    """Write a table's numbers, one line per number."""
    known = {quantity.name: quantity for quantity in project.quantities(table)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for (row, column, name), value in values.items():
        ours, papers = losses(values, (row, column), (table.baseline, column), known[name])
        difference = None if value.published is None else value.mean - value.published
        numbers = (value.mean, value.deviation, " ".join(map(repr, value.values)), " ".join(map(str, value.seeds)))
        comparison = (value.published, difference, ours, papers)
        cells = ("-" if number is None else number for number in (*numbers, *comparison))
        writer.writerow((row, column, name, *cells, " ".join(value.keys)))
    write_text(path, text.getvalue())


def read_csv(path: Path) -> Values:
    """Read a table written by `write_csv`.

    Raises:
        ResultError: it is missing or damaged.
    """
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return {(line["row"], line["column"], line["quantity"]): _value(line) for line in csv.DictReader(lines)}
    except FileNotFoundError:
        raise ResultError(f"table {path} does not exist.") from None
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise ResultError(f"table {path} is damaged ({error}); delete it and run again.") from None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], align: str) -> str:
    """A GitHub-flavoured table; `align` has one letter per column, l or r."""
    rule = [":--" if letter == "l" else "--:" for letter in align]
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows]]
    return "\n".join(lines) + "\n"


def _value(line: dict[str, str]) -> Value:
    return Value(
        tuple(float(number) for number in line["values"].split()),
        tuple(int(seed) for seed in line["seeds"].split()),
        tuple(line["runs"].split()),
        None if line["published"] == "-" else float(line["published"]),
    )
