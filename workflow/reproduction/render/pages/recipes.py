"""The report of a table of settings: each cell of the recipe here next to the paper's, and why they differ."""

from typing import NamedTuple

from reproduction.claims.unmeasured import outcomes
from reproduction.render.meaning.pages import clauses, sentence
from reproduction.render.meaning.words import clause, lower
from reproduction.render.pages.grids import settings_grid
from reproduction.render.pages.model import Fact, Report
from reproduction.render.pages.verdicts import judged_report
from reproduction.tables.settings import SettingsTable, asked_cells
from reproduction.words.describe import settings
from reproduction.words.templates import sentences

WORDS = "pages/recipes.jinja"


class RecipeLine(NamedTuple):
    """Path of some rows' recipe, the table with it if there is one, and the whole recipe in words."""

    rows: list[str]
    where: str
    page: str | None
    recipe: str


def settings_report(table: SettingsTable) -> Report:
    """Build the report of a table."""
    pages = list(dict.fromkeys(row.as_in.table for row in table.rows if row.as_in))
    return judged_report(
        table,
        outcomes(table),
        "Claims of the paper",
        meaning=_meaning(table),
        reading=sentences(WORDS, "reading"),
        grids=[settings_grid(table)],
        facts=[Fact("Recipes", sentences(WORDS, "derived", pages=pages)[0])],
        template="pages/recipes.md.jinja",
        details={
            "differences": [cell for cell in table.cells if cell.same is False],
            "lacking": sum(cell.published is None for cell in table.cells),
            "sources": _sources(table),
        },
    )


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
