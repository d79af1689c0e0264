"""The report of a speed table: claims, ratios and times next to the paper's, missing cells, and provenance.

Upright numbers were measured, on the named GPU or CPU; *italic* ones are the paper's, on its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from reproduction.benchmarks.registry import benchmark_digest
from reproduction.claims.claims import Outcome
from reproduction.claims.findings import Finding
from reproduction.claims.replays import outcomes
from reproduction.frame.limits import MEMORY, ceilings
from reproduction.frame.speed import Measured, ShownRecord, SpeedNumbers, read_numbers, short_gpu, shown_ratio
from reproduction.render.meaning.pages import Words, clauses, of_claims, sentence
from reproduction.render.meaning.sayings import Saying, Teller, sayings
from reproduction.render.meaning.words import ToldEffect, between
from reproduction.render.pages.grids import part_grid, share_grids, speed_grids
from reproduction.render.pages.model import Fact, Grid, Report
from reproduction.render.pages.verdicts import judged_report
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import DrawnPart, SpeedClaim, SpeedGrid, SpeedTable, matches, rows
from reproduction.words.describe import is_of_the_paper
from reproduction.words.numbers import show_ratio
from reproduction.words.templates import sentences

WORDS = "pages/benchmarks.jinja"

#: One sitting does not tell how many replays would decide.
_OPEN = ", whose replays lie on both sides of the bound"


def speed_report(project: Project, table: SpeedTable, measured: Measured) -> Report:
    """Build the report of a table; for a figure, which has no grids of its own, from the drawn parts of other tables.

    Raises:
        ResultError: the table's record, or for a figure the record of a table that it draws, is damaged.
    """
    source, numbers = measured
    behind = () if table.grids else table.recorded
    drawn = {name: read_numbers(project, project.one(SpeedTable, name)) for name in behind}
    grids = speed_grids(table, numbers) or [
        part_grid(project.one(SpeedTable, part.table), part, drawn[part.table].numbers)
        for part in (table.drawing.parts if table.drawing else ())
    ]
    known = ceilings(table, numbers)
    decided = outcomes(table, numbers, source.record.gpu if source else "")
    return judged_report(
        table,
        decided,
        "Goals",
        meaning=_meaning(table, source, decided) or _meaning_of_drawing(project, table, drawn),
        reading=sentences(WORDS, "reading", table=table, source=source) if table.grids else (),
        grids=grids,
        facts=_facts(source) if source else (),
        template="pages/benchmarks.md.jinja",
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
        },
    )


def _parts(table: SpeedTable, grids: Sequence[Grid]) -> dict[str, list[Grid]]:
    """The grids by their names on a page, each separate where a table has several."""
    parts: dict[str, list[Grid]] = {}
    for grid in grids:
        parts.setdefault(grid.name if len(table.grids) > 1 else "Numbers", []).append(grid)
    return parts


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


def _meaning(table: SpeedTable, source: ShownRecord | None, decided: tuple[Outcome, ...]) -> list[str]:
    """Up to three sentences on a measured table, from the verdicts on its claims."""
    if source is None:
        return []
    machine = "machine" if source.of_cpu else "GPU"
    words = Words(
        where=f"on the {short_gpu(source.record.gpu)}",
        subject=f"the paper's {machine}",
        cannot=f"another {machine}",
        has="it has",
        see=bool(table.see),
    )
    if not is_of_the_paper(table):
        words = words._replace(says="one goal is that", nothing="no goal is missed", claims="goals")
    return of_claims(decided, lambda outcome: _said(table, outcome), words)


def _said(table: SpeedTable, outcome: Outcome) -> Iterator[Saying]:
    claim = cast("SpeedClaim", outcome.claim)
    grid = next(grid for grid in table.grids if matches(grid.name, claim.grid))
    return sayings(outcome, Teller(lambda finding: _told(finding, claim, grid), gpus=table.gpus, open=_OPEN))


def _meaning_of_drawing(project: Project, table: SpeedTable, drawn: Mapping[str, Measured]) -> list[str]:
    """Ranges of the ratios in each panel, ours and the paper's; empty unless all were measured."""
    parts = table.drawing.parts if table.drawing else ()
    if not parts or any(measured.shown is None for measured in drawn.values()):
        return []
    return [sentence([clause for part in parts for clause in _panel(project.one(SpeedTable, part.table), part, drawn)])]


def _panel(table: SpeedTable, part: DrawnPart, drawn: Mapping[str, Measured]) -> list[str]:
    grid, numbers = table.grid(part.grid), drawn[part.table].numbers
    chosen = [numbers[grid.name, row.name, part.column] for row in rows(grid) if matches(row.name, *part.rows)]
    ours = [shown_ratio(grid, one.ratio) for one in chosen if one.ratio is not None]
    papers = [shown_ratio(grid, paper.ratio) for one in chosen for paper in one.papers if paper.ratio is not None]
    if not ours:
        return []
    ends = [[show_ratio(min(found)), show_ratio(max(found))] if found else [] for found in (ours, papers)]
    return clauses("panel", title=part.title, ratio=grid.ratio, over=grid.baseline, ours=ends[0], papers=ends[1])


def _told(finding: Finding, claim: SpeedClaim, grid: SpeedGrid) -> ToldEffect:
    """A comparison of times: "2.32 [2.30, 2.34] times the speed of FP16 (at least 1.9 is asked)"."""
    effect = finding.effect
    if effect is None:
        return ToldEffect(*[finding.numbers] * 4)
    if effect.name == "by":
        return ToldEffect(*[" after ".join(effect.pair)] * 4)
    interval = between(show_ratio(effect.low), show_ratio(effect.high))
    asked = "" if effect.asked.endswith((" 0", " 1")) else f" ({effect.asked} is asked)"
    size = show_ratio(effect.size)
    brief = f"{size}{interval}{_compared(claim, grid)}"
    return ToldEffect(f"{brief}{asked}", brief, size, size)


def _compared(claim: SpeedClaim, grid: SpeedGrid) -> str:
    check = claim.asked[0]
    if check.compare == "amount":
        return f" {grid.unit}"
    if check.compare == "cost":
        return f" times the {'memory' if grid.of_memory else 'time'} of {check.over}"
    return f" times less memory than {check.over}" if grid.of_memory else f" times the speed of {check.over}"
