"""Recipes: a cell is a fact of how a recipe quantizes, shown next to the paper's; nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reproduction.run.plan import Output
from reproduction.sources import Source
from reproduction.tables.project import Project
from reproduction.tables.settings import SettingsFile, SettingsTable, settle
from reproduction.tables.tables import Table, tables_in
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.render.pages.model import Report


class Recipes(Source[SettingsTable, SettingsTable]):
    """Tables of settings, which have all that is collected in them."""

    name = "recipes"
    patterns = ("papers/*/settings.yaml",)
    code: ClassVar[Mapping[Output, tuple[str, ...]]] = {
        "table": ("reproduction.sources.recipes",),
        "page": ("reproduction.render.pages.recipes", "reproduction.render.pages.markdown"),
    }

    def load(self, path: Path, root: Path) -> Iterator[SettingsTable]:
        return tables_in(path, root, SettingsFile, SettingsTable)

    def kind(self, table: SettingsTable) -> str:
        return "settings"

    def settled(self, table: SettingsTable, tables: Mapping[str, Table], root: Path) -> SettingsTable:
        try:
            return settle(table, tables, root)
        except ConfigError as error:
            raise ConfigError(f"{table.file}: tables.{table.id}: {error}") from None

    def planned(self, project: Project, table: SettingsTable) -> dict[str, Any]:
        """Plan a table; its definition covers its files and its cells' recipes."""
        return {"definition": short_hash(canonical_json(table.model_dump(mode="json")))}

    def collect(self, project: Project, table: SettingsTable) -> SettingsTable:
        return table

    def frame(self, collected: SettingsTable) -> pd.DataFrame:
        from reproduction.frame.lines import to_frame

        names = ("row", "column", "text", "published_text", "same", "note")
        cells = collected.cells
        return to_frame([(one.row, one.column, one.here, one.published, one.same, one.reason) for one in cells], names)

    def report(self, project: Project, table: SettingsTable, collected: SettingsTable) -> Report:
        from reproduction.render.pages.recipes import settings_report

        return settings_report(collected)
