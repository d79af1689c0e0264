"""The page of a target for a browser: its Markdown in the style of the index, with its figures inline.

Like the index it is self-contained, and its content security policy lets it load and run nothing.
"""

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from reproduction.render.html.inline_svg import inline_svg
from reproduction.render.html.words import whole
from reproduction.run.results import REPORTS
from reproduction.tables.project import Project
from reproduction.words.templates import environment
from rotquant.foundation.files import read_text

#: Marks in every font, instead of pictures.
_MARKS = str.maketrans({"✅": "✓", "❌": "✗"})
#: HTML written by templates into Markdown; any other is text in a table, and is shown literally.
_OURS = re.compile(r"(</?(?:details|summary|sub)>|<br>)")


def render_pages(project: Project) -> dict[str, str]:
    """Render every report of the reports folder by its name there, such as "quarot_table1.html".

    Raises:
        ResultError: a report or its figure is damaged.
    """
    folder = project.root / REPORTS
    names = sorted(path.stem for path in folder.glob("*.md") if path.stem != "index")
    template = environment().get_template("html/page.html.jinja")
    return {f"{name}.html": template.render(name=name, **_contents(folder, name, names)) for name in names}


def _contents(folder: Path, name: str, others: Iterable[str]) -> dict[str, str]:
    """The title and the body of a page."""
    text = read_text(folder / f"{name}.md", "report")
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(text.translate(_MARKS))
    title = next((_text(token) for token in tokens if token.type == "inline"), name)
    pages = {f"{other}.md": f"{other}.html" for other in others}
    for before, token in zip((None, *tokens), tokens, strict=False):
        in_table = before is not None and before.type in ("th_open", "td_open")
        for part in (token, *(token.children or ())):
            _adapt(part, folder, name, pages, in_table=in_table)
    body = markdown.renderer.render(tokens, markdown.options, {})
    return {"title": title, "body": body}


def _adapt(token: Token, folder: Path, name: str, pages: dict[str, str], *, in_table: bool) -> None:
    """Make figures inline, link reports to their pages, put tables in a scrolling box, show foreign HTML as text."""
    source = str(token.attrs.get("src", ""))
    if token.type == "image" and source == f"figures/{name}.svg":
        drawing = inline_svg(folder / source, f"{name}-{Path(source).stem}", _text(token))
        token.type, token.content = "html_inline", f'<span class="paper scroll">{drawing}</span>'
    elif token.type == "image":
        token.type, token.content = "text", _text(token)
    elif token.type in ("html_block", "html_inline"):
        token.content = "".join(part if _OURS.fullmatch(part) else escape(part) for part in _OURS.split(token.content))
    elif token.type == "text" and in_table:
        token.type, token.content = "html_inline", whole(token.content)
    elif token.type == "link_open":
        target = str(token.attrs["href"])
        token.attrs["href"] = pages.get(target, target)
    elif token.type in ("table_open", "table_close"):
        opening = token.type == "table_open"
        token.type, token.content = "html_block", '<div class="scroll"><table>\n' if opening else "</table></div>\n"


def _text(token: Token) -> str:
    """Text of a heading or an image description, without its marks."""
    return "".join(_text(part) if part.children else part.content for part in token.children or ())
