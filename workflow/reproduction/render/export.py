"""Export of a table's numbers: LaTeX and Markdown of its grids, CSV and JSON of its frame."""

from typing import Literal

from reproduction.render.pages.latex import latex
from reproduction.render.pages.markdown import grids_markdown
from reproduction.tables.project import Project
from rotquant.foundation.files import json_text

Format = Literal["latex", "markdown", "csv", "json"]


def exported(project: Project, name: str, form: Format) -> str:
    """Export a table, with its last collected numbers, in one of the formats.

    Raises:
        ConfigError: the table does not exist.
        ResultError: its numbers are not collected yet, or a file is damaged.
    """
    table = project.table(name)
    collected = table.source.written(project, table)
    report, frame = table.source.report(project, table, collected), table.source.frame(collected)
    if form == "csv":
        return frame.to_csv(index=False)
    if form == "json":
        lines = frame.astype(object).where(frame.notna(), None).to_dict("records")
        return json_text({"table": name, "title": report.title, "values": lines})
    return latex(report) if form == "latex" else grids_markdown(report)
