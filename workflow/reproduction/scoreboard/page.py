"""Builder of reports/index.html: all targets on one page with filters and search, figures, values and claims.

The page is self-contained: styles, script and figures are inline, and its content security policy blocks loading.
Without JavaScript everything is shown.
"""

import re

from markupsafe import Markup, escape

from reproduction.render.figures.draw import figure_path
from reproduction.render.html.inline_svg import inline_svg
from reproduction.render.html.words import whole
from reproduction.scoreboard.standings import Standing, Standings, standings, subjects
from reproduction.tables.project import Project
from reproduction.words.templates import environment


def index(project: Project, found: Standings | None = None) -> str:
    """Render the page; links are relative to the reports folder. found: the standings, where known.

    Raises:
        ResultError: a figure is damaged.
    """

    def drawing(standing: Standing) -> str:
        """The figure of a report, if it was drawn."""
        picture, caption = (standing.report.picture, standing.report.figure) if standing.report else (None, None)
        path = project.root / figure_path(picture or standing.id)
        return Markup(inline_svg(path, standing.id, caption)) if caption and path.exists() else ""

    template = environment({"code": _code, "drawing": drawing, "whole": whole}).get_template("html/index.html.jinja")
    return template.render(titles=subjects(project), found=found or standings(project))


def _code(text: str) -> Markup:
    """Escaped text with the tables' Markdown: `code`, **bold** and an *italic* word."""
    shown = str(escape(text))
    for mark, element in ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*(\w+)\*", "em")):
        shown = re.sub(mark, rf"<{element}>\1</{element}>", shown)
    return Markup(shown)
