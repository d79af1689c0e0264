"""The report of a table of settings: each cell of the recipe here next to the paper's, and why they differ."""

from typing import NamedTuple

from reproduction.claims.unmeasured import outcomes
from reproduction.render.pages.grids import settings_grid
from reproduction.render.pages.model import Fact, Report
from reproduction.render.pages.verdicts import judged_report
from reproduction.tables.settings import SettingsTable
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
        reading=sentences(WORDS, "reading", differ=sum(cell.same is False for cell in table.cells))[0],
        grids=[settings_grid(table)],
        facts=[Fact("Recipes", sentences(WORDS, "derived", pages=pages)[0])],
        template="pages/recipes.md.jinja",
        details={
            "noise": "none",
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
        where = f"`{row.method}`" if place is None else place.row
        recipe = settings(table.recipes[row.name])
        rows.setdefault((where, place and place.table, recipe), []).append(row.name)
    return [RecipeLine(names, *told) for told, names in rows.items()]
