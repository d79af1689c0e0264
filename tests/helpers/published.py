"""What is asked of every paper's tables as transcribed into CSV: complete, of one format, consistent, and as data."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from types import MappingProxyType

import pytest

from reproduction.claims.claims import outcomes
from reproduction.frame.values import Values, printed
from reproduction.tables.checks import Claim, named_by_experiment
from reproduction.tables.project import Project
from tests.helpers.project import REPOSITORY


def experiment_rows(claim: Claim) -> tuple[str, ...]:
    """The rows of the same page that are measured to find out why a claim is not reproduced."""
    if claim.experiment is None or claim.experiment.target is not None:
        return ()
    return tuple(name for kind, name in named_by_experiment(claim.experiment) if kind == "row")


COMMON = ["row", "column", "metric", "value", "unit"]

#: Where a number stands: (table, row).
Place = tuple[int, str]


@dataclass(frozen=True)
class Transcription:
    """A paper's published tables.

    tables: number of cells, columns in printed order, further columns of the file, by the table's number.
    units: of each quantity.
    """

    paper: str
    tables: Mapping[int, tuple[int, list[str], list[str]]]
    units: Mapping[str, str]

    @property
    def folder(self) -> Path:
        return REPOSITORY / "workflow" / "papers" / self.paper / "published"

    def read(self, table: int) -> list[dict[str, str]]:
        """The lines of a table."""
        with (self.folder / f"table{table}.csv").open(newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines, strict=True))

    def cells(self, table: int) -> dict[tuple[str, str, str], str]:
        """What is printed, by (row, column, quantity)."""
        return {(cell["row"], cell["column"], cell["metric"]): cell["value"] for cell in self.read(table)}

    def row(self, table: int, row: str) -> dict[tuple[str, str], str]:
        """What is printed in a row, by (column, quantity)."""
        return {(column, metric): value for (name, column, metric), value in self.cells(table).items() if name == row}

    def check_files(self) -> None:
        """There is one file per table."""
        assert {path.name for path in self.folder.glob("table*.csv")} == {f"table{n}.csv" for n in self.tables}

    def check_format(self, table: int) -> None:
        """A table has the documented columns and number of cells, each once and in its unit."""
        count, columns, further = self.tables[table]
        rows = self.read(table)
        assert list(rows[0]) == COMMON + further
        assert len(rows) == len(self.cells(table)) == count
        assert list(dict.fromkeys(cell["column"] for cell in rows)) == columns
        for cell in rows:
            assert None not in cell  # DictReader keeps surplus fields under None
            assert all(text and text == text.strip() for text in cell.values()), cell
            assert cell["unit"] == self.units[cell["metric"]]

    def check_averages(
        self, table: int, tasks: list[str], tolerance: float, known: Mapping[tuple[int, str, str], tuple[float, float]]
    ) -> None:
        """A printed average is the mean of the tasks, but for those `known` as (printed, mean)."""
        printed = self.cells(table)
        for row, column in {(row, column) for row, column, _ in printed}:
            numbers = [printed.get((row, column, task), "-") for task in tasks]
            if "-" in numbers:
                continue
            average, mean = float(printed[row, column, "average"]), sum(map(float, numbers)) / len(tasks)
            if (table, row, column) in known:
                # The mean of printed decimals may lie on a tie of three decimals.
                assert (average, mean) == pytest.approx(known[table, row, column], abs=6e-4)
            else:
                assert abs(average - mean) <= tolerance + 1e-9, (row, column, average, mean)

    def check_repeated(self, first: Place, second: Place, equal: Callable[[str, str], bool] = eq) -> None:
        """An experiment printed in two tables has one value, over all columns and quantities that both print."""
        one, other = self.row(*first), self.row(*second)
        assert one.keys() & other.keys()
        for place in one.keys() & other.keys():
            assert equal(one[place], other[place]), (place, one[place], other[place])

    def check_data(self, project: Project, table: int, ours: set[str], kinds: set[str]) -> None:
        """The table as data has the rows, columns and metrics printed; `ours` are rows that it may have besides."""
        data, printed = project.table(f"{self.paper}_table{table}"), self.read(table)
        assert {row.name for row in data.rows} - ours == {cell["row"] for cell in printed} - ours
        columns = list(dict.fromkeys(cell["column"] for cell in printed))
        assert [column.name for column in data.columns if column.name in columns] == columns
        assert all(column.published for column in data.columns if column.name not in columns)  # for comparison
        assert {metric["kind"] for metric in data.metrics} == kinds

    def check_claims(self, project: Project, table: int, otherwise: Mapping[str, str] = MappingProxyType({})) -> None:
        """A claim that the paper's table contradicts would be one that we misread, unless the paper is inconsistent or
        our text of it damaged: `otherwise` has its text and what the table says, and its note says why."""
        data = project.table(f"{self.paper}_table{table}")
        for outcome in outcomes(project, data, Values({}, printed(project, data)), {}):
            for place, answer in enumerate(outcome.answers.values()):
                expected = otherwise.get(outcome.claim.text, "holds") if place == 0 else "holds"
                assert answer.papers.decision == expected, (outcome.claim.text, answer.papers)
                assert outcome.claim.note or expected == "holds"
