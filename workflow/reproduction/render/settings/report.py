"""The report of a table of settings: each cell of the recipe here next to the paper's, and why they differ."""

from typing import NamedTuple

from reproduction.claims.facts import outcomes
from reproduction.render.meaning.pages import clauses, sentence
from reproduction.render.meaning.words import clause, lower
from reproduction.render.pages.cells import setting
from reproduction.render.pages.model import Fact, Grid, GridColumn, Report, beside
from reproduction.render.pages.verdicts import claims_of
from reproduction.run.results import table_path
from reproduction.tables.settings import SettingsTable, asked_cells
from reproduction.words.describe import lead, settings, title
from reproduction.words.templates import sentences

WORDS = "settings/words.jinja"


class RecipeLine(NamedTuple):
    """Path of some rows' recipe, the table with it if there is one, and the whole recipe in words."""

    rows: list[str]
    where: str
    page: str | None
    recipe: str


def settings_report(table: SettingsTable) -> Report:
    """Build the report of a table."""
    return Report(
        id=table.id,
        title=title(table),
        caption=table.caption,
        lead=lead(table),
        meaning=_meaning(table),
        reading=sentences(WORDS, "reading"),
        grids=[_grid(table)],
        notes=table.notes,
        claims=claims_of(outcomes(table), "Claims of the paper"),
        facts=[Fact("Recipes", sentences(WORDS, "derived", pages=_pages(table))[0])],
        template="settings/page.md.jinja",
        details={
            "differences": [cell for cell in table.cells if cell.same is False],
            "lacking": sum(cell.published is None for cell in table.cells),
            "sources": _sources(table),
            "csv": table_path(table.id),
        },
    )


def _grid(table: SettingsTable) -> Grid:
    rows, columns = table.rows, []
    for column in table.columns:
        cells = [table.cell(row.name, column.name) for row in rows]
        printed = [cell.published or "-" for cell in cells]
        columns += beside(GridColumn([setting(cell) for cell in cells], column.name), GridColumn(printed, published=""))
    stub = "Tensor" if any(row.part for row in rows) else "Method"
    return Grid("Settings of the recipes here", [stub], [[row.name] for row in rows], columns)


def _pages(table: SettingsTable) -> list[str]:
    """The tables whose rows use the recipes."""
    return list(dict.fromkeys(row.as_in.table for row in table.rows if row.as_in))


def _sources(table: SettingsTable) -> list[RecipeLine]:
    """Each recipe once."""
    rows: dict[tuple[str, str | None, str], list[str]] = {}
    for row in table.rows:
        place = row.as_in
        where = f"`{row.method}`" if place is None else place.row + (f", {place.column}" if place.column else "")
        recipe = settings(table.recipes[row.name])
        rows.setdefault((where, place and place.table, recipe), []).append(row.name)
    return [RecipeLine(names, *told) for told, names in rows.items()]


def _meaning(table: SettingsTable) -> list[str]:
    """Up to three sentences on a table: its cells, the claims of the paper's text, and the differences."""
    printed = [cell for cell in table.cells if cell.published is not None]
    differs = [cell for cell in printed if not cell.same]
    told = [claim for claim in table.claims if claim.fact.told]
    agree = [
        claim
        for claim in told
        if all(cell.here.casefold() == asked.casefold() for cell, asked in asked_cells(table, claim))
    ]
    reason = differs[0].reason if differs else None
    said = clauses(
        "settings",
        printed=len(printed),
        same=len(printed) - len(differs),
        told=len(told),
        agree=len(agree),
        example=clause(agree[0].text) if agree else "",
        differs=differs,
        reason=lower(reason.rstrip(".")) if reason else "",
    )
    return [sentence([line]) for line in said]
