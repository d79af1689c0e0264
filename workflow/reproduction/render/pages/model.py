"""The model of a report: what a page says of a table, of accuracy or of speed, before it is Markdown, HTML or LaTeX.

It is built once from a table's values and its definition. Texts are Markdown of one line. `whose` tells our numbers
from the paper's wherever a number stands.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reproduction.claims.claims import Score, Shown
from reproduction.claims.findings import Decision
from reproduction.run.results import REPORTS, run_path

Whose = Literal["ours", "published", "chance"]
ClaimsName = Literal["Claims of the paper", "Claims", "Goals"]


class GridCell(NamedTuple):
    """A number as printed, "-" for none, and whose it is."""

    text: str
    whose: Whose


@dataclass(frozen=True)
class GridColumn:
    """A column of numbers as printed, "-" for none.

    head: what stands above it alone. published: of the paper's numbers beside ours the GPU or the column that they are
    of, "" where there is one set; None for a column of its own.
    group, remark, title: the table's column that it belongs to, what that is computed on, and the head below these.
    """

    texts: Sequence[str]
    head: str = ""
    published: str | None = None
    group: str = ""
    remark: str = ""
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """A table of numbers. caption: what they are, or nothing; `heading`: it stands above as a heading of its own.

    stub, labels: the heads of the rows' names and labels, and these row by row.
    name: the part of a report that the grid belongs to, where it names its parts.
    whose: of columns of their own. chances: how many of the last rows say what chance does.
    """

    caption: str
    stub: Sequence[str]
    labels: Sequence[Sequence[str]]
    columns: Sequence[GridColumn]
    heading: bool = False
    name: str = ""
    whose: Whose = "ours"
    chances: int = 0

    @property
    def what(self) -> str:
        """Its part of a report, what the numbers are, and on what."""
        part, common = f"{self.name}: " if self.name else "", f"; all columns {self.common}" if self.common else ""
        return f"{part}{self.caption}{common}"

    @property
    def lines(self) -> Iterator[tuple[Sequence[str], list[GridCell]]]:
        """Row by row the labels, and a cell for each column."""
        for place, names in enumerate(self.labels):
            chance = place >= len(self.labels) - self.chances
            yield (
                names,
                [GridCell(one.texts[place], "chance" if chance else self.whose_in(one)) for one in self.columns],
            )

    def whose_in(self, column: GridColumn) -> Whose:
        """Whose the numbers of a column are."""
        return self.whose if column.published is None else "published"

    @property
    def groups(self) -> list[tuple[str, str, int]]:
        """The groups of columns as (name, remark, width); none where columns belong to no group."""
        found: list[tuple[str, str, int]] = []
        for column in self.columns if all(column.group for column in self.columns) else ():
            width = found.pop()[2] if found and found[-1][0] == column.group else 0
            found.append((column.group, "" if self.common else column.remark, width + 1))
        return found

    @property
    def common(self) -> str:
        """The remark that all of several groups share."""
        remarks = {column.group: column.remark for column in self.columns}
        return next(iter(remarks.values())) if len(remarks) > 1 and len(set(remarks.values())) == 1 else ""


def beside(ours: GridColumn, *papers: GridColumn) -> tuple[GridColumn, ...]:
    """A column of ours and the paper's beside it, those left out that have no number."""
    return (ours, *(paper for paper in papers if any(text != "-" for text in paper.texts)))


class Judged(NamedTuple):
    """A check of a claim, decided by our numbers and by the paper's. ours, published: what stands behind each.

    on: what our numbers are decided on, in words; "" where that is not said. by, second, second_says: the paper's
    quantity in words, what it would say, and what stands behind that, where it is not what decides.
    """

    here: Shown
    papers: Decision
    ours: str
    published: str
    on: str = ""
    by: str = ""
    second: Shown | None = None
    second_says: str = ""

    @property
    def deciding(self) -> str:
        """What our numbers are decided on, as a clause."""
        return f", decided on {self.on}" if self.on else ""


@dataclass(frozen=True)
class ClaimLine:
    """A claim with its two verdicts, about its mechanism and about the paper's setting.

    quote: the paper's words. note: how it is checked. cause: of what is not reproduced what its experiment found, or
    that the cause is unknown.
    """

    text: str
    section: str
    quote: str | None
    note: str | None
    cause: str | None
    mechanism: Judged | None
    setting: Judged | None

    @property
    def verdicts(self) -> list[tuple[str, Judged]]:
        """Both verdicts, as far as they are asked, by what they are about."""
        both = (("mechanism", self.mechanism), ("the paper's setting", self.setting))
        return [(about, judged) for about, judged in both if judged is not None]


class FactLine(NamedTuple):
    """What is not judged: the statement, and our numbers and the paper's."""

    text: str
    section: str
    quote: str | None
    note: str | None
    ours: str
    published: str


@dataclass(frozen=True)
class Claims:
    """The claims of a table, under their name: what a paper says, what a report of ours says, or our own goals."""

    lines: tuple[ClaimLine, ...]
    score: Score
    name: ClaimsName
    facts: tuple[FactLine, ...] = ()

    @property
    def has_finer(self) -> bool:
        """Whether a verdict is decided on another quantity than the paper's."""
        return any(judged.second for line in self.lines for _, judged in line.verdicts)

    @property
    def title(self) -> str:
        """How many mechanisms are reproduced; of goals how many are reached."""
        if not self.score.total:
            return self.name
        goals = self.name == "Goals"
        done, against = ("reached", "missed") if goals else ("mechanisms reproduced", "not reproduced")
        others = ((against, self.score.not_reproduced), ("undecided", self.score.undecided))
        named = (*others, ("not checkable", self.score.unchecked))
        counts = "".join(f", {count} {word}" for word, count in named if count)
        return f"{self.name}: {self.score.reproduced} of {self.score.total} {done}{counts}"


class Tasks(NamedTuple):
    """A column's accuracies task by task: ours, and the paper's by its own tasks (no lines where it prints none)."""

    column: str
    ours: Grid
    published: Grid


class Fact(NamedTuple):
    """One thing to know of where numbers come from."""

    name: str
    text: str

    @classmethod
    def of(cls, said: Iterable[str]) -> "list[Fact]":
        """Facts from lines that are a name, a colon and what it is."""
        return [cls(*line.split(": ", 1)) for line in said]


class RunLine(NamedTuple):
    """One run: where it stands, its number, how many seconds it took, and its key."""

    row: str
    column: str
    seed: int
    number: str
    seconds: str
    key: str

    @property
    def path(self) -> str:
        """Its file, from the reports folder."""
        return os.path.relpath(run_path(self.key), REPORTS)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A table's report: what its page and a card of the index show.

    lead: the caption with its source. meaning: what it means, in up to three sentences.
    reading: whose the numbers are. figure: its caption. picture: the
    report whose figure it shows, if not its own.
    facts: on what, when and by which code the numbers were computed. notes: what a reader must know of them.
    template, details: of its page, and what that alone shows, by the template's names for it.
    """

    id: str
    title: str
    caption: str
    lead: str
    meaning: Sequence[str] = ()
    reading: Sequence[str] = ()
    figure: str | None = None
    picture: str | None = None
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    claims: Claims
    facts: Sequence[Fact] = ()
    tasks: Sequence[Tasks] = ()
    runs: Sequence[RunLine] = ()
    template: str = "pages/page.md.jinja"
    details: Mapping[str, Any] = field(default_factory=dict)
