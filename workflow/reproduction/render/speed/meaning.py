"""The meaning of a speed table's page: its claims, and for a figure its drawn ratios."""

from collections.abc import Iterator, Mapping
from typing import cast

from reproduction.claims.claims import Outcome
from reproduction.claims.findings import Finding
from reproduction.claims.replays import show
from reproduction.frame.speed import Measured, ShownRecord, short_gpu, shown_ratio
from reproduction.render.meaning.pages import Words, clauses, of_claims, sentence
from reproduction.render.meaning.sayings import Saying, Teller, sayings
from reproduction.render.meaning.words import ToldEffect, between
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import DrawnPart, SpeedClaim, SpeedGrid, SpeedTable, matches, rows
from reproduction.words.describe import is_of_the_paper

#: One sitting does not tell how many replays would decide.
_OPEN = ", whose replays lie on both sides of the bound"


def meaning_of_speed(table: SpeedTable, source: ShownRecord | None, decided: tuple[Outcome, ...]) -> list[str]:
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
    return sayings(outcome, Teller(lambda finding: told_of_speed(finding, claim, grid), gpus=table.gpus, open=_OPEN))


def meaning_of_drawing(project: Project, table: SpeedTable, drawn: Mapping[str, Measured]) -> list[str]:
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
    ends = [[show(min(found)), show(max(found))] if found else [] for found in (ours, papers)]
    return clauses("panel", title=part.title, ratio=grid.ratio, over=grid.baseline, ours=ends[0], papers=ends[1])


def told_of_speed(finding: Finding, claim: SpeedClaim, grid: SpeedGrid) -> ToldEffect:
    """A comparison of times: "2.32 [2.30, 2.34] times the speed of FP16 (at least 1.9 is asked)"."""
    effect = finding.effect
    if effect is None:
        return ToldEffect(*[finding.numbers] * 4)
    if effect.name == "by":
        return ToldEffect(*[effect.compared.replace(" > ", " after ")] * 4)
    interval = between(show(effect.low), show(effect.high))
    asked = "" if effect.asked.endswith((" 0", " 1")) else f" ({effect.asked} is asked)"
    size = show(effect.size)
    brief = f"{size}{interval}{_compared(claim, grid)}"
    return ToldEffect(f"{brief}{asked}", brief, size, size)


def _compared(claim: SpeedClaim, grid: SpeedGrid) -> str:
    check, in_bytes = claim.check, grid.unit in ("GiB", "GB")
    if check.compare == "amount":
        return f" {grid.unit}"
    if check.compare == "cost":
        return f" times the {'memory' if in_bytes else 'time'} of {check.over}"
    return f" times less memory than {check.over}" if in_bytes else f" times the speed of {check.over}"
