"""The scoreboard: every table and figure of the papers and every report of our own, and how far each is.

A target is computed when its report was rendered from runs of this machine, recorded when results/bench/<gpu>/ holds
its measurements from another machine's GPU. The list is config/targets.yaml; what is done is read from the files, never
from a list. `index` writes it as Markdown; `rotquant.reporting.html` shows the same standings as a page.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rotquant.bench.records import gpu_folder
from rotquant.foundation.errors import ResultError
from rotquant.reporting.claims import Score
from rotquant.reporting.pages.model import Report
from rotquant.reporting.pages.report import report_of
from rotquant.reporting.speed.numbers import find_source
from rotquant.reporting.speed.report import speed_report
from rotquant.reporting.words.markdown import markdown_table
from rotquant.study.project import Project
from rotquant.study.results import REPORTS
from rotquant.study.speed.definitions import SpeedTable
from rotquant.study.tables import Table
from rotquant.study.targets import load_targets
from rotquant.study.values import read_values, results_behind

Status = Literal["computed", "recorded", "not yet"]


@dataclass(frozen=True)
class Standing:
    """How far one target is.

    kind: what sort of target, in words. listed: whether it stands in the paper; the others are reports of our own.
    status, machines: computed here, recorded on these GPUs, or neither.
    rendered: whether its page is there.
    report: what it says; None before its numbers are collected. of_speed: whether these are measured times and memory.
    """

    id: str
    paper: str
    title: str
    kind: str
    listed: bool
    status: Status
    machines: tuple[str, ...]
    rendered: bool
    report: Report | None = None
    of_speed: bool = False

    @property
    def label(self) -> str:
        """What the paper calls it, such as "Table 1"; a word for a report of our own."""
        name = self.id.removeprefix(f"{self.paper}_")
        word = name.rstrip("0123456789")
        return f"{word.capitalize()} {name[len(word) :]}".strip()

    @property
    def score(self) -> Score:
        """How many of its claims hold, fail and are not checkable."""
        return Score(0, 0, 0) if self.report is None else self.report.claims.score


Standings = Mapping[str, Sequence[Standing]]
"""Standings by paper."""


def standings(project: Project) -> Standings:
    """Every target by paper, in the order of config/targets.yaml, then the paper's further reports.

    Reports that are about no paper come last, under the name of their subject.
    """
    data = load_targets(project.root)
    listed = {target.id for target in data.targets}
    found: dict[str, tuple[Standing, ...]] = {}
    for paper in subjects(project):
        targets = [target for target in data.targets if target.paper == paper]
        tables = [*project.tables.values(), *project.speed.values()]
        own = [table for table in tables if table.paper == paper and table.id not in listed]
        found[paper] = (
            *(_standing(project, target.id, paper, target.title, data.kinds[target.kind]) for target in targets),
            *(_standing(project, table.id, paper, table.title, "report of our own", listed=False) for table in own),
        )
    return found


def subjects(project: Project) -> dict[str, str]:
    """The papers by their short name, with their titles; then what else there are reports about."""
    others = {table.paper: table.paper_title for table in project.speed.values()}
    papers = load_targets(project.root).papers
    return papers | {name: title for name, title in others.items() if name not in papers}


def totals(scores: Iterable[Score]) -> Score:
    """Scores added up."""
    found = list(scores)
    return Score(*(sum(getattr(one, name) for one in found) for name in ("holds", "fails", "unchecked")))


def summary(group: Iterable[Standing]) -> str:
    """How many tables and figures of the papers are built, and what became of the claims about them, as a sentence.

    Reports of our own are no part of it.
    """
    listed = [standing for standing in group if standing.listed]
    done = [standing for standing in listed if standing.status != "not yet"]
    found = totals(standing.score for standing in done)
    counts = f"{found.holds} hold here, {found.fails} fail, {found.unchecked} not checkable"
    claims = f"; {found.checked + found.unchecked} claims about them: {counts}" if done else ""
    return f"{len(done)} of {len(listed)} tables and figures are built{claims}."


def index(project: Project, found: Standings | None = None) -> str:
    """The scoreboard as Markdown; links are relative to the reports folder. found: the standings, where known."""
    papers, found = subjects(project), found or standings(project)
    parts = [
        "# Scoreboard\n",
        f"{summary(standing for group in found.values() for standing in group)}\n",
        "*Computed*: rendered from runs of this machine. *Recorded*: measured on the GPU that is named. *Not "
        "checkable*: a number is missing or not finite. Build one with `snakemake --cores all reports/<target>.md`. "
        "The same with figures and values, to filter and to search: [reports/index.html](index.html).\n",
    ]
    for paper, group in found.items():
        listed = [standing for standing in group if standing.listed]
        parts.append(f"## {papers[paper]}\n")
        if listed:
            parts += [f"{summary(listed)}\n", _table(listed)]
        if own := [standing for standing in group if not standing.listed]:
            parts += ["Further reports, of our own:\n", _table(own)]
    return "\n".join(parts)


def _standing(project: Project, name: str, paper: str, title: str, kind: str, *, listed: bool = True) -> Standing:
    rendered = (project.root / REPORTS / f"{name}.md").exists()
    if name in project.speed:
        return Standing(name, paper, title, kind, listed, rendered=rendered, **_speed(project, project.speed[name]))
    status: Status = "computed" if rendered else "not yet"
    report = _report(project, project.tables[name]) if name in project.tables else None
    return Standing(name, paper, title, kind, listed, status, (), rendered, report)


def _speed(project: Project, table: SpeedTable) -> dict[str, Any]:
    """Status, machines and report of a speed table; a figure is as far as all the tables that it draws."""
    try:
        sources = [find_source(project, project.speed_table(name)) for name in table.sources]
    except ResultError:  # rendering it says so
        sources = [None]
    known = [source for source in sources if source is not None]
    if len(known) < len(sources):
        return {"status": "not yet", "machines": (), "of_speed": True}
    machines = tuple(sorted({gpu_folder(source.record.gpu) for source in known}))
    status = "recorded" if any(source.recorded for source in known) else "computed"
    return {"status": status, "machines": machines, "report": speed_report(project, table), "of_speed": True}


def _report(project: Project, table: Table) -> Report | None:
    """The report of a table's written values; None where there are none or they are damaged (rendering it says so)."""
    try:
        values = read_values(project.root, table.id)
    except ResultError:
        return None
    return report_of(project, table, values, results_behind(project, values))


def _table(group: Sequence[Standing]) -> str:
    header = ["Target", "What it shows", "Kind", "Status", "Claims that hold", "fail", "not checkable"]
    return markdown_table(header, [_line(standing) for standing in group], "llllrrr")


def _line(standing: Standing) -> list[object]:
    link = f"[{standing.id}]({standing.id}.md)" if standing.rendered else standing.id
    status = f"recorded on {', '.join(standing.machines)}" if standing.status == "recorded" else standing.status
    counts: list[object] = ["-", "-", "-"]
    if standing.report is not None and (standing.report.claims.lines or not standing.of_speed):
        counts = [standing.score.holds, standing.score.fails, standing.score.unchecked]
    return [link, standing.title, standing.kind, status, *counts]
