"""The report of a speed table: claims, ratios and times next to the paper's, missing cells, and provenance.

Upright numbers were measured, on the named GPU or CPU; *italic* ones are the paper's, on its own.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from reproduction.benchmarks.registry import benchmark_digest
from reproduction.claims.replays import outcomes
from reproduction.frame.speed import Measured, ShownRecord, SpeedNumbers, read_numbers
from reproduction.render.pages.model import Fact, Grid, Report
from reproduction.render.pages.verdicts import claims_of
from reproduction.render.speed.grids import part_grid, share_grids, speed_grids
from reproduction.render.speed.limits import MEMORY, ceilings
from reproduction.render.speed.meaning import meaning_of_drawing, meaning_of_speed
from reproduction.run.results import table_path
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.words.describe import is_of_the_paper, lead, title
from reproduction.words.templates import sentences

WORDS = "speed/provenance.jinja"


def speed_report(project: Project, table: SpeedTable, measured: Measured) -> Report:
    """Build the report of a table; for a figure, which has no grids of its own, from the drawn parts of other tables.

    Raises:
        ResultError: the table's record, or for a figure the record of a table that it draws, is damaged.
    """
    source, numbers = measured
    behind = () if table.grids else table.recorded
    drawn = {name: read_numbers(project, project.one(SpeedTable, name)) for name in behind}
    grids = speed_grids(table, numbers) if table.grids else _drawn_grids(project, table, drawn)
    known = ceilings(table, numbers)
    decided = outcomes(table, numbers, source.record.gpu if source else "")
    return Report(
        id=table.id,
        title=title(table),
        caption=table.caption,
        lead=lead(table),
        meaning=meaning_of_speed(table, source, decided) or meaning_of_drawing(project, table, drawn),
        reading=sentences(WORDS, "reading", table=table, source=source) if table.grids else (),
        figure=table.drawn,
        grids=grids,
        notes=table.notes,
        claims=claims_of(decided, "Claims of the paper" if is_of_the_paper(table) else "Goals"),
        facts=_facts(source) if source else (),
        template="speed/page.md.jinja",
        details={
            "parts": _parts(table, grids),
            "memory": {name: known[name] for name in MEMORY if name in known},
            "products": {name: rate for name, rate in known.items() if name not in MEMORY},
            "shares": share_grids(table, numbers, known) if "copy" in known else (),
            "missing": _missing(numbers),
            "drawn": {name: source for name, (source, _) in drawn.items()},
            "table": table,
            "see": [*map(Path, table.see)],
            "source": source,
            "csv": table_path(table.id),
        },
    )


def _parts(table: SpeedTable, grids: Sequence[Grid]) -> dict[str, list[Grid]]:
    """The grids by their names on a page, each separate where a table has several."""
    parts: dict[str, list[Grid]] = {}
    for grid in grids:
        parts.setdefault(grid.name if len(table.grids) > 1 else "Numbers", []).append(grid)
    return parts


def _drawn_grids(project: Project, table: SpeedTable, drawn: Mapping[str, Measured]) -> list[Grid]:
    """The ratios in a figure."""
    parts = table.drawing.parts if table.drawing else ()
    return [part_grid(project.one(SpeedTable, part.table), part, drawn[part.table].numbers) for part in parts]


def _facts(source: ShownRecord) -> list[Fact]:
    """The device, the circumstances of each sitting of the cells, and the code."""
    older = sum(cell.code != benchmark_digest(cell.benchmark) for cell in source.record.cells)
    return Fact.of(sentences(WORDS, "facts", source=source, older=older))


def _missing(numbers: SpeedNumbers) -> list[tuple[str, list[str]]]:
    """Every cell without a number, and why; reasons that differ only in a number are given once, by the first."""
    reasons: dict[str, list[tuple[str, str]]] = {}
    for (_, row, column), number in numbers.items():
        if number.missing is not None:
            reason = number.missing.rstrip(".")
            reasons.setdefault(re.sub(r"\d+", "", reason), []).append((reason, f"{row}, {column}"))
    found = []
    for alike in reasons.values():
        several = {reason: None for reason, _ in alike}
        first = next(iter(several))
        found.append((first if len(several) == 1 else f"{first}, and so on", [place for _, place in alike]))
    return found
