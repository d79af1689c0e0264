"""Sources of tables' numbers: runs, benchmarks and recipes, each a class in one module.

The plan, the workflow's rules, commands, pages and the scoreboard use `Source` and know no kind of table. Every
command loads this package, so what collects, judges and renders is imported in functions (pandas and scipy with it).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from reproduction.run.plan import Output
from reproduction.tables.configuration import Config, find_root, load_config
from reproduction.tables.fitting import Fitting, Known
from reproduction.tables.project import Project, no_slot
from reproduction.tables.resolution import check_names
from reproduction.tables.tables import RunTable, Table, in_order, with_rows
from rotquant.foundation.errors import ConfigError, ResultError

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.render.pages.model import Report

Status = Literal["computed", "recorded", "not yet"]

T = TypeVar("T", bound=Table)
C = TypeVar("C")


class Reached(NamedTuple):
    """Progress of a table, the other machines with records of it, and its report once its numbers exist."""

    status: Status
    machines: Sequence[str] = ()
    report: Report | None = None


class Source(ABC, Generic[T, C]):
    """Base class of sources. T: the source's kind of table; C: the numbers collected for one.

    `patterns`: the files with its tables, relative to workflow/. `code`: the modules that make each output.
    """

    name: ClassVar[str]
    patterns: ClassVar[tuple[str, ...]]
    code: ClassVar[Mapping[Output, tuple[str, ...]]]

    @abstractmethod
    def load(self, path: Path, root: Path) -> Iterator[T]:
        """Load the tables of a file.

        Raises:
            ConfigError: an error in a table, in a message with file and field.
        """

    @abstractmethod
    def kind(self, table: T) -> str:
        """What a table is about, in a few words."""

    def settled(self, table: T, tables: Mapping[str, Table], root: Path) -> T:
        """Complete a table with data from other tables, once all are loaded.

        Raises:
            ConfigError: it names something in another table that does not exist.
        """
        return table

    @abstractmethod
    def planned(self, project: Project, table: T) -> dict[str, Any]:
        """The plan's data for a table by the fields of `run.plan.PlannedTable`, at least its definition."""

    @abstractmethod
    def collect(self, project: Project, table: T) -> C:
        """Collect a table's numbers from the measurements.

        Raises:
            ResultError: something is not measured yet, or its file is damaged.
        """

    def has_numbers(self, table: T) -> bool:
        """Whether a table has numbers of its own, in addition to those of other tables in its figure."""
        return True

    def picture(self, project: Project, table: T) -> str | None:
        """The table whose figure a table shows, if any."""
        return table.id if table.drawn is not None else None

    @abstractmethod
    def frame(self, collected: C) -> pd.DataFrame:
        """A data frame with one line per number (`frame.lines`); column names mean the same for all sources."""

    @abstractmethod
    def report(self, project: Project, table: T, collected: C) -> Report:
        """The content of a table's page."""

    def draw(self, project: Project, table: T, collected: C, path: Path) -> None:
        """Draw a table's figure (`render.figures.draw.draw`)."""
        raise NotImplementedError

    def reached(self, project: Project, table: T, rendered: bool) -> Reached:
        """Progress of a table. rendered: whether its page exists."""
        if not rendered:
            return Reached("not yet")
        report = None
        with suppress(ResultError):  # rendering reports it
            report = self.report(project, table, self.collect(project, table))
        return Reached("computed", report=report)


@functools.cache
def sources() -> dict[str, Source[Any, Any]]:
    """The sources by name: every module of this package defines one.

    Raises:
        ConfigError: what one of them imports is not valid Python.
    """
    try:
        modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    except SyntaxError as error:
        raise ConfigError(f"{error.filename} is not valid Python (line {error.lineno}: {error.msg}).") from None
    made = (
        one()
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Source) and one.__module__ == module.__name__
    )
    return {source.name: source for source in made}


def source_of(table: Table) -> Source[Any, Any]:
    """The source of a table's numbers."""
    return sources()[table.of]


def patterns() -> list[tuple[str, Source[Any, Any]]]:
    """File patterns with their sources; a pattern with a file's name precedes one for any name."""
    found = ((pattern, source) for source in sources().values() for pattern in source.patterns)
    return sorted(found, key=lambda pair: pair[0].endswith("*.yaml"))


def load_project(
    overrides: Sequence[str | Path] = (),
    root: Path | None = None,
    config: Config | None = None,
    fits: Mapping[str, Fitting] | None = None,
    named: Mapping[str, str] | None = None,
    known: Known | None = None,
) -> Project:
    """Load the project around the working folder: its configuration (unless given) and the tables of all papers, with
    those of the configuration's own folders.

    Args:
        fits: how recipes fit their models, where a plan says it. known: what earlier projects found out.

    Raises:
        ConfigError: no project here, or a file that does not satisfy its schema.
    """
    root = root or find_root()
    config = config or load_config(overrides, root)
    tables = load_tables(root, config.folders(root))
    runs = {name: table for name, table in tables.items() if isinstance(table, RunTable)}
    check_names(config, runs, root)
    for name, rows in config.rows.items():
        runs[name] = tables[name] = with_rows(runs[name], rows, config.where("rows", name))
    left_out = {}
    for name, table in runs.items():
        if not any(column.slot in config.slots for column in table.columns):
            left_out[name] = no_slot(config, table.columns[0].slot)
            del tables[name]
    return Project(root, config, tables, left_out, fits, named, known or Known())


def load_tables(root: Path, folders: Sequence[Path] = ()) -> dict[str, Table]:
    """The tables of all sources by id, in the papers' order.

    Args:
        folders: further ones, as those in workflow/papers are.

    Raises:
        ConfigError: a file that does not satisfy its schema, two tables with one id, or a name that refers to nothing.
    """
    files: dict[Path, Source[Any, Any]] = {}
    for pattern, source in patterns():
        one = pattern.removeprefix("papers/*/")
        own = (path for folder in folders for path in folder.glob(one) if one != pattern)
        for path in (*(root / "workflow").glob(pattern), *own):
            files.setdefault(path, source)
    found: dict[str, Table] = {}
    for path, source in sorted(files.items(), key=lambda pair: pair[0]):
        for table in source.load(path, root):
            if table.id in found:
                raise ConfigError(f"{path}: table {table.id!r} is defined twice.")
            found[table.id] = table
    return {one.id: source_of(one).settled(one, found, root) for one in sorted(found.values(), key=in_order)}
