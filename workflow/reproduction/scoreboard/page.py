"""Builder of reports/index.html: all targets on one page with filters and search, each with its page's first screen.

The page is self-contained: styles, script and figures are inline, and its content security policy blocks loading.
Without JavaScript everything is shown.
"""

from markupsafe import Markup

from reproduction.render.html.pages import in_html
from reproduction.render.pages.markdown import rendered
from reproduction.run.results import REPORTS
from reproduction.scoreboard.standings import Standing, Standings, standings, subjects
from reproduction.tables.project import Project
from reproduction.words.templates import environment


def index(project: Project, found: Standings | None = None) -> str:
    """Render the page; links are relative to the reports folder. found: the standings, where known.

    Raises:
        ResultError: a figure is damaged.
    """
    found = found or standings(project)
    pages = {standing.id for group in found.values() for standing in group if standing.rendered}

    def first_screen(standing: Standing) -> Markup:
        text = rendered("pages/first.md.jinja", report=standing.report) if standing.report else ""
        return Markup(in_html(text, project.root / REPORTS, standing.id, pages))

    template = environment({"first_screen": first_screen}).get_template("html/index.html.jinja")
    return template.render(titles=subjects(project), found=found)
