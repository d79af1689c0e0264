"""The scoreboard: every table and figure of the papers and every report of our own, and their progress.

A target is a table or figure of a paper that is defined as data. It is computed when its report was rendered from runs
made here or imported, recorded when results/bench/<gpu>/ has its measurements from another machine's GPU. Progress is
read from the files, never from a list. `index` writes it as Markdown; `reproduction.scoreboard.page` shows the same
standings as a page.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from reproduction.claims.claims import Score
from reproduction.render.pages.markdown import page_path, rendered
from reproduction.render.pages.model import Report
from reproduction.run.results import table_path
from reproduction.sources import Status, source_of
from reproduction.tables.project import Project
from reproduction.tables.tables import Table
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_object

#: Results of the same seeds on two machines.
MACHINES = Path("workflow/resources/machines.json")


@dataclass(frozen=True)
class Standing:
    """Progress of one target.

    kind: its kind, in words. listed: whether it is in the paper; the others are reports of our own.
    rendered: whether its page exists. csv: its numbers, where they exist.
    status, machines: computed here, recorded on these GPUs, or neither.
    report: its content; None before its numbers are collected.
    """

    id: str
    paper: str
    title: str
    kind: str
    listed: bool
    rendered: bool
    csv: Path | None
    status: Status
    machines: Sequence[str]
    report: Report | None

    @property
    def done(self) -> bool:
        """Whether there is something to show."""
        return self.status != "not yet"

    @property
    def label(self) -> str:
        """The paper's label, such as "Table 1"; a word for a report of our own."""
        name = self.id.removeprefix(f"{self.paper}_")
        return re.sub(r"^(Table|Figure|Lemma)(?=\d)", r"\1 ", name.capitalize())

    @property
    def score(self) -> Score:
        """Verdicts of its claims."""
        return Score() if self.report is None else self.report.claims.score


Standings = Mapping[str, Sequence[Standing]]
"""Standings by paper."""


def standings(project: Project) -> Standings:
    """Every target by paper, then the paper's further reports; reports about no paper come last."""
    tables = sorted(project.tables.values(), key=lambda table: not table.is_printed)
    return {
        paper: tuple(_standing(project, table) for table in tables if table.paper == paper)
        for paper in subjects(project)
    }


def subjects(project: Project) -> dict[str, str]:
    """The papers by their short name, with their titles; then the other subjects of reports."""
    tables = sorted(project.tables.values(), key=lambda table: not table.is_printed)
    return {table.paper: table.paper_title for table in tables}


def index(project: Project, found: Standings | None = None) -> str:
    """The scoreboard as Markdown; links are relative to the reports folder. found: the standings, where known."""
    noise = machine_noise(project.root)
    return rendered("pages/index.md.jinja", titles=subjects(project), found=found or standings(project), noise=noise)


def machine_noise(root: Path) -> str:
    """Effect of another CPU's arithmetic on the same seeds, in a sentence; empty if it was not recorded."""
    path = root / MACHINES
    if not path.exists():
        return ""
    cells = read_object(path, "record of machines").get("cells", [])
    try:
        moved, kept = (
            [abs(100 * (cell[name] / cell["perplexity"] - 1)) for cell in cells]
            for name in ("elsewhere", "same_weights")
        )
        largest, usual, stored, count = max(moved), median(moved), max(kept), len(cells)
    except (TypeError, LookupError, ValueError, ArithmeticError):
        raise ResultError(f"record of machines {path} is damaged (cells); take the committed one.") from None
    return (
        "In another CPU's arithmetic the same seeds move the perplexity of a quantized model by up to "
        f"{largest:.1f} % (median {usual:.1f} %). With the same stored weights it is up to {stored:.1f} % "
        f"({MACHINES}, {count} models, 20 windows)."
    )


def _standing(project: Project, table: Table) -> Standing:
    rendered = (project.root / page_path(table.id)).exists()
    csv = table_path(table.id) if (project.root / table_path(table.id)).exists() else None
    source = source_of(table)
    kind = source.kind(table) if table.is_printed else "report of our own"
    said = (table.id, table.paper, table.title, kind, table.is_printed, rendered, csv)
    return Standing(*said, *source.reached(project, table, rendered))
