"""Rankings as data: methods of several tables of runs, each a class of bits, compared on what these tables compute."""

from typing import Annotated, ClassVar

from pydantic import Field

from reproduction.reading.written import Many, Written
from reproduction.tables.tables import OfPaper, Table, Titled


class MethodClass(Written):
    """The rows of a table as methods of one class."""

    table: str
    """A table of runs that measures perplexity."""
    name: str
    """The class as readers know it, such as W4A4KV4."""
    against: str
    """The row that the others are compared with."""
    less: str | None = Field(default=None, exclude_if=lambda table: table is None)
    """A table of some of the rows with less calibration text (`text_share`)."""


class RankingFields(Titled):
    """A ranking of the methods of some classes."""

    id: Annotated[str, Field(pattern="^[a-z0-9]+(_[a-z0-9]+)?$")]
    """The subject of its file, whose first page it is, or as other tables have it."""
    classes: Annotated[Many[MethodClass], Field(min_length=1)]
    """The classes, in the order of the page."""
    figure: str
    """The caption of its figure."""


class RankingFile(OfPaper):
    """A ranking is data: which tables it reads, and what their rows are compared with."""

    tables: Annotated[Many[RankingFields], Field(min_length=1)]
    """The rankings."""


class Ranking(RankingFields, Table):
    """A ranking whose numbers are those of its tables."""

    of: ClassVar[str] = "rankings"

    @property
    def drawn(self) -> str:
        """The caption of its figure."""
        return self.figure
