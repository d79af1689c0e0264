"""The model of a report: the content of a page on accuracy or speed, before it is Markdown, HTML or LaTeX.

It is built once from a table's values and its definition. Texts are Markdown of one line. `whose` distinguishes our
numbers from the paper's everywhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reproduction.claims.claims import Score, Shown
from reproduction.claims.findings import Decision

Whose = Literal["ours", "published", "chance"]
ClaimsName = Literal["Claims of the paper", "Claims", "Hypotheses", "Goals"]


#: What is counted of claims that are no paper's: those that hold, and those that do not.
_DONE = {"Goals": ("reached", "missed"), "Hypotheses": ("confirmed", "refuted")}


class GridCell(NamedTuple):
    """A number as printed, "-" for none, and its owner."""

    text: str
    whose: Whose


@dataclass(frozen=True)
class GridColumn:
    """A column of numbers as printed, "-" for none.

    head: its header if alone. published: GPU or column of the paper's numbers next to ours, "" where there is one set;
    None for a column of its own.
    group, remark, title: the table's column that it belongs to, that column's model, and the header below these.
    """

    texts: Sequence[str]
    head: str = ""
    published: str | None = None
    group: str = ""
    remark: str = ""
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """A table of numbers. caption: their description, or nothing; `heading`: shown above as a heading of its own.

    stub, labels: the headers of the rows' names and labels, and these row by row.
    name: the part of a report that the grid belongs to, where it names its parts.
    whose: for columns of their own. chances: number of last rows with the level of chance.
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
        """The grid's part of a report, its caption, and its model."""
        part, common = f"{self.name}: " if self.name else "", f"; all columns {self.common}" if self.common else ""
        return f"{part}{self.caption}{common}"

    @property
    def lines(self) -> Iterator[tuple[Sequence[str], list[GridCell]]]:
        """The labels of each row, and a cell for each column."""
        for place, names in enumerate(self.labels):
            chance = place >= len(self.labels) - self.chances
            yield (
                names,
                [GridCell(one.texts[place], "chance" if chance else self.whose_in(one)) for one in self.columns],
            )

    def whose_in(self, column: GridColumn) -> Whose:
        """Owner of the numbers in a column."""
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
        """The remark shared by all of several groups."""
        remarks = {column.group: column.remark for column in self.columns}
        return next(iter(remarks.values())) if len(remarks) > 1 and len(set(remarks.values())) == 1 else ""


def beside(ours: GridColumn, *papers: GridColumn) -> tuple[GridColumn, ...]:
    """A column of ours and the paper's next to it, without those that have no number."""
    return (ours, *(paper for paper in papers if any(text != "-" for text in paper.texts)))


class Judged(NamedTuple):
    """A check of a claim, decided by our numbers and by the paper's. ours, published: the findings for each.

    on: the quantity that decides our numbers, in words; "" where it is not shown. by, second, second_says: the paper's
    quantity in words, its verdict, and the findings for that, where it does not decide.
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
        """The quantity that decides our numbers, as a clause."""
        return f", decided on {self.on}" if self.on else ""


@dataclass(frozen=True)
class ClaimLine:
    """A claim with its two verdicts, about its mechanism and about the paper's setting.

    quote: the paper's words. note: how it is checked. cause: for a claim not reproduced, the finding of its experiment,
    or that the cause is unknown.
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
        """Both verdicts, if requested, by their subject."""
        both = (("mechanism", self.mechanism), ("the paper's setting", self.setting))
        return [(about, judged) for about, judged in both if judged is not None]


class FactLine(NamedTuple):
    """A statement that is not judged, with our numbers and the paper's."""

    text: str
    section: str
    quote: str | None
    note: str | None
    ours: str
    published: str


@dataclass(frozen=True)
class Claims:
    """The claims of a table, under their name: a paper's, a report's of ours, hypotheses, or our own goals."""

    lines: tuple[ClaimLine, ...]
    score: Score
    name: ClaimsName
    facts: tuple[FactLine, ...] = ()

    @property
    def has_finer(self) -> bool:
        """Whether a verdict is decided by another quantity than the paper's."""
        return any(judged.second for line in self.lines for _, judged in line.verdicts)

    @property
    def title(self) -> str:
        """Number of reproduced mechanisms; of hypotheses those confirmed, of goals those reached."""
        if not self.score.total:
            return self.name
        done, against = _DONE.get(self.name, ("mechanisms reproduced", "not reproduced"))
        others = (
            (against, self.score.not_reproduced),
            ("no effect", self.score.no_effect),
            ("undecided", self.score.undecided),
        )
        named = (*others, ("not checkable", self.score.unchecked))
        counts = "".join(f", {count} {word}" for word, count in named if count)
        return f"{self.name}: {self.score.reproduced} of {self.score.total} {done}{counts}"


class Tasks(NamedTuple):
    """A column's accuracies by task: ours, and the paper's by its own tasks (no lines where it prints none)."""

    column: str
    ours: Grid
    published: Grid


class Fact(NamedTuple):
    """A fact about the origin of numbers."""

    name: str
    text: str

    @classmethod
    def of(cls, said: Iterable[str]) -> "list[Fact]":
        """Facts from lines with a name, a colon and a text."""
        return [cls(*line.split(": ", 1)) for line in said]


class RunLine(NamedTuple):
    """A run: its place, its number, its seconds, its key, and its file's path from the reports folder."""

    row: str
    column: str
    seed: int
    number: str
    seconds: str
    key: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A table's report: the content of its page and of its card in the index.

    lead: the caption with its source. meaning: up to three sentences.
    reading: whose the numbers are. figure: its caption. picture: the report whose figure it shows, if not its own.
    facts: device, date and code of the computed numbers. notes: what a reader must know of them.
    template, details: of its page, and the content of that page alone, by the template's names for it.
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
