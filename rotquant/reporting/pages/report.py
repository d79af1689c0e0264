"""The report of a table of accuracy: ours beside the paper's, claims, and each number's origin.

Three marks run through all pages: numbers computed here stand upright, *published* ones in italics, and numbers
recorded on another machine say on which. Nothing is printed that no result file holds.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from rotquant.reporting.claims import outcomes
from rotquant.reporting.figures.draw import figure_path
from rotquant.reporting.pages import origins
from rotquant.reporting.pages.grids import change_grids, task_grids, value_grids
from rotquant.reporting.pages.model import Block, Bullets, Figure, Report, Section
from rotquant.reporting.pages.tasks import task_blocks, zero_shot_runs
from rotquant.reporting.pages.verdicts import claims_of
from rotquant.reporting.tracking import Logged
from rotquant.reporting.words.describe import is_about_models, is_of_the_paper, is_stand_in, title
from rotquant.reporting.words.numbers import not_finite
from rotquant.study.project import Project
from rotquant.study.results import REPORTS, table_path
from rotquant.study.speed.definitions import SpeedTable
from rotquant.study.tables import Table
from rotquant.study.values import Values


def report_of(
    project: Project, table: Table, values: Values, results: origins.Results, logged: Logged | None = None
) -> Report:
    """The report of a table's values.

    Args:
        results: the runs behind them. Of an older table some may be missing; what they alone know is left out.
        logged: where MLflow shows them.
    """
    on_models = is_about_models(table)
    stand_ins = any(is_stand_in(project.slot(table, column)) for column in project.columns(table))
    name = "Claims of the paper" if is_of_the_paper(table) else "Claims"
    claims = claims_of(outcomes(project, table, values), name, explain=stand_ins)
    grids, facts = value_grids(project, table, values), origins.origin_facts(results)
    measured = zero_shot_runs(project, table)
    tasks = task_grids(project, table, values, results) if measured else ()
    runs = origins.run_lines(project, table, values, results)
    footnotes = _footnotes(project, table, values)

    def sections() -> Iterator[tuple[str, list[Block]]]:
        yield "Values", [*grids, Bullets(footnotes)]
        if claims.lines:
            yield claims.title, [claims]
        if changes := change_grids(project, table, values):
            note = f"In percent of the column's {table.baseline} row. Deviations are the row's own."
            yield f"Change from {table.baseline}", [*changes, note]
        if tasks:
            yield "Tasks", list(task_blocks(table, measured, results, tasks))
        if on_models:
            yield "What each column is", [origins.column_listing(project, table)]
            yield "Settings", origins.setting_blocks(project, table)
        yield "Seeds and run files", [origins.run_listing(runs, logged)]
        if learned := origins.rotation_listing(results, logged):
            yield "Learned rotations", [learned]
        links = [origins.file_link("Table as CSV", table_path(table.id))]
        links += [origins.logged_fact(project, logged).sentence] if logged else []
        yield "Provenance", [origins.provenance(facts, links)]

    return Report(
        title=title(table),
        caption=table.caption,
        lead=lead(table),
        reading=tuple(_reading(project, table)) if on_models else (),
        figure=figure_of(table.id, table.figure.caption) if table.figure else None,
        grids=grids,
        notes=tuple(footnotes),
        claims=claims,
        sections=tuple(Section(name, blocks) for name, blocks in sections()),
        facts=(*origins.model_facts(results), *facts),
        tasks=tasks,
        runs=runs,
    )


def lead(table: Table | SpeedTable) -> str:
    """A table's caption and where it stands in the paper."""
    section = f", Section {table.section}" if is_of_the_paper(table) else ""
    return f"{table.caption} ({table.paper_title}{section})"


def figure_of(name: str, caption: str) -> Figure:
    """A table's figure."""
    return Figure(caption, os.path.relpath(figure_path(name), REPORTS))


def _reading(project: Project, table: Table) -> Iterator[str]:
    """How to read the numbers: whose they are, on which models, and what is not here."""
    columns = project.columns(table)
    slots = list(dict.fromkeys(project.slot(table, column).name for column in columns))
    stand_ins = [name for name in slots if is_stand_in(project.config.slot(name))]
    yield "Upright numbers were computed here, *italic* ones are the paper's."
    if stand_ins:
        which = "All columns" if stand_ins == slots else f"The columns of {', '.join(stand_ins)}"
        yield (
            f"> {which} were computed on small models that stand for the paper's, on other text: compare the order of "
            "the methods and the relative losses, not the values."
        )
    yield from (f"> {sentence}" for sentence in origins.shared_checkpoints(project, slots))
    skipped = [column.name for column in table.columns if column.name not in columns]
    if skipped:
        yield f"> Not computed under this configuration: {', '.join(skipped)}."


def _footnotes(project: Project, table: Table, values: Values) -> list[str]:
    """What a reader must know about the ±, about what is not finite or not computed, and about single columns."""
    seeds = ", ".join(map(str, project.seeds(table)))
    lines = [f"Mean ± sample deviation over the seeds {seeds}; where nothing is random a number is computed once."]
    if len(project.seeds(table)) == 1:
        lines = [f"One run a number; where something is random, of seed {seeds}."]
    lines += not_finite(project.quantities(table), values)
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        if row.not_computed is not None:
            reasons.setdefault(row.not_computed, []).append(row.name)
    lines += [f"Not computed here: {', '.join(rows)}. {reason}" for reason, rows in reasons.items()]
    own = {column for (_, column, _), printed in project.published(table).items() if printed.file == table.published}
    for column in table.columns:
        if column.published is not None and column.name in project.columns(table):
            source = Path(column.published).stem.replace("table", "Table ").replace("figure", "Figure ")
            which = f"numbers of {column.name}{' that this table lacks' if column.name in own else ''}"
            lines.append(f"The *published* {which} stand in the paper's {source}.")
    return [*lines, *table.notes]
