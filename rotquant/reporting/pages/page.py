"""The page of a table: ours beside the paper's, claims, and each number's origin, as GitHub-flavoured Markdown.

Three marks run through all pages: numbers computed here stand upright, *published* ones in italics, and numbers
recorded on another machine say on which. Nothing is printed that no result file holds.
"""

import os
from pathlib import Path

from rotquant.reporting import claims
from rotquant.reporting.figures.draw import figure_path
from rotquant.reporting.pages import origins, tasks, values, verdicts
from rotquant.reporting.tracking import Logged
from rotquant.reporting.words.describe import is_about_models, is_of_the_paper, is_stand_in, title
from rotquant.study.project import Project
from rotquant.study.results import REPORTS, RunResult
from rotquant.study.tables import Table
from rotquant.study.values import Values


def page_path(name: str) -> Path:
    """The page of a table."""
    return REPORTS / f"{name}.md"


def page(project: Project, table: Table, numbers: Values, results: dict[str, RunResult], logged: Logged | None) -> str:
    """The whole page of a table as Markdown, what matters most first; links are relative to the reports folder."""
    source = f"{table.paper_title}, Section {table.section}" if is_of_the_paper(table) else table.paper_title
    on_models = is_about_models(table)
    sections = [
        f"# {title(table)}\n",
        f"{table.caption} ({source})\n",
        _reading(project, table) if on_models else "",
        _figure(table),
        values.values_section(project, table, numbers),
        verdicts.claims_section(project, table, claims.outcomes(project, table, numbers)),
        values.change_section(project, table, numbers),
        tasks.tasks_section(project, table, numbers, results),
        *([origins.columns_section(project, table), origins.settings_section(project, table)] if on_models else []),
        origins.runs_section(project, table, results, logged),
        origins.rotations_section(results, logged),
        origins.provenance_section(project, table, results, logged),
    ]
    return "\n".join(section for section in sections if section)


def _reading(project: Project, table: Table) -> str:
    """How to read the numbers: whose they are, on which models, and what is not here."""
    columns = project.columns(table)
    slots = list(dict.fromkeys(project.slot(table, column).name for column in columns))
    stand_ins = [name for name in slots if is_stand_in(project.config.slot(name))]
    lines = ["Upright numbers were computed here, *italic* ones are the paper's.\n"]
    if stand_ins:
        which = "All columns" if stand_ins == slots else f"The columns of {', '.join(stand_ins)}"
        lines.append(
            f"> {which} were computed on small models that stand for the paper's, on other text: compare the order of "
            "the methods and the relative losses, not the values.\n"
        )
    lines += [f"> {sentence}" for sentence in origins.shared_checkpoints(project, slots)]
    skipped = [column.name for column in table.columns if column.name not in columns]
    if skipped:
        lines.append(f"> Not computed under this configuration: {', '.join(skipped)}.\n")
    return "\n".join(lines)


def _figure(table: Table) -> str:
    if table.figure is None:
        return ""
    link = os.path.relpath(figure_path(table.id), REPORTS)
    return f"![{table.figure.caption}]({link})\n\n{table.figure.caption}\n"
