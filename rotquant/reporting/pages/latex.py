"""A report's tables of numbers as LaTeX, to be pasted into a paper: booktabs, ours upright, the paper's in italics.

The caption says what the numbers are and where they are from. Nothing here knows where a number comes from.
"""

import re

from rotquant.reporting.pages.model import Grid, GridCell, Report
from rotquant.reporting.words.numbers import SPACE

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{mark: rf"\{mark}" for mark in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    SPACE: "~",
    "\u2013": "--",
    "\u00d7": r"$\times$",
    "±": r"$\pm$",
    "→": r"$\to$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
}

#: A number with its deviation and a percent sign, as pages print it.
_NUMBER = re.compile(rf"([-+]?[\d.]+(?:e[-+]\d+)?)(?:{SPACE}±{SPACE}([\d.]+(?:e[-+]\d+)?))?({SPACE}%)?")
_MARKS = ((r"`([^`]+)`", "texttt"), (r"\*\*([^*]+)\*\*", "textbf"), (r"\*(\w[^*]*)\*", "textit"))


def latex(report: Report) -> str:
    """Every grid of a report as a `table`; a document that takes them needs the package booktabs."""
    return "\n".join(_table(report, grid) for grid in report.grids)


def escape(text: str) -> str:
    """Plain text for LaTeX."""
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def _table(report: Report, grid: Grid) -> str:
    labels, width = len(grid.stub), len(grid.columns)
    lines = [
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_words(_caption(report, grid))}}}",
        f"\\begin{{tabular}}{{{'l' * labels}{'r' * width}}}",
        "\\toprule",
        *_head(grid),
        "\\midrule",
        *(_line([*map(escape, line.labels), *map(_number, line.cells)]) for line in grid.lines),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _caption(report: Report, grid: Grid) -> str:
    """Which table, what its numbers are, whose, and from which models, seeds and commit."""
    common = f"; all columns {grid.common}" if grid.common else ""
    what = f"{f'{grid.name}: ' if grid.name else ''}{grid.caption}{common}"
    facts = [fact.sentence for fact in report.facts if fact.name in ("Models", "Seeds", "Commit")]
    origin = [f"{'; '.join(facts)}."] if facts else []
    return " ".join([f"{report.title}. {what}.", *(text.removeprefix("> ") for text in report.reading), *origin])


def _head(grid: Grid) -> list[str]:
    """One line of heads; above it the columns of the table, each over what belongs to it."""
    published = [column.published is not None for column in grid.columns]
    own = [column.title if grid.groups else column.head for column in grid.columns]
    theirs = [f"published{f', {column.published}' if column.published else ''}" for column in grid.columns]
    heads = [
        f"\\textit{{{escape(paper)}}}" if printed else escape(ours)
        for ours, paper, printed in zip(own, theirs, published, strict=True)
    ]
    below = _line([*map(escape, grid.stub), *heads])
    if not grid.groups:
        return [below]
    first = 1 + len(grid.stub)
    above, rules = [""] * len(grid.stub), []
    for name, remark, width in grid.groups:
        above.append(f"\\multicolumn{{{width}}}{{c}}{{{escape(f'{name} ({remark})' if remark else name)}}}")
        rules.append(f"\\cmidrule(lr){{{first}-{first + width - 1}}}")
        first += width
    return [_line(above), " ".join(rules), below]


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _number(cell: GridCell) -> str:
    """A number in mathematics; a word, such as NaN or OOM, as text, and a dash for none."""
    published = cell.whose == "published"
    if cell.text == "-":
        return "--"
    found = _NUMBER.fullmatch(cell.text)
    if found is None:
        return f"\\textit{{{escape(cell.text)}}}" if published else escape(cell.text)
    mean, deviation, percent = found.groups()
    number = _power(mean) + (f" \\pm {_power(deviation)}" if deviation else "")
    unit = "\\,\\%" if percent else ""
    return f"$\\mathit{{{number}}}${unit}" if published else f"${number}${unit}"


def _power(number: str) -> str:
    mantissa, _, power = number.partition("e")
    return rf"{mantissa} \times 10^{{{int(power)}}}" if power else mantissa


def _words(text: str) -> str:
    """Escaped text with what pages mark in Markdown: code, bold and italics."""
    shown = escape(text)
    for mark, command in _MARKS:
        shown = re.sub(mark, rf"\\{command}{{\1}}", shown)
    return shown
