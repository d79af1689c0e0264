"""The report of a speed table: claims, ratios and times beside the paper's, what is missing, and provenance.

Upright numbers were measured, on the GPU or CPU that is named; *italic* ones are the paper's, on its own.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rotquant.reporting.pages.model import Block, Bullets, Claims, Grid, Report, Section
from rotquant.reporting.pages.origins import provenance
from rotquant.reporting.pages.report import figure_of, lead
from rotquant.reporting.pages.verdicts import claims_of
from rotquant.reporting.speed.claims import outcomes
from rotquant.reporting.speed.grids import part_grid, speed_grids
from rotquant.reporting.speed.limits import limit_blocks
from rotquant.reporting.speed.numbers import Measured, Numbers, Source, read_numbers
from rotquant.reporting.speed.provenance import file_links, gpu_fact, origin_facts, when_and_where
from rotquant.reporting.words.describe import is_of_the_paper, title
from rotquant.study.project import Project
from rotquant.study.results import REPORTS
from rotquant.study.speed.definitions import SpeedTable

#: Of cells that lack a number for one reason, so many are named.
_SHOWN = 8
#: How times are taken, unless a table says otherwise.
_REPLAYED = (
    "Times are GPU time of CUDA-graph replays; successive calls take turns on copies of their inputs that together "
    "exceed the L2 cache, so that weights come from memory."
)


def speed_report(project: Project, table: SpeedTable, measured: Measured | None = None) -> Report:
    """The report of a table; of a figure, which has no grids of its own, the parts of other tables that it draws.

    Args:
        measured: the table's record and numbers, where they were read already.

    Raises:
        ResultError: the table's record, or for a figure the record of a table that it draws, is damaged.
    """
    source, numbers = measured or read_numbers(project, table)
    claims = claims_of(outcomes(table, numbers), "Claims of the paper" if is_of_the_paper(table) else "Goals")
    grids, sections = _measured(table, numbers, source, claims) if table.grids else _drawn(project, table)
    return Report(
        title=title(table),
        caption=table.caption,
        lead=lead(table),
        reading=tuple(_reading(table, source)) if table.grids else (),
        figure=figure_of(table.id, table.drawing.caption) if table.drawing else None,
        grids=grids,
        notes=table.notes,
        claims=claims,
        sections=tuple(Section(name, blocks) for name, blocks in sections if blocks),
        facts=() if source is None else (gpu_fact(source), *origin_facts(source)),
    )


Sections = list[tuple[str, list[Block]]]


def _measured(
    table: SpeedTable, numbers: Numbers, source: Source | None, claims: Claims
) -> tuple[tuple[Grid, ...], Sections]:
    """The grids, and the sections of a page that shows them, each grid under its name where there are several."""
    grids = speed_grids(table, numbers)
    named: Sections = [
        (name if len(table.grids) > 1 else "Numbers", [*several])
        for name, several in itertools.groupby(grids, lambda grid: grid.name)
    ]
    origin = [] if source is None else [provenance(origin_facts(source), file_links(table, source))]
    return grids, [
        (claims.title, [claims] if claims.lines else []),
        *named,
        ("Against the limits", limit_blocks(table, numbers)),
        ("Notes", [Bullets(_notes(table))]),
        ("Cells without a number", [Bullets(lines)] if (lines := list(_missing(numbers))) else []),
        ("Provenance", [*origin]),
    ]


def _drawn(project: Project, table: SpeedTable) -> tuple[tuple[Grid, ...], Sections]:
    """The ratios in a figure, and the tables that they are from."""
    assert table.drawing is not None
    measured = {name: read_numbers(project, project.speed_table(name)) for name in table.sources}
    grids = [
        part_grid(project.speed_table(part.table), part, measured[part.table].numbers) for part in table.drawing.parts
    ]
    places = [
        f"[{name}]({name}.md): {'not measured yet' if source is None else when_and_where(source)}"
        for name, (source, _) in measured.items()
    ]
    whose = f"*Italic* numbers are the paper's, on {_list(table.gpus)}."
    notes = [Bullets(table.notes)] if table.notes else []
    return tuple(grids), [("Numbers", [*grids]), ("Where the numbers are from", [Bullets(places), whose, *notes])]


def _reading(table: SpeedTable, source: Source | None) -> Iterator[str]:
    """How to read the numbers: whose they are, and where they were measured."""
    papers = f"*Italic* ones are the paper's, on {_list(table.gpus)}." if table.gpus else ""
    if source is None:
        where = " on a machine with an NVIDIA GPU" if table.device == "gpu" else ""
        how = f"`rotquant bench measure` does it{where}"
        yield f"> **Not measured yet:** there is no record of this table; {how}."
        if papers:
            yield papers
    else:
        yield f"{when_and_where(source)} {papers}".rstrip()


def _notes(table: SpeedTable) -> list[str]:
    """What a reader must know, and how times are taken."""
    lines = [table.timing or _REPLAYED, *table.notes]
    if table.see:
        links = ", ".join(f"[{Path(file).stem}]({os.path.relpath(file, REPORTS)})" for file in table.see)
        lines.append(f"What was tried, with each version's prediction and outcome, and what bounds it: {links}.")
    return lines


def _missing(numbers: Numbers) -> Iterator[str]:
    """Every cell without a number, and why; reasons that differ in a number alone are given once, by the first."""
    reasons: dict[str, list[tuple[str, str]]] = {}
    for (_, row, column), number in numbers.items():
        if number.missing is not None:
            reason = number.missing.rstrip(".")
            reasons.setdefault(re.sub(r"\d+", "", reason), []).append((reason, f"{row}, {column}"))
    for alike in reasons.values():
        (first, *others), places = zip(*alike, strict=True)
        reason = first if set(others) <= {first} else f"{first}, and so on"
        shown = "; ".join(places[:_SHOWN]) + ("; ..." if len(places) > _SHOWN else "")
        yield f"{reason}: {len(places)} cell{'s' if len(places) > 1 else ''} ({shown})"


def _list(items: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(items))
