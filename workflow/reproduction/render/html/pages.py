"""Markdown of reports for a browser, in the style of the index: whole pages, and the first screens of its cards.

A page is self-contained, and its content security policy lets it load and run nothing.
"""

import itertools
import re
from collections.abc import Collection
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from reproduction.render.html.inline_svg import inline_svg
from reproduction.run.results import REPORTS
from reproduction.tables.project import Project
from reproduction.words.templates import environment
from rotquant.foundation.files import read_text

#: Marks in every font, instead of pictures.
_MARKS = str.maketrans({"✅": "✓", "❌": "✗"})
#: HTML written by templates into Markdown; any other is text in a table, and is shown literally.
_OURS = re.compile(r"(</?(?:details|summary|sub)>|<br>)")
#: Names with hyphens and ranges of numbers, which a narrow column must not break; longer ones, such as paths, may.
_WHOLE = re.compile(r"(?<!\S)(?:[\w.]{1,10}(?:-[\w.,]{1,10})+|[\d.]+ to [\d.]+)(?!\S)")


def render_pages(project: Project) -> dict[str, str]:
    """Render every report of the reports folder by its name there, such as "quarot_table1.html".

    Raises:
        ResultError: a report or its figure is damaged.
    """
    folder = project.root / REPORTS
    names = sorted(path.stem for path in folder.glob("*.md") if path.stem != "index")
    template = environment().get_template("html/page.html.jinja")
    found = {}
    for name in names:
        text = read_text(folder / f"{name}.md", "report")
        title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), name)
        found[f"{name}.html"] = template.render(name=name, title=title, body=in_html(text, folder, name, names))
    return found


def in_html(text: str, folder: Path, name: str, pages: Collection[str] = ()) -> str:
    """Markdown of a report as HTML: its figure inline, links to `pages` to their HTML, tables in a scrolling box.

    Args:
        folder: of the reports. name: the report's, before the ids of its figure.

    Raises:
        ResultError: its figure is damaged.
    """
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(text.translate(_MARKS))
    for before, token in itertools.pairwise([Token("", "", 0), *tokens]):
        in_table = before.type in ("th_open", "td_open")
        for part in (token, *(token.children or ())):
            _adapt(part, folder, name, pages, in_table=in_table)
    _draw_rules(tokens)
    return markdown.renderer.render(tokens, markdown.options, {})


def _adapt(token: Token, folder: Path, name: str, pages: Collection[str], *, in_table: bool) -> None:
    """Make figures inline, link reports to their pages, put tables in a scrolling box, show foreign HTML as text."""
    source = str(token.attrs.get("src", ""))
    if token.type == "image" and re.fullmatch(r"figures/\w+\.svg", source) and (folder / source).exists():
        drawing = inline_svg(folder / source, f"{name}-{Path(source).stem}", _text(token))
        token.type, token.content = "html_inline", f'<span class="paper scroll">{drawing}</span>'
    elif token.type == "image":
        token.type, token.content = "text", _text(token)
    elif token.type in ("html_block", "html_inline"):
        token.content = "".join(part if _OURS.fullmatch(part) else escape(part) for part in _OURS.split(token.content))
    elif token.type == "text" and in_table:
        token.type, token.content = (
            "html_inline",
            _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(token.content)),
        )
    elif token.type == "link_open":
        target = str(token.attrs["href"])
        token.attrs["href"] = f"{target[:-3]}.html" if target.endswith(".md") and target[:-3] in pages else target
    elif token.type in ("table_open", "table_close"):
        opening = token.type == "table_open"
        token.type, token.content = "html_block", '<div class="scroll"><table>\n' if opening else "</table></div>\n"


def _draw_rules(tokens: list[Token]) -> None:
    """Mark empty rows of tables, which stand for rules."""
    opened, empty = None, False
    for token in tokens:
        if token.type == "tr_open":
            opened, empty = token, True
        elif token.type == "inline" and token.content:
            empty = False
        elif token.type == "tr_close" and opened is not None and empty:
            opened.attrs["class"] = "rule"


def _text(token: Token) -> str:
    """Text of an image's description, without its marks."""
    return "".join(_text(part) if part.children else part.content for part in token.children or ())
