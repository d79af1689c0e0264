"""The report of a speed table: claims, ratios and times next to the paper's, missing cells, and provenance.

Upright numbers were measured, on the named GPU or CPU; *italic* ones are the paper's, on its own.
"""

import re
from pathlib import Path

from reproduction.benchmarks.registry import benchmark_digest
from reproduction.claims.replays import outcomes
from reproduction.frame.limits import MEMORY, ceilings
from reproduction.frame.speed import Measured, ShownRecord, SpeedNumbers, read_numbers
from reproduction.render.pages.grids import part_grid, share_grids, speed_grids
from reproduction.render.pages.model import Fact, Report
from reproduction.render.pages.verdicts import judged_report
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.words.templates import sentences

WORDS = "pages/benchmarks.jinja"

_TIMING = (
    "Times are GPU time of CUDA-graph replays. Successive calls take turns on copies of their inputs that together "
    "exceed the L2 cache, so that weights come from memory."
)


def speed_report(project: Project, table: SpeedTable, measured: Measured) -> Report:
    """Build the report of a table; for a figure, which has no grids of its own, from the drawn parts of other tables.

    Raises:
        ResultError: the table's record, or for a figure the record of a table that it draws, is damaged.
    """
    source, numbers = measured
    behind = () if table.grids else table.recorded
    drawn = {name: read_numbers(project, project.one(SpeedTable, name)) for name in behind}
    grids, more = speed_grids(table, numbers)
    parts = table.drawing.parts if table.drawing and not grids else ()
    grids += [part_grid(project.one(SpeedTable, part.table), part, drawn[part.table].numbers) for part in parts]
    known = ceilings(table, numbers)
    return judged_report(
        table,
        outcomes(table, numbers, source.record.gpu if source else ""),
        "Goals",
        reading=" ".join(sentences(WORDS, "reading", table=table, source=source, drawn=drawn)),
        grids=grids,
        more=more,
        facts=_facts(source) if source else (),
        notes=(table.timing or _TIMING,) if table.grids else (),
        template="pages/benchmarks.md.jinja",
        details={
            "noise": "replays",
            "memory": {name: known[name] for name in MEMORY if name in known},
            "products": {name: rate for name, rate in known.items() if name not in MEMORY},
            "shares": share_grids(table, numbers, known) if "copy" in known else (),
            "missing": _missing(numbers),
            "drawn": {name: source for name, (source, _) in drawn.items()},
            "see": [*map(Path, table.see)],
            "source": source,
        },
    )


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
