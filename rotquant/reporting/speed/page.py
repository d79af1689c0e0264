"""The page of a speed table as Markdown: claims, ratios and times beside the paper's, what is missing, and provenance.

Upright numbers were measured, on the GPU or CPU that is named; *italic* ones are the paper's, on its own.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rotquant.reporting.claims import score
from rotquant.reporting.figures.draw import figure_path
from rotquant.reporting.pages.verdicts import findings, verdict_words
from rotquant.reporting.speed import limits
from rotquant.reporting.speed.claims import Outcome, outcomes
from rotquant.reporting.speed.grids import layouts, part_layout
from rotquant.reporting.speed.numbers import Numbers, Source, collect, find_source
from rotquant.reporting.speed.provenance import provenance_section, when_and_where
from rotquant.reporting.words.describe import is_of_the_paper, title
from rotquant.reporting.words.markdown import markdown_table
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


def page(project: Project, table: SpeedTable) -> str:
    """The whole page; links are relative to the reports folder.

    Raises:
        ResultError: the table's record, or for a figure the record of a table that it draws, is damaged.
    """
    source = f"{table.paper_title}, Section {table.section}" if is_of_the_paper(table) else table.paper_title
    head = [f"# {title(table)}\n", f"{table.caption} ({source})\n"]
    if not table.grids:
        return "\n".join([*head, *_figure_page(project, table)])
    measured = find_source(project, table)
    numbers = collect(project, table, measured)
    sections = [
        *head,
        _reading(table, measured),
        _figure(table),
        claims_section(table, outcomes(project, table, numbers)),
        *_grids(table, numbers),
        limits.section(table, numbers),
        _notes(table),
        _missing(numbers),
        provenance_section(table, measured),
    ]
    return "\n".join(section for section in sections if section)


def claims_section(table: SpeedTable, decided: Sequence[Outcome]) -> str:
    """The verdicts as a table, the numbers behind them folded below; nothing for a table without claims."""
    if not decided:
        return ""
    of_paper, lines, details = is_of_the_paper(table), [], []
    for number, outcome in enumerate(decided, 1):
        claim, here = outcome.claim, outcome.ours.holds
        text = claim.text + (f"<br><sub>Check: {claim.note}</sub>" if claim.note else "")
        if claim.if_it_fails and here is False:
            text += f"<br>❌ Why it may fail here: {claim.if_it_fails}"
        papers = [claim.section, verdict_words(outcome.papers.holds)] if of_paper else []
        lines.append([number, text, verdict_words(here), *papers])
        printed = f"   - *published*: {findings(outcome.papers)}\n" if of_paper else ""
        details.append(f"{number}. {claim.text}\n\n   - here: {findings(outcome.ours)}\n{printed}")
    counted = score(decided)
    name, verb = ("Claims of the paper", "hold here") if of_paper else ("Goals", "are reached")
    unchecked = f", {counted.unchecked} not checkable" if counted.unchecked else ""
    header = ["", "Claim" if of_paper else "Goal", "here", *(["Section", "*paper's numbers*"] if of_paper else [])]
    return "\n".join(
        [
            f"## {name}: {counted.holds} of {counted.checked} {verb}{unchecked}\n",
            markdown_table(header, lines, "rllll"[: len(header)]),
            f"<details><summary>The numbers behind each verdict</summary>\n\n{''.join(details)}\n</details>\n",
        ]
    )


def _reading(table: SpeedTable, source: Source | None) -> str:
    """How to read the numbers: whose they are, and where they were measured."""
    papers = f" *Italic* ones are the paper's, on {_list(table.gpus)}." if table.gpus else ""
    if source is None:
        where = " on a machine with an NVIDIA GPU" if table.device == "gpu" else ""
        how = f"`rotquant bench measure` does it{where}"
        return f"> **Not measured yet:** there is no record of this table; {how}.\n\n{papers.strip()}\n"
    return f"{when_and_where(source)}{papers}\n"


def _figure(table: SpeedTable) -> str:
    if table.drawing is None:
        return ""
    link = os.path.relpath(figure_path(table.id), REPORTS)
    return f"![{table.drawing.caption}]({link})\n\n{table.drawing.caption}\n"


def _grids(table: SpeedTable, numbers: Numbers) -> Iterator[str]:
    """Every grid under its name, where there are several."""
    last = None
    for layout in layouts(table, numbers):
        if layout.grid != last:
            yield f"## {layout.grid if len(table.grids) > 1 else 'Numbers'}\n"
        last = layout.grid
        yield f"{layout.caption}.\n\n{layout.markdown()}"


def _notes(table: SpeedTable) -> str:
    """What a reader must know, and how times are taken."""
    lines = [table.timing or _REPLAYED, *table.notes]
    if table.see:
        links = ", ".join(f"[{Path(file).stem}]({os.path.relpath(file, REPORTS)})" for file in table.see)
        lines.append(f"What was tried, with each version's prediction and outcome, and what bounds it: {links}.")
    return "## Notes\n\n" + "".join(f"- {line}\n" for line in lines)


def _missing(numbers: Numbers) -> str:
    """Every cell without a number, and why; reasons that differ in a number alone are given once, by the first."""
    reasons: dict[str, list[tuple[str, str]]] = {}
    for (_, row, column), number in numbers.items():
        if number.missing is not None:
            reason = number.missing.rstrip(".")
            reasons.setdefault(re.sub(r"\d+", "", reason), []).append((reason, f"{row}, {column}"))
    if not reasons:
        return ""
    lines = []
    for alike in reasons.values():
        (first, *others), places = zip(*alike, strict=True)
        reason = first if set(others) <= {first} else f"{first}, and so on"
        shown = "; ".join(places[:_SHOWN]) + ("; ..." if len(places) > _SHOWN else "")
        lines.append(f"- {reason}: {len(places)} cell{'s' if len(places) > 1 else ''} ({shown})\n")
    return f"## Cells without a number\n\n{''.join(lines)}"


def _figure_page(project: Project, table: SpeedTable) -> list[str]:
    """A figure's page: the drawing, the ratios in it, and the tables they are from."""
    assert table.drawing is not None
    parts = [_figure(table), "## Numbers\n"]
    sources: dict[str, Source | None] = {}
    for part in table.drawing.parts:
        origin = project.speed_table(part.table)
        sources.setdefault(part.table, find_source(project, origin))
        layout = part_layout(origin, part, collect(project, origin, sources[part.table]))
        parts.append(f"{layout.grid}: {layout.caption}.\n\n{layout.markdown()}")
    parts.append("## Where the numbers are from\n")
    for name, source in sources.items():
        where = "not measured yet" if source is None else when_and_where(source)
        parts.append(f"- [{name}]({name}.md): {where}")
    parts.append(f"\n*Italic* numbers are the paper's, on {_list(table.gpus)}.\n")
    return [*parts, "".join(f"- {note}\n" for note in table.notes)]


def _list(items: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(items))
