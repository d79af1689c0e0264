"""A report as Markdown, and its tables of numbers: published ones stand in italics, ours upright.

Nothing here knows where a number comes from (see `model`).
"""

import functools
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rotquant.reporting.pages.model import Claims, Grid, GridCell, Listing, Report
from rotquant.reporting.words.markdown import markdown_table
from rotquant.reporting.words.numbers import SPACE, italic
from rotquant.study.results import REPORTS

_VERDICTS = {"holds": f"✅{SPACE}holds", "fails": f"❌{SPACE}fails", "not checkable": "not checkable"}


def page_path(name: str) -> Path:
    """The page of a table."""
    return REPORTS / f"{name}.md"


def markdown(report: Report) -> str:
    """The whole page; links are relative to the reports folder."""
    return _environment().get_template("page.md.jinja").render(report=report)


def grids_markdown(report: Report) -> str:
    """The grids alone, each below what it is."""
    parts = ((f"{grid.name}: " if grid.name else "", grid) for grid in report.grids)
    return "\n".join(f"{name}{grid.caption}.\n\n{_table(grid_listing(grid))}\n" for name, grid in parts)


def grid_listing(grid: Grid) -> Listing:
    """A grid as texts. A paper's one set of numbers stands in brackets behind ours where few of the rows have one."""
    header = [*grid.stub]
    lines: list[list[object]] = [list(line.labels) for line in grid.lines]
    for place, column in enumerate(grid.columns):
        texts = [_text(line.cells[place]) for line in grid.lines]
        if column.published == "" and 2 * sum(text != "-" for text in texts) < len(texts):
            header[-1] += " (*published*)"
            for line, text in zip(lines, texts, strict=True):
                line[-1] = line[-1] if text == "-" else f"{line[-1]} ({text})"
            continue
        header.append(column.head if column.published is None else f"*{column.published or 'published'}*")
        for line, text in zip(lines, texts, strict=True):
            line.append(text)
    return Listing(header, lines, "l" * len(grid.stub) + "r" * (len(header) - len(grid.stub)))


def _text(cell: GridCell) -> str:
    return italic(cell.text) if cell.whose == "published" else cell.text


def _verdicts(claims: Claims) -> Listing:
    """The claims with their verdicts; goals of our own have no section and no paper's numbers."""
    goals = claims.name == "Goals"
    header = ["", "Goal", "here"] if goals else ["", "Claim", "Section", "here", "*paper's numbers*"]
    lines = []
    for number, claim in enumerate(claims.lines, 1):
        text = claim.text + (f"<br><sub>Check: {claim.note}</sub>" if claim.note else "")
        text += f"<br>❌ Why it may fail here: {claim.why}" if claim.why else ""
        words = [text, claim.section, _VERDICTS[claim.here], _VERDICTS[claim.papers]]
        lines.append([number, *(words[::2] if goals else words)])
    return Listing(header, lines, "rllll"[: len(header)])


def _table(listing: Listing) -> str:
    return markdown_table(listing.header, listing.lines, listing.align).rstrip("\n")


@functools.cache
def _environment() -> Environment:
    """The template of this folder; a name that is not given is an error."""
    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["listing"] = _table
    made.filters["grid"] = lambda grid: _table(grid_listing(grid))
    made.filters["verdicts"] = lambda claims: _table(_verdicts(claims))
    return made
