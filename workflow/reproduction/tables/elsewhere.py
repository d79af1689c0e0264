"""Tables of numbers that somebody else measured, read from a CSV that names its origins, next to the paper's."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from reproduction.reading.written import Many, Written
from reproduction.tables.checks import Claim, Names, headline, named_by, quantities_in
from reproduction.tables.quantities import AVERAGE, PERPLEXITY, Quantity, quantities
from reproduction.tables.tables import OfPaper, Table, Titled, read_published
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.metrics.zeroshot.suites import TASKS
from rotquant.recipes.schemes import ZeroShot

#: Metrics that need no description.
KNOWN = {
    one.name: one for one in (PERPLEXITY, AVERAGE, *quantities(ZeroShot(suite="paper", tasks=tuple(TASKS["paper"]))))
}


class ElsewhereMetric(Written):
    """What the numbers of a metric are."""

    title: str
    """As a table's head prints it."""
    better: Literal["lower", "higher"]
    """Which numbers are better."""
    unit: str = ""
    """Printed where numbers are compared."""


class ElsewhereFields(Titled):
    """One table of numbers that somebody else measured."""

    numbers: str
    """CSV of the numbers, relative to this file: row, column, metric, value, and, where known, deviation and origin."""
    origin: Annotated[str, Field(min_length=1)]
    """Who measured them and where that stands; a line of the CSV may say another one."""
    metrics: dict[str, ElsewhereMetric] = Field(default_factory=dict)
    """What metrics are that have no name here, by their names in the CSV; perplexity and zero-shot tasks need none."""
    rows: Names | None = None
    """The rows in their order; default all, as they stand in the CSV."""
    columns: Names | None = None
    """The columns in their order; default all, as they stand in the CSV."""
    on_papers_models: bool = False
    """Whether they were measured on the paper's own models, so that claims about its setting are judged."""
    claims: Many[Claim] = ()
    """What the paper says about the numbers."""

    @model_validator(mode="after")
    def _tests_no_cause(self) -> Self:
        headline(self.claims)
        if any(claim.experiment for claim in self.claims):
            raise ValueError("claims: nothing is run for numbers from elsewhere, so that no experiment tests a cause")
        return self


class ElsewhereFile(OfPaper):
    """Numbers measured elsewhere are data: where they are from, what the paper prints next to them, and its claims."""

    tables: Annotated[Many[ElsewhereFields], Field(min_length=1)]
    """The tables."""


class ElsewhereTable(ElsewhereFields, Table):
    """A table of numbers from elsewhere, with all rows and columns named."""

    of: ClassVar[str] = "elsewhere"

    @property
    def column_names(self) -> tuple[str, ...]:
        """All columns."""
        return self.columns or ()

    def shows(self, place: tuple[str, str, str]) -> bool:
        """Whether a (row, column, metric) is in its rows and columns."""
        return place[0] in (self.rows or ()) and place[1] in (self.columns or ())

    def quantity(self, name: str) -> Quantity:
        """Quantity of a metric.

        Raises:
            ConfigError: neither the table nor this project knows it.
        """
        own = {one: Quantity(one, said.title, said.better, said.unit) for one, said in self.metrics.items()}
        return lookup(KNOWN | own, name, f"table {self.id}: unknown metric")


def completed(table: ElsewhereTable, root: Path) -> ElsewhereTable:
    """The table with all its rows and columns, after checking its claims."""
    read = read_published(table.numbers, root)
    printed = read_published(table.published, root) if table.published else {}
    rows, columns, metrics = (dict.fromkeys(place[part] for place in (*read, *printed)) for part in range(3))
    for known, names, what in ((rows, table.rows, "row"), (columns, table.columns, "column")):
        for name in names or ():
            lookup(known, name, f"{what}s: {table.numbers} has no {what}")
    for name in metrics:
        table.quantity(name)
    full = table.model_copy(update={"rows": table.rows or tuple(rows), "columns": table.columns or tuple(columns)})
    if not any(full.shows(place) and one.value is not None for place, one in read.items()):
        raise ConfigError(f"{table.numbers} has no number in these rows and columns.")
    for number, claim in enumerate(table.claims):
        for kind, name in named_by(claim):
            known = dict.fromkeys((full.rows if kind == "row" else full.columns) or ())
            lookup(known, name, f"claims.{number}: unknown {kind}")
        bounds = (bound for check in claim.checks.values() for bound in quantities_in(check))
        for name in (*bounds, *filter(None, [claim.quantity])):
            lookup(metrics, name, f"claims.{number}: unknown quantity")
    return full
