"""A report as Markdown, and its tables of numbers: published ones are in italics, ours upright.

Nothing here knows where a number comes from (see `model`).
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from reproduction.render.pages.model import Grid, Report
from reproduction.run.results import REPORTS
from reproduction.words.numbers import italic
from reproduction.words.templates import environment


def page_path(name: str) -> Path:
    """Path of a table's page."""
    return REPORTS / f"{name}.md"


def markdown(report: Report) -> str:
    """The whole page; links are relative to the reports folder."""
    return rendered(report.template, report=report, **report.details)


def rendered(template: str, **context: object) -> str:
    """A rendered Markdown template, in which any number of empty lines is one."""
    text = _environment().get_template(template).render(**context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def grids_markdown(report: Report) -> str:
    """The grids alone, each below its description."""
    parts = ((f"{grid.name}: " if grid.name else "", grid) for grid in report.grids)
    return "\n".join(f"{name}{grid.caption}.\n\n{grid_table(grid)}\n" for name, grid in parts)


def grid_table(grid: Grid) -> str:
    """A grid as a table. A paper's one set of numbers is in brackets after ours if only few rows have one.

    Markdown has no rules between rows; an empty row is one.
    """
    heads = list(grid.stub)
    columns = [[labels[place] for labels in grid.labels] for place in range(len(heads))]
    for number, column in enumerate(grid.columns):
        bold = (f"**{text}**" if (place, number) in grid.best else text for place, text in enumerate(column.texts))
        texts = [italic(text) if grid.whose_in(column) == "published" else text for text in bold]
        if column.published == "" and 2 * sum(text != "-" for text in texts) < len(texts):
            heads[-1] += " (*published*)"
            ours = columns.pop()
            texts = [mine if text == "-" else f"{mine} ({text})" for mine, text in zip(ours, texts, strict=True)]
        else:
            named = column.remark and column.group in column.head  # else the caption names the column
            ours = f"{column.head}<br>{column.remark}" if named else column.head
            heads.append(ours if column.published is None else f"*{column.published or 'published'}*")
        columns.append(texts)
    rule = [":--"] * len(grid.stub) + ["--:"] * (len(heads) - len(grid.stub))
    lines = [*zip(*columns, strict=True)]
    for place in reversed(grid.rules):
        lines.insert(place, ("",) * len(heads))
    return "\n".join(map(row, [heads, rule, *lines]))


def row(cells: Iterable[object]) -> str:
    """A line of a table; a text of several lines becomes one."""
    lines = (re.sub(r"\s*\n\s*", " ", str(cell).strip()) for cell in cells)
    return "| " + " | ".join(line.replace("|", "\\|") for line in lines) + " |"


def literal(text: str) -> str:
    """A text that stays literal where Markdown would read marks, links and HTML in it."""
    return re.sub(r"([\\`*_\[\]<>&!])", r"\\\1", " ".join(text.split()))


def bullets(lines: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


_environment = functools.cache(
    lambda: environment({"bullets": bullets, "grid": grid_table, "italic": italic, "literal": literal, "row": row})
)
