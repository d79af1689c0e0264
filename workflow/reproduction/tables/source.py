"""Sources: where the numbers of a table come from, each a class in a module of `reproduction.sources`.

The plan, the workflow's rules, commands, pages, the scoreboard and MLflow work through this class and know no kind of
table. A source's module imports what measures, renders and draws inside of functions, since tables are loaded without.
"""

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.render.pages.model import Report
    from reproduction.render.tracking import Logged
    from reproduction.tables.project import Project
    from reproduction.tables.tables import OfPaper, Table

#: The package whose public modules are sources.
GROUP = "reproduction.sources"

Output = Literal["table", "figure", "page"]
"""What the workflow makes of a table: its numbers as a file, its figure, its page."""

Status = Literal["computed", "recorded", "elsewhere", "not yet"]

T = TypeVar("T", bound="Table")
C = TypeVar("C")


class Reached(NamedTuple):
    """How far a table is, on which other machines it was recorded, and its report once its numbers are there."""

    status: Status
    machines: Sequence[str] = ()
    report: "Report | None" = None


class Source(ABC, Generic[T, C]):
    """All that differs by where numbers come from. T: the source's tables; C: what is collected for one.

    `patterns` say which files hold its tables, from the folder workflow/, and `schema` what these say. `code`: the
    modules that make each output.
    """

    name: ClassVar[str]
    patterns: ClassVar[tuple[str, ...]]
    schema: "ClassVar[type[OfPaper]]"
    code: ClassVar[Mapping[Output, tuple[str, ...]]]

    @abstractmethod
    def load(self, path: Path, root: Path) -> Iterator[T]:
        """The tables of a file.

        Raises:
            ConfigError: what is wrong with one, in a sentence with file and field.
        """

    @property
    def file_kind(self) -> str:
        """How its files are called, those of any name `tables`."""
        return Path(self.patterns[0]).stem.replace("*", "tables")

    def settled(self, table: T, tables: "Mapping[str, Table]", root: Path) -> T:
        """A table with what follows from others, once all are loaded.

        Raises:
            ConfigError: it names something of another table that is not there.
        """
        return table

    @abstractmethod
    def planned(self, project: "Project", table: T) -> dict[str, Any]:
        """What the plan holds of a table by the fields of `run.plan.PlannedTable`, at least its definition."""

    @abstractmethod
    def collect(self, project: "Project", table: T) -> C:
        """A table's numbers, from what was measured.

        Raises:
            ResultError: something is not measured yet, or its file is damaged.
        """

    def written(self, project: "Project", table: T) -> C:
        """A table's numbers as they were collected last, though what is measured since may be newer.

        Raises:
            ResultError: they were not collected yet, or are damaged.
        """
        return self.collect(project, table)

    def agreed(self, project: "Project", table: T) -> C:
        """A table's numbers as they were collected, by which its page is made.

        Raises:
            ResultError: they are others than what is measured now says.
        """
        return self.collect(project, table)

    @abstractmethod
    def frame(self, collected: C) -> "pd.DataFrame":
        """Every number as a line (`frame.lines`); equal names of columns mean the same for all sources."""

    @abstractmethod
    def report(self, project: "Project", table: T, collected: C, logged: "Logged | None" = None) -> "Report":
        """What a table's page says. logged: where MLflow shows it."""

    def draw(self, project: "Project", table: T, path: Path, width: str | None = None) -> list[Path]:
        """Draw a table's figure and return the files (`render.figures.draw.draw`)."""
        raise NotImplementedError

    @abstractmethod
    def reached(self, project: "Project", table: T, rendered: bool) -> Reached:
        """How far a table is. rendered: whether its page is there."""

    def is_tracked(self, project: "Project", table: T) -> bool:
        """Whether there is something of a table that MLflow shows."""
        return False

    def log(self, project: "Project", tables: Sequence[T], collected: Mapping[str, C]) -> "dict[str, Logged]":
        """Make MLflow show tables, and say where by their ids; those that it has nothing of are left out.

        Args:
            collected: by the tables' ids.

        Raises:
            TrackingError: the store cannot be reached or written.
        """
        return {}


@functools.cache
def sources() -> dict[str, Source[Any, Any]]:
    """The sources by name: every public module of `reproduction.sources` defines one."""
    package = importlib.import_module(GROUP)
    modules = [importlib.import_module(f"{GROUP}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    made = (
        one()
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Source) and one.__module__ == module.__name__
    )
    return {source.name: source for source in made}


def find_source(name: str) -> Source[Any, Any]:
    """The source of that name."""
    return sources()[name]


def patterns() -> list[tuple[str, Source[Any, Any]]]:
    """Which files have the tables of which source; a pattern with a file's name goes before one for any."""
    found = ((pattern, source) for source in sources().values() for pattern in source.patterns)
    return sorted(found, key=lambda pair: pair[0].endswith("*.yaml"))


def files_of(root: Path) -> list[tuple[Path, Source[Any, Any]]]:
    """Every file with tables, and the source whose they are."""
    found: dict[Path, Source[Any, Any]] = {}
    for pattern, source in patterns():
        for path in (root / "workflow").glob(pattern):
            found.setdefault(path, source)
    return sorted(found.items(), key=lambda pair: pair[0])
