"""Rankings: a number is a method's standing among those of its class, from the runs of other tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reproduction.run.plan import Output
from reproduction.sources import Source, source_of
from reproduction.tables.project import Project
from reproduction.tables.rankings import MethodClass, Ranking, RankingFile
from reproduction.tables.tables import RunTable, Table, tables_in
from rotquant.foundation.errors import lookup
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    import pandas as pd

    from reproduction.claims.ranking import Class
    from reproduction.render.pages.model import Report


class Rankings(Source[Ranking, "list[Class]"]):
    """Methods of several tables on one page."""

    name = "rankings"
    patterns = ("papers/*/ranking.yaml",)
    code: ClassVar[Mapping[Output, tuple[str, ...]]] = {
        "table": ("reproduction.render.pages.rankings",),
        "figure": ("reproduction.render.figures.rankings",),
        "page": ("reproduction.render.pages.rankings", "reproduction.render.pages.markdown"),
    }

    def load(self, path: Path, root: Path) -> Iterator[Ranking]:
        return tables_in(path, root, RankingFile, Ranking)

    def kind(self, table: Ranking) -> str:
        return "ranking"

    def settled(self, table: Ranking, tables: Mapping[str, Table], root: Path) -> Ranking:
        """Check that its classes are tables of runs that measure perplexity, and have the rows that it names."""
        of_runs = {
            name: one
            for name, one in tables.items()
            if isinstance(one, RunTable) and any(metric["kind"] == "perplexity" for metric in one.metrics)
        }
        for one in table.classes:
            found = lookup(of_runs, one.table, f"{table.file}: tables.{table.id}.classes: no table of perplexity")
            rows = dict.fromkeys(row.name for row in found.rows)
            lookup(rows, one.against, f"{table.file}: tables.{table.id}.classes: {one.table} computes no row")
            if one.less is not None:
                lookup(of_runs, one.less, f"{table.file}: tables.{table.id}.classes: no table of perplexity")
        return table

    def _classes(self, project: Project, table: Ranking) -> Iterator[tuple[MethodClass, RunTable, RunTable | None]]:
        """The classes whose tables are computed under this configuration, and their tables of less text."""
        known = {name: one for name, one in project.of(RunTable).items() if project.cells(name)}
        for one in table.classes:
            if one.table in known:
                yield one, known[one.table], known.get(one.less or "")

    def planned(self, project: Project, table: Ranking) -> dict[str, Any]:
        """Plan a ranking: the runs of all its tables; its definition covers theirs."""
        runs: dict[str, list[tuple[str, str, str]]] = {}
        definitions = [table.model_dump(mode="json")]
        for found in (one for _, *both in self._classes(project, table) for one in both if one is not None):
            plan = source_of(found).planned(project, found)
            definitions.append(plan["definition"])
            for key, places in plan["runs"].items():
                runs.setdefault(key, []).extend(places)
        return {"definition": short_hash(canonical_json(definitions)), "figure": table.id, "runs": runs}

    def collect(self, project: Project, table: Ranking) -> list[Class]:
        from reproduction.claims.ranking import class_of

        return [class_of(project, *found) for found in self._classes(project, table)]

    def frame(self, collected: list[Class]) -> pd.DataFrame:
        from reproduction.render.pages.rankings import frame

        return frame(collected)

    def report(self, project: Project, table: Ranking, collected: list[Class]) -> Report:
        from reproduction.render.pages.rankings import ranking_report

        return ranking_report(project, table, collected)

    def draw(self, project: Project, table: Ranking, collected: list[Class], path: Path) -> None:
        from reproduction.render.figures.rankings import draw

        draw(project, collected, path)
