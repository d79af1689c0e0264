"""The report of a table of settings: each cell as the recipe here has it beside the paper's, and why they differ."""

from typing import NamedTuple

from reproduction.render.pages.model import Fact, Grid, GridColumn, Report, beside
from reproduction.render.pages.verdicts import claims_of
from reproduction.render.settings.claims import outcomes
from reproduction.render.settings.meaning import meaning_of_settings
from reproduction.run.results import table_path
from reproduction.tables.settings import Setting, Settings
from reproduction.words.describe import lead, settings, title
from reproduction.words.templates import sentences

WORDS = "settings/words.jinja"

#: Stands behind what is not as printed.
DIFFERS = " ≠"


class Source(NamedTuple):
    """Where the recipe of some rows stands, the table with it if there is one, and all of it in words."""

    rows: list[str]
    where: str
    page: str | None
    recipe: str


def settings_report(found: Settings) -> Report:
    """The report of a table."""
    table = found.table
    return Report(
        id=table.id,
        title=title(table),
        caption=table.caption,
        lead=lead(table),
        meaning=meaning_of_settings(found),
        reading=sentences(WORDS, "reading"),
        grids=[_grid(found)],
        notes=table.notes,
        claims=claims_of(outcomes(found), "Claims of the paper"),
        facts=[Fact("Recipes", sentences(WORDS, "derived", pages=_pages(found))[0])],
        template="settings/page.md.jinja",
        details={
            "differences": [cell for cell in found.cells if cell.same is False],
            "lacking": sum(cell.published is None for cell in found.cells),
            "sources": _sources(found),
            "csv": table_path(table.id),
        },
    )


def _grid(found: Settings) -> Grid:
    rows, columns = found.table.rows, []
    for column in found.table.columns:
        cells = [found.cell(row.name, column.name) for row in rows]
        printed = [cell.published or "-" for cell in cells]
        columns += beside(GridColumn([_shown(cell) for cell in cells], column.name), GridColumn(printed, published=""))
    stub = "Tensor" if any(row.part for row in rows) else "Method"
    return Grid("Settings of the recipes here", [stub], [[row.name] for row in rows], columns)


def _shown(cell: Setting) -> str:
    return cell.here + DIFFERS * (cell.same is False)


def _pages(found: Settings) -> list[str]:
    """The tables whose rows the recipes are."""
    return list(dict.fromkeys(row.as_in.table for row in found.table.rows if row.as_in))


def _sources(found: Settings) -> list[Source]:
    """Each recipe once."""
    rows: dict[tuple[str, str | None, str], list[str]] = {}
    for row in found.table.rows:
        place = row.as_in
        where = f"`{row.method}`" if place is None else place.row + (f", {place.column}" if place.column else "")
        recipe = settings(found.recipes[row.name])
        rows.setdefault((where, place and place.table, recipe), []).append(row.name)
    return [Source(names, *told) for told, names in rows.items()]
