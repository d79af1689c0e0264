"""Elsewhere: a cell is a number that somebody else measured, read from a CSV that names the source; nothing is run.

It is shown next to the paper's number, as our own numbers are, and decides claims. Its windows and seeds are unknown,
so it is compared as printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reproduction.sources import Reached, Source
from reproduction.tables.elsewhere import ElsewhereFile, ElsewhereTable, completed
from reproduction.tables.project import Project
from reproduction.tables.tables import tables_in
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import canonical_json, file_inside, short_hash

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.frame.elsewhere import Elsewhere
    from reproduction.render.pages.model import Logged, Report


class FromElsewhere(Source[ElsewhereTable, "Elsewhere"]):
    """Tables of numbers that somebody else measured."""

    name = "elsewhere"
    patterns = ("papers/*/elsewhere.yaml",)
    code: ClassVar = {
        "table": ("reproduction.frame.elsewhere",),
        "page": ("reproduction.render.pages.elsewhere", "reproduction.render.pages.markdown"),
    }
    schema = ElsewhereFile

    def load(self, path: Path, root: Path) -> Iterator[ElsewhereTable]:
        """Load tables; named rows, columns and metrics must be in the CSV."""
        for table in tables_in(path, root, ElsewhereFile, ElsewhereTable):
            folder = path.relative_to(root).parent
            numbers = file_inside(folder, table.numbers, f"{folder}: numbers of {table.id}", ConfigError).as_posix()
            try:
                yield completed(table.model_copy(update={"numbers": numbers}), root)
            except ConfigError as error:
                raise ConfigError(f"{table.file}: tables.{table.id}: {error}") from None

    def planned(self, project: Project, table: ElsewhereTable) -> dict[str, Any]:
        """Plan a table; its definition covers its files' contents."""
        files = (table.numbers, *filter(None, [table.published]))
        texts = [(project.root / file).read_text(encoding="utf-8") for file in files]
        return {"definition": short_hash(canonical_json([table.model_dump(mode="json"), texts]))}

    def collect(self, project: Project, table: ElsewhereTable) -> Elsewhere:
        from reproduction.frame.elsewhere import collect

        return collect(table, project.root)

    def frame(self, collected: Elsewhere) -> pd.DataFrame:
        return collected.frame

    def report(
        self, project: Project, table: ElsewhereTable, collected: Elsewhere, logged: Logged | None = None
    ) -> Report:
        from reproduction.render.pages.elsewhere import elsewhere_report

        return elsewhere_report(table, collected)

    def reached(self, project: Project, table: ElsewhereTable, rendered: bool) -> Reached:
        report = self.report(project, table, self.collect(project, table)) if rendered else None
        return Reached("elsewhere" if rendered else "not yet", report=report)
