"""A table's numbers for elsewhere: LaTeX and Markdown of its grids, CSV and JSON of its frame."""

from typing import Literal

import pandas as pd

from reproduction.frame.values import read_values, results_behind
from reproduction.render.pages.latex import latex
from reproduction.render.pages.markdown import grids_markdown
from reproduction.render.pages.model import Report
from reproduction.render.pages.report import report_of
from reproduction.render.settings.frame import settings_frame
from reproduction.render.settings.report import settings_report
from reproduction.render.speed.frame import speed_frame
from reproduction.render.speed.numbers import read_numbers
from reproduction.render.speed.report import speed_report
from reproduction.tables.project import Project
from rotquant.foundation.files import json_text

Format = Literal["latex", "markdown", "csv", "json"]


def exported(project: Project, name: str, form: Format) -> str:
    """A table, of accuracy as it was written, of speed as it was measured or of settings, in one of the formats.

    Raises:
        ConfigError: there is no such table.
        ResultError: its numbers are not collected yet, or a file is damaged.
    """
    report, frame = _report_and_frame(project, name)
    if form == "csv":
        return frame.to_csv(index=False)
    if form == "json":
        lines = frame.astype(object).where(frame.notna(), None).to_dict("records")
        return json_text({"table": name, "title": report.title, "values": lines})
    return latex(report) if form == "latex" else grids_markdown(report)


def _report_and_frame(project: Project, name: str) -> tuple[Report, pd.DataFrame]:
    if name in project.speed:
        table = project.speed[name]
        measured = read_numbers(project, table)
        return speed_report(project, table, measured), speed_frame(measured)
    if name in project.settings:
        settings = project.settings[name]
        return settings_report(settings), settings_frame(settings)
    chosen = project.table(name)
    values = read_values(project.root, name)
    return report_of(project, chosen, values, results_behind(project, values)), values.frame
