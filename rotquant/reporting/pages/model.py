"""The model of a report: what a page says of a table, of accuracy or of speed, before it is Markdown, HTML or LaTeX.

It is built once from a table's values and its definition. Texts are Markdown of one line. `whose` tells our numbers
from the paper's wherever a number stands.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from rotquant.reporting.claims import Score
from rotquant.study.results import REPORTS, run_path

Whose = Literal["ours", "published", "chance"]
ClaimsName = Literal["Claims of the paper", "Claims", "Goals"]
Decision = Literal["holds", "fails", "not checkable"]


class GridCell(NamedTuple):
    """A number as printed, "-" for none, and whose it is."""

    text: str
    whose: Whose = "ours"


@dataclass(frozen=True)
class GridColumn:
    """A column of numbers.

    head: what stands above it alone. published: of the paper's numbers beside ours the GPU that they are of, "" where
    the paper has one set; None for a column of its own.
    group, remark, title: the table's column that it belongs to, what that is computed on, and the head below these.
    """

    head: str = ""
    published: str | None = None
    group: str = ""
    remark: str = ""
    title: str = ""


class GridLine(NamedTuple):
    """A row: its name and labels, and a cell for each column."""

    labels: tuple[str, ...]
    cells: tuple[GridCell, ...]


@dataclass(frozen=True)
class Grid:
    """A table of numbers. caption: what they are, or nothing; `heading`: it stands above as a heading of its own.

    name: the part of a report that the grid belongs to, where it names its parts.
    """

    kind: ClassVar = "grid"
    caption: str
    stub: tuple[str, ...]
    columns: tuple[GridColumn, ...]
    lines: tuple[GridLine, ...]
    heading: bool = False
    name: str = ""

    @classmethod
    def of_columns(
        cls,
        caption: str,
        stub: Sequence[str],
        labels: Sequence[tuple[str, ...]],
        columns: Iterable[tuple[GridColumn, Sequence[str]]],
        *,
        heading: bool = False,
        name: str = "",
    ) -> "Grid":
        """A grid from the labels of its rows and what each column prints, the paper's left out where it has none."""
        heads: list[GridColumn] = []
        cells: list[tuple[GridCell, ...]] = [() for _ in labels]
        for column, texts in columns:
            if column.published is None or any(text != "-" for text in texts):
                heads.append(column)
                whose: Whose = "ours" if column.published is None else "published"
                cells = [(*line, GridCell(text, whose)) for line, text in zip(cells, texts, strict=True)]
        lines = tuple(map(GridLine, labels, cells))
        return cls(caption, tuple(stub), tuple(heads), lines, heading, name)

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


@dataclass(frozen=True)
class Listing:
    """A table of texts; `align` has one letter per column, l or r."""

    kind: ClassVar = "listing"
    header: Sequence[str]
    lines: Sequence[Sequence[object]]
    align: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    kind: ClassVar = "bullets"
    lines: Sequence[str]


@dataclass(frozen=True)
class Folded:
    """Blocks that a reader opens, under their summary."""

    kind: ClassVar = "folded"
    summary: str
    blocks: "Sequence[Block]"


@dataclass(frozen=True)
class ClaimLine:
    """A claim, decided by our numbers and by the paper's.

    note: how it is checked. why: what may explain its failure here. ours, published: what stands behind each verdict.
    """

    text: str
    section: str
    note: str | None
    why: str | None
    here: Decision
    papers: Decision
    ours: str
    published: str


@dataclass(frozen=True)
class Claims:
    """The claims of a table, under their name: what a paper says, what a report of ours says, or our own goals."""

    kind: ClassVar = "claims"
    lines: tuple[ClaimLine, ...]
    score: Score
    name: ClaimsName

    @property
    def title(self) -> str:
        """How many of them hold."""
        verb = "are reached" if self.name == "Goals" else "hold here"
        unchecked = f", {self.score.unchecked} not checkable" if self.score.unchecked else ""
        return f"{self.name}: {self.score.holds} of {self.score.checked} {verb}{unchecked}"


Block = str | Grid | Listing | Bullets | Folded | Claims
"""A part of a section: a paragraph, or one of the others."""


class Section(NamedTuple):
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


class Figure(NamedTuple):
    """A report's figure: its caption, and its path from the reports folder."""

    caption: str
    path: str


class Tasks(NamedTuple):
    """A column's accuracies task by task: ours, and the paper's by its own tasks (no lines where it prints none)."""

    column: str
    ours: Grid
    published: Grid


class Fact(NamedTuple):
    """One thing to know of where numbers come from; `between` stands between its name and its text in a sentence."""

    name: str
    text: str
    between: str = ": "

    @property
    def sentence(self) -> str:
        """Name and text."""
        return f"{self.name}{self.between}{self.text}"


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


@dataclass(frozen=True)
class Report:
    """A table's report. What a card of the index shows has a field; `sections` is the whole page below the figure.

    lead: the caption with its source. reading: whose the numbers are. facts: on what, when and by which code they were
    computed. notes: what a reader must know of the numbers.
    """

    title: str
    caption: str
    lead: str
    reading: tuple[str, ...]
    figure: Figure | None
    grids: tuple[Grid, ...]
    notes: tuple[str, ...]
    claims: Claims
    sections: tuple[Section, ...]
    facts: tuple[Fact, ...]
    tasks: tuple[Tasks, ...] = ()
    runs: tuple[RunLine, ...] = ()
