"""What the index's template prints: papers, and a card for each target that is done. The template escapes all text."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from rotquant.reporting.figures.draw import figure_path
from rotquant.reporting.html.inline_svg import inline_svg
from rotquant.reporting.scoreboard import Standing, Standings, subjects, summary
from rotquant.study.project import Project
from rotquant.study.results import REPORTS, table_path


@dataclass(frozen=True)
class Card:
    """One target that is done: how it stands, with its report; its figure; files beside the page as (words, path)."""

    standing: Standing
    figure: Markup | None
    links: tuple[tuple[str, str], ...]

    @property
    def outcomes(self) -> str:
        """The verdicts that occur among its claims, as the filter reads them."""
        claims = self.standing.report.claims.lines if self.standing.report else ()
        return " ".join(dict.fromkeys(claim.here.replace(" ", "-") for claim in claims))


@dataclass(frozen=True)
class Paper:
    """One paper's section of the page: cards of what is done, and standings of what is not; counts in a sentence."""

    id: str
    title: str
    summary: str
    cards: tuple[Card, ...]
    pending: tuple[Standing, ...]


def papers(project: Project, found: Standings) -> list[Paper]:
    """The sections of the page.

    Raises:
        ResultError: a figure is damaged.
    """
    titles = subjects(project)
    return [
        Paper(
            paper,
            titles[paper],
            summary(group) if any(standing.listed for standing in group) else "",
            tuple(_card(project, standing) for standing in group if standing.status != "not yet"),
            tuple(standing for standing in group if standing.status == "not yet"),
        )
        for paper, group in found.items()
    ]


def _card(project: Project, standing: Standing) -> Card:
    path, figure = project.root / figure_path(standing.id), standing.report and standing.report.figure
    drawing = Markup(inline_svg(path, standing.id, figure.caption)) if figure and path.exists() else None
    return Card(standing, drawing, tuple(_links(project, standing)))


def _links(project: Project, standing: Standing) -> Iterator[tuple[str, str]]:
    """Files that exist. The page of a report is written with the index."""
    report: Path = REPORTS / f"{standing.id}.md"
    for words, path, shown in (("full report", report, ".html"), ("table as CSV", table_path(standing.id), ".csv")):
        if (project.root / path).exists():
            yield words, os.path.relpath(path.with_suffix(shown), REPORTS)
