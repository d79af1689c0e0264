"""The model of a report: the content of a page on accuracy or speed, before it is Markdown, HTML or LaTeX.

It is built once from a table's values and its definition. Texts are Markdown of one line. `whose` distinguishes our
numbers from the paper's everywhere.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reproduction.claims.claims import Score, Shown
from reproduction.claims.findings import Decision
from reproduction.tables.checks import About
from reproduction.tables.quantities import Quantity

Whose = Literal["ours", "published", "chance"]
Word = Literal["agrees", "disagrees", "not tested here"]
Finer = Shown | Literal["in direction"]
ClaimsName = Literal["Claims of the paper", "Claims", "Hypotheses", "Goals", "Causes"]


#: With more claims than these, the first screen leaves out those that are not tested.
MOST = 8

#: The end of a sentence; "Eq. 3" has none.
_END = re.compile(r"(?<!Eq\.)(?<!Sec\.)(?<!Fig\.)(?<=[.?!])\s+(?=\S)")


class GridCell(NamedTuple):
    """A number as printed, "-" for none, its owner, and whether it is the best of those that it is compared with."""

    text: str
    whose: Whose
    best: bool = False


@dataclass(frozen=True)
class GridColumn:
    """A column of numbers as printed, "-" for none.

    head: its header if alone. published: GPU or column of the paper's numbers next to ours, "" where there is one set;
    None for a column of its own.
    group, remark, title: the table's column that it belongs to, that column's model, and the header below these.
    column, quantity: the table's column and the quantity that the numbers are of.
    """

    texts: Sequence[str]
    head: str = ""
    published: str | None = None
    group: str = ""
    remark: str = ""
    title: str = ""
    column: str = ""
    quantity: Quantity | None = None


@dataclass(frozen=True)
class Grid:
    """A table of numbers. caption: their description, or nothing.

    stub, labels: the headers of the rows' names and labels, and these row by row.
    name: the part of a report that the grid belongs to, where it names its parts.
    whose: for columns of their own. chances: number of last rows with the level of chance.
    best: places (row, column) of the best numbers. rules: rows above which a rule stands.
    """

    caption: str
    stub: Sequence[str]
    labels: Sequence[Sequence[str]]
    columns: Sequence[GridColumn]
    name: str = ""
    whose: Whose = "ours"
    chances: int = 0
    best: frozenset[tuple[int, int]] = frozenset()
    rules: tuple[int, ...] = ()

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
            cells = [
                GridCell(one.texts[place], "chance" if chance else self.whose_in(one), (place, number) in self.best)
                for number, one in enumerate(self.columns)
            ]
            yield names, cells

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


class Comparison(NamedTuple):
    """A comparison as printed: its place, the compared numbers, their effect and bound, its decision, the paper's."""

    place: str
    here: str
    effect: str
    decision: str
    paper: str


class CheckLine(NamedTuple):
    """A check of a claim with its comparisons.

    papers: the verdict of the paper's own numbers. on: the quantity that is compared, "" where it is the claim's.
    decides: whether this quantity does.
    """

    about: About
    here: Shown
    papers: Decision | None
    on: str
    comparisons: tuple[Comparison, ...]
    decides: bool = True


@dataclass(frozen=True)
class ClaimLine:
    """A claim as a reader sees it, and how it was decided.

    number: its place among the table's. headline: whether it goes first. judged: whether it is, or is a fact. word:
    whether it agrees. finer: the verdict, where the word does not say it; or that a direction agrees whose size is not
    tested.
    here, paper: the numbers of the deciding comparison. why: the cause of a disagreement that an experiment supports;
    cause: all that is known of one. same_as: number of a claim with the same mechanism. quote: the paper's words.
    note: how it is checked.
    """

    number: int
    text: str
    section: str
    quote: str | None
    note: str | None
    headline: bool
    judged: bool
    word: Word
    finer: Finer | None
    here: str
    paper: str
    why: str
    cause: str
    same_as: int | None
    checks: tuple[CheckLine, ...]


@dataclass(frozen=True)
class Claims:
    """The claims of a table, under their name: a paper's, a report's of ours, hypotheses, our own goals, or causes that
    other pages have it test."""

    lines: tuple[ClaimLine, ...]
    score: Score
    name: ClaimsName

    @property
    def shown(self) -> tuple[ClaimLine, ...]:
        """Those of the first screen: what is judged, without repetitions; on a page without any the facts that have
        numbers. Of many only those that are tested, which come first."""
        judged = [line for line in self.lines if line.judged] or [line for line in self.lines if line.checks]
        words = {line.number: line.word for line in self.lines}
        once = [line for line in judged if line.same_as is None or words[line.same_as] != line.word]
        tested = [line for line in once if line.word != "not tested here"]
        shown = tested if tested and len(once) > MOST else once
        return tuple(sorted(shown, key=lambda line: (not line.headline, line.word == "not tested here")))


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


@dataclass(frozen=True, kw_only=True)
class Report:
    """A table's report: the content of its page and of its card in the index.

    caption: what it shows; source: where it stands. grids: its numbers; more: those that fold.
    reading: a sentence on whose the numbers are.
    figure: its caption. picture: the report whose figure it shows, if not its own.
    facts: device, date and code of the computed numbers. notes: what a reader must know of them.
    template, details: of its page, and the content of that page alone, by the template's names for it.
    """

    id: str
    title: str
    caption: str
    source: str
    figure: str | None = None
    picture: str | None = None
    grids: Sequence[Grid] = ()
    more: Sequence[Grid] = ()
    reading: str = ""
    notes: Sequence[str] = ()
    claims: Claims
    facts: Sequence[Fact] = ()
    template: str = "pages/page.md.jinja"
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """What it shows, in one sentence."""
        return _END.split(self.caption.strip(), maxsplit=1)[0]
