"""Elsewhere: a cell is a number that somebody else measured, read from a CSV that names the source; nothing is run.

It is shown next to the paper's number, as our own numbers are, and decides claims. Its windows and seeds are unknown,
so it is compared as printed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from reproduction.reading.written import Many, Written, read_csv
from reproduction.tables.checks import About, Claim, Names, headline, named_by, quantities_in
from reproduction.tables.quantities import AVERAGE, PERPLEXITY, Quantity, quantities
from reproduction.tables.source import Reached, Source
from reproduction.tables.tables import OfPaper, Table, Titled, read_published, tables_in
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.foundation.files import canonical_json, file_inside, short_hash
from rotquant.metrics.zeroshot.suites import TASKS
from rotquant.recipes.schemes import ZeroShot

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.frame.values import Number
    from reproduction.render.pages.model import Grid, Report
    from reproduction.render.tracking import Logged
    from reproduction.tables.project import Project

_CODE = ("reproduction.sources.elsewhere", "reproduction.render.pages.markdown")

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
    """Numbers measured elsewhere are data: where they are from, what the paper prints beside them, and its claims."""

    tables: Annotated[Many[ElsewhereFields], Field(min_length=1)]
    """The tables."""


class ElsewhereTable(ElsewhereFields, Table):
    """A table of numbers from elsewhere, with all rows and columns named."""

    of: ClassVar[str] = "elsewhere"

    @property
    def column_names(self) -> tuple[str, ...]:
        """All columns."""
        return self.columns or ()

    def quantity(self, name: str) -> Quantity:
        """Quantity of a metric.

        Raises:
            ConfigError: neither the table nor this project knows it.
        """
        own = {one: Quantity(one, said.title, said.better, said.unit) for one, said in self.metrics.items()}
        return lookup(KNOWN | own, name, f"table {self.id}: unknown metric")


@dataclass(frozen=True)
class Elsewhere:
    """A table's numbers, the paper's, and the origin of each of the first, by (row, column, metric)."""

    numbers: "dict[tuple[str, str, str], Number]"
    published: "dict[tuple[str, str, str], Number]"
    origins: dict[tuple[str, str, str], str]


class FromElsewhere(Source[ElsewhereTable, Elsewhere]):
    """Tables of numbers that somebody else measured."""

    name = "elsewhere"
    patterns = ("papers/*/elsewhere.yaml",)
    code: ClassVar = {"table": _CODE, "page": _CODE}
    schema = ElsewhereFile

    def load(self, path: Path, root: Path) -> Iterator[ElsewhereTable]:
        """Load tables; named rows, columns and metrics must be in the CSV."""
        for table in tables_in(path, root, ElsewhereFile, ElsewhereTable):
            where = f"{table.file}: tables.{table.id}"
            folder = path.relative_to(root).parent
            numbers = file_inside(folder, table.numbers, f"{folder}: numbers of {table.id}", ConfigError).as_posix()
            try:
                yield _checked(table.model_copy(update={"numbers": numbers}), root)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None

    def planned(self, project: "Project", table: ElsewhereTable) -> dict[str, Any]:
        """Plan a table; its definition covers its files' contents."""
        files = (table.numbers, *filter(None, [table.published]))
        texts = [(project.root / file).read_text(encoding="utf-8") for file in files]
        return {"definition": short_hash(canonical_json([table.model_dump(mode="json"), texts]))}

    def collect(self, project: "Project", table: ElsewhereTable) -> Elsewhere:
        from reproduction.frame.values import Number

        files = (table.numbers, table.published)
        numbers, published = (
            {place: Number(one.value, one.deviation) for place, one in _read(table, file, project.root)}
            for file in files
        )
        lines = read_csv(project.root / table.numbers, (), "numbers")
        said = {(line["row"], line["column"], line["metric"]): line.get("origin", "").strip() for line in lines}
        return Elsewhere(numbers, published, {place: said[place] or table.origin for place in numbers})

    def frame(self, collected: Elsewhere) -> "pd.DataFrame":
        from reproduction.frame.lines import ELSEWHERE, PUBLISHED, to_frame

        names = ("row", "column", "quantity", "value", "deviation", "published", "published_deviation")
        lines = []
        for place in dict.fromkeys([*collected.numbers, *collected.published]):
            both = (collected.numbers.get(place), collected.published.get(place))
            amounts = (amount for one in both for amount in ((one.mean, one.deviation) if one else (None, None)))
            origin = PUBLISHED if both[0] is None else ELSEWHERE
            lines.append((*place, *amounts, origin, collected.origins.get(place)))
        return to_frame(lines, (*names, "origin", "note"))

    def report(
        self, project: "Project", table: ElsewhereTable, collected: Elsewhere, logged: "Logged | None" = None
    ) -> "Report":
        from reproduction.render.meaning.pages import Words, of_claims
        from reproduction.render.meaning.sayings import Teller, sayings
        from reproduction.render.meaning.words import EffectUnit, told
        from reproduction.render.pages.model import Fact, Report
        from reproduction.render.pages.verdicts import claims_of
        from reproduction.run.results import table_path
        from reproduction.words.describe import is_of_the_paper, lead, title

        outcomes = _outcomes(table, collected)
        of_claim = {id(claim): _quantity(table, collected, claim) for claim in table.claims}

        def say(outcome: Any) -> Any:
            quantity = of_claim[id(outcome.claim)]
            return sayings(outcome, Teller(lambda finding: told(finding, EffectUnit.of(quantity)), quantity))

        words = Words(where="by numbers measured elsewhere", cannot="other models")
        return Report(
            id=table.id,
            title=title(table),
            caption=table.caption,
            lead=lead(table),
            meaning=of_claims(outcomes, say, words),
            reading=[
                f"Upright numbers were measured elsewhere, not by this project: {table.origin.rstrip('.')}. "
                "*Italic* ones are the paper's."
            ],
            grids=[*_grids(table, collected)],
            notes=table.notes,
            claims=claims_of(outcomes, "Claims of the paper" if is_of_the_paper(table) else "Claims"),
            facts=[Fact("Measured elsewhere", origin) for origin in dict.fromkeys(collected.origins.values())],
            template="pages/elsewhere.md.jinja",
            details={"numbers": Path(table.numbers), "csv": table_path(table.id)},
        )

    def reached(self, project: "Project", table: ElsewhereTable, rendered: bool) -> Reached:
        report = self.report(project, table, self.collect(project, table)) if rendered else None
        return Reached("elsewhere" if rendered else "not yet", report=report)


def _read(table: ElsewhereTable, file: str | None, root: Path) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Numbers of a CSV in the table's rows and columns, where it names any."""
    for place, one in (read_published(file, root) if file else {}).items():
        row, column, _ = place
        if one.value is not None and row in (table.rows or (row,)) and column in (table.columns or (column,)):
            yield place, one


def _checked(table: ElsewhereTable, root: Path) -> ElsewhereTable:
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
    if not any(True for _ in _read(full, table.numbers, root)):
        raise ConfigError(f"{table.numbers} has no number in these rows and columns.")
    for number, claim in enumerate(table.claims):
        for kind, name in named_by(claim):
            known = dict.fromkeys((full.rows if kind == "row" else full.columns) or ())
            lookup(known, name, f"claims.{number}: unknown {kind}")
        bounds = (bound for check in claim.checks.values() for bound in quantities_in(check))
        for name in (*bounds, *filter(None, [claim.quantity])):
            lookup(metrics, name, f"claims.{number}: unknown quantity")
    return full


def _quantity(table: ElsewhereTable, collected: Elsewhere, claim: Claim) -> Quantity:
    """Quantity compared by a claim: the first metric unless it names another."""
    return table.quantity(claim.quantity or next(name for _, _, name in collected.numbers))


def _outcomes(table: ElsewhereTable, collected: Elsewhere) -> Any:
    """Decide every claim, by the numbers printed elsewhere and by the paper's."""
    from reproduction.claims.claims import Answer, decided, judge

    def answers(claim: Claim) -> Iterator[tuple[About, Answer]]:
        quantity = _quantity(table, collected, claim)
        for about, check in claim.checks.items():
            ours, papers = (
                judge(check, table, numbers, quantity, columns=claim.columns, given=given)
                for numbers, given in ((collected.numbers, claim.given), (collected.published, None))
            )
            yield about, Answer(ours, papers, about == "mechanism" or table.on_papers_models)

    return decided(table.claims, answers)


def _grids(table: ElsewhereTable, collected: Elsewhere) -> "Iterator[Grid]":
    """A grid for each metric: the numbers, each with the paper's."""
    from reproduction.render.pages import cells
    from reproduction.render.pages.model import Grid, GridColumn, beside
    from reproduction.words.numbers import words

    numbers, published = collected.numbers, collected.published
    for metric in dict.fromkeys(name for _, _, name in (*numbers, *published)):
        quantity = table.quantity(metric)
        both = (numbers, published)
        ours, papers = (cells.decimals(one for (_, _, name), one in found.items() if name == metric) for found in both)
        rows = [
            row for row in table.rows or () if any(place[::2] == (row, metric) for found in both for place in found)
        ]
        columns: list[GridColumn] = []
        for column in table.column_names:
            found = [(row, column, metric) for row in rows]
            if any(place in numbers or place in published for place in found):
                mine = [cells.measured(numbers.get(place), ours) for place in found]
                printed = [cells.printed(published.get(place), papers) for place in found]
                columns += beside(GridColumn(mine, column), GridColumn(printed, published=""))
        what = words(quantity) if metric in KNOWN else quantity.title
        unit = f" ({quantity.unit})" if quantity.unit else ""
        caption = f"{what[0].upper()}{what[1:]}{unit}, {quantity.better} is better; measured elsewhere"
        yield Grid(caption, ["Method"], [[row] for row in rows], columns)
