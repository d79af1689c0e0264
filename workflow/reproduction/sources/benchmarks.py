"""Benchmarks: a cell is a function timed at a paper's shapes; its numbers are in the record of a GPU or a CPU.

Time and memory depend on shapes and on the device, never on trained weights. A record is this machine's own, or the
newest of those committed from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reproduction.benchmarks.records import committed_path, gpu_folder
from reproduction.benchmarks.registry import benchmark_digest, find
from reproduction.run.plan import Output
from reproduction.sources import Reached, Source
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedFile, SpeedTable
from reproduction.tables.speed.published import references
from reproduction.tables.tables import Table, tables_in
from rotquant.foundation.errors import ConfigError, ResultError, lookup
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.frame.speed import Measured
    from reproduction.render.pages.model import Report


class Benchmarks(Source[SpeedTable, "Measured"]):
    """Tables of time and memory."""

    name = "benchmarks"
    patterns = ("papers/*/speed.yaml", "*/speed.yaml")
    code: ClassVar[Mapping[Output, tuple[str, ...]]] = {
        "table": ("reproduction.frame.speed",),
        "figure": ("reproduction.render.figures.speed",),
        "page": ("reproduction.render.pages.benchmarks", "reproduction.render.pages.markdown"),
    }

    def load(self, path: Path, root: Path) -> Iterator[SpeedTable]:
        """Load tables; arguments fit the benchmarks of one device, and the paper's numbers exist."""
        for table in tables_in(path, root, SpeedFile, SpeedTable):
            try:
                devices = sorted({find(cell.benchmark, table.id).device for cell in table.cells})
                if len(devices) > 1:
                    both = " and ".join(devices)
                    raise ConfigError(f"table {table.id}: its benchmarks measure {both}, and a record is of one.")
                references(table, root)
            except ConfigError as error:
                raise ConfigError(f"{table.file}: {error}") from None
            yield table

    def kind(self, table: SpeedTable) -> str:
        return "time or memory"

    def settled(self, table: SpeedTable, tables: Mapping[str, Table], root: Path) -> SpeedTable:
        """Check that a figure draws existing columns."""
        of_speed = {name: one for name, one in tables.items() if isinstance(one, SpeedTable)}
        for part in table.drawing.parts if table.drawing else ():
            lookup(of_speed, part.table, f"figure {table.id}: unknown table").grid(part.grid).column(part.column)
        return table

    def planned(self, project: Project, table: SpeedTable) -> dict[str, Any]:
        """Plan a table; its definition covers its tables and the papers' numbers."""
        behind = [project.one(SpeedTable, name) for name in dict.fromkeys([table.id, *table.recorded])]
        texts = [(project.root / one.published).read_text() for one in behind if one.published]
        committed = {name: committed_path(project.root, name) for name in table.recorded}
        return {
            "definition": short_hash(canonical_json([[one.model_dump(mode="json") for one in behind], texts])),
            "figure": self.picture(project, table),
            "has_numbers": self.has_numbers(table),
            "on_gpu": table.device == "gpu",
            "benchmarks": tuple(sorted(cell.key for cell in table.cells)),
            "kernels": tuple(sorted({benchmark_digest(cell.benchmark) for cell in table.cells})),
            "records": {name: None if path is None else str(path) for name, path in committed.items()},
        }

    def collect(self, project: Project, table: SpeedTable) -> Measured:
        from reproduction.frame.speed import read_numbers

        return read_numbers(project, table)

    def has_numbers(self, table: SpeedTable) -> bool:
        return bool(table.grids)

    def frame(self, collected: Measured) -> pd.DataFrame:
        return collected.frame

    def report(self, project: Project, table: SpeedTable, collected: Measured) -> Report:
        from reproduction.render.pages.benchmarks import speed_report

        return speed_report(project, table, collected)

    def draw(self, project: Project, table: SpeedTable, collected: Measured, path: Path) -> None:
        from reproduction.render.figures.speed import draw

        draw(project, table, path)

    def reached(self, project: Project, table: SpeedTable, rendered: bool) -> Reached:
        """Progress of a table; a figure waits for all tables that it draws, rendered or not."""
        from reproduction.frame.speed import find_record

        known = [None]
        with suppress(ResultError):  # rendering reports it
            known = [find_record(project, project.one(SpeedTable, name)) for name in table.recorded]
        found = [record for record in known if record is not None]
        if len(found) < len(known):
            return Reached("not yet")
        machines = sorted({gpu_folder(shown.record.gpu) for shown in found})
        status = "recorded" if any(shown.recorded for shown in found) else "computed"
        return Reached(status, machines, self.report(project, table, self.collect(project, table)))
