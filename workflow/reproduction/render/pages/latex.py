"""A report's tables of numbers as LaTeX, to be pasted into a paper: booktabs, ours upright, the paper's in italics.

The caption names the numbers and their origin. Nothing here knows where a number comes from.
"""

import functools
import re

from jinja2 import Environment

from reproduction.render.pages.model import GridCell, Report
from reproduction.words.numbers import SPACE
from reproduction.words.templates import environment

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
    "≠": r"$\ne$",
}

#: A number with its deviation and a percent sign, as pages print it.
_NUMBER = re.compile(rf"([-+]?[\d.]+(?:e[-+]\d+)?)(?:{SPACE}±{SPACE}([\d.]+(?:e[-+]\d+)?))?({SPACE}%)?")
_MARKS = ((r"`([^`]+)`", "texttt"), (r"\*\*([^*]+)\*\*", "textbf"), (r"\*(\w[^*]*)\*", "textit"))


def latex(report: Report) -> str:
    """Every grid of a report as a `table`; the document needs the package booktabs."""
    return _environment().get_template("pages/tables.tex.jinja").render(report=report)


def escape(text: str) -> str:
    """Plain text for LaTeX."""
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def _number(cell: GridCell) -> str:
    """A number in math mode, the best in bold; a word, such as NaN or OOM, as text, and a dash for none."""
    published = cell.whose == "published"
    if cell.text == "-":
        return "--"
    found = _NUMBER.fullmatch(cell.text)
    if found is None:
        return f"\\textit{{{escape(cell.text)}}}" if published else escape(cell.text)
    mean, deviation, percent = found.groups()
    number = _power(mean) + (f" \\pm {_power(deviation)}" if deviation else "")
    unit = "\\,\\%" if percent else ""
    form = f"\\mathit{{{number}}}" if published else number
    return f"{{\\boldmath${form}$}}{unit}" if cell.best else f"${form}${unit}"


def _power(number: str) -> str:
    mantissa, _, power = number.partition("e")
    return rf"{mantissa} \times 10^{{{int(power)}}}" if power else mantissa


def _words(text: str) -> str:
    """Escaped text with the pages' Markdown: code, bold and italics."""
    shown = escape(text)
    for mark, command in _MARKS:
        shown = re.sub(mark, rf"\\{command}{{\1}}", shown)
    return shown


@functools.cache
def _environment() -> Environment:
    """Templates whose delimiters are not braces, which LaTeX uses."""
    return environment(
        {"escaped": escape, "number": _number, "words": _words},
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
    )
