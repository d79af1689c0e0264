"""Runs: a cell is a recipe applied to a model and measured, once for each seed; its numbers are in run files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reproduction.run.plan import Output
from reproduction.run.results import RunResult
from reproduction.sources import Source
from reproduction.tables.checks import named_by_experiment
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable, Table, TableFile, check_published, tables_in
from rotquant.foundation.errors import lookup
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.frame.values import Values
    from reproduction.render.pages.model import Report

Collected = tuple["Values", dict[str, RunResult]]
"""A table's values, and their run results by key."""


class Runs(Source[RunTable, Collected]):
    """Tables of accuracy and other measurements of a model."""

    name = "runs"
    patterns = ("papers/*/*.yaml",)
    code: ClassVar[Mapping[Output, tuple[str, ...]]] = {
        "table": ("reproduction.frame.values",),
        "figure": ("reproduction.render.figures.draw",),
        "page": ("reproduction.render.pages.runs", "reproduction.render.pages.markdown"),
    }

    def load(self, path: Path, root: Path) -> Iterator[RunTable]:
        for table in tables_in(path, root, TableFile, RunTable):
            check_published(table, root)
            yield table

    def kind(self, table: RunTable) -> str:
        scored = any(metric["kind"] in ("perplexity", "zero_shot") for metric in table.metrics)
        return "accuracy" if scored else "analysis"

    def settled(self, table: RunTable, tables: Mapping[str, Table], root: Path) -> RunTable:
        """Check that claims' experiments and regimes name computed rows, and columns, of an existing table of runs."""
        of_runs = {name: one for name, one in tables.items() if isinstance(one, RunTable)}
        for number, claim in enumerate(table.claims, 1):
            asked: list[tuple[str, str | None, Iterable[tuple[str, str]]]] = []
            if claim.experiment is not None:
                asked.append(("experiment", claim.experiment.target, named_by_experiment(claim.experiment)))
            if claim.regime is not None:
                asked.append(("regime", claim.regime.target, (("row", row) for row in claim.regime.rows)))
            for what, name, named in asked:
                where = f"table {table.id}, claim {number}, {what}"
                target = lookup(of_runs, name or table.id, f"{where}: unknown target")
                rows = {row.name: row for row in target.rows}
                columns = {column.name: column for column in target.columns}
                for kind, each in named:
                    lookup(rows if kind == "row" else columns, each, f"{where}: {target.id} computes no {kind}")
        return table

    def planned(self, project: Project, table: RunTable) -> dict[str, Any]:
        """Plan a table; its definition covers YAML, published values, slots and runs."""
        published = sorted((*cell, *map(str, printed)) for cell, printed in project.published(table).items())
        slots = {column: project.slot(table, column).model_dump(mode="json") for column in project.columns(table)}
        cells = project.cells(table.id)
        keys = [run.key for cell in cells for run in cell.runs]
        places: dict[str, list[tuple[str, str, str]]] = {}
        for cell in cells:
            for run in cell.runs:
                places.setdefault(run.key, []).append((cell.row, cell.column, table.column(cell.column).slot))
        remarks = project.remarks(table)
        shown = [table.model_dump(mode="json"), published, slots, keys, *remarks]
        return {
            "definition": short_hash(canonical_json(shown)),
            "figure": self.picture(project, table),
            "runs": places,
            "remarks": (*remarks, *project.lacking(table)),
        }

    def collect(self, project: Project, table: RunTable) -> Collected:
        from reproduction.frame.values import collect

        return collect(project, table)

    def picture(self, project: Project, table: RunTable) -> str | None:
        return project.picture(table)

    def frame(self, collected: Collected) -> pd.DataFrame:
        return collected[0].frame

    def report(self, project: Project, table: RunTable, collected: Collected) -> Report:
        from reproduction.render.pages.runs import runs_report

        return runs_report(project, table, *collected)

    def draw(self, project: Project, table: RunTable, collected: Collected, path: Path) -> None:
        from reproduction.render.figures.draw import draw

        draw(project, table, collected[0], path)
