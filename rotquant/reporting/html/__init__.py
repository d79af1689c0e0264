"""reports/index.html: all targets on one page, to filter and to search, with figures, values and claims.

The page is a file on its own: styles, script and figures are inline, and its content security policy lets it load
nothing. Without JavaScript everything is shown.
"""

import re

from markupsafe import Markup, escape

from rotquant.reporting.html.templates import FOLDER, environment
from rotquant.reporting.html.views import papers
from rotquant.reporting.scoreboard import Standings, standings, summary
from rotquant.study.project import Project


def index(project: Project, found: Standings | None = None) -> str:
    """The page; links are relative to the reports folder. found: the standings, where known.

    Raises:
        ResultError: a figure is damaged.
    """
    templates = environment()
    templates.filters["code"] = _code
    found = found or standings(project)
    everything = [standing for group in found.values() for standing in group]
    return templates.get_template("index.html.jinja").render(
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        script=(FOLDER / "script.js").read_text(encoding="utf-8"),
        papers=papers(project, found),
        summary=summary(everything),
    )


def _code(text: str) -> Markup:
    """Escaped text with what tables write in Markdown: `code`, **bold** and an *italic* word."""
    shown = str(escape(text))
    for mark, element in ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*(\w+)\*", "em")):
        shown = re.sub(mark, rf"<{element}>\1</{element}>", shown)
    return Markup(shown)
