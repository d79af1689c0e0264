"""`rotquant report`: from run files to tables, figures, pages, scoreboard; the commands of the rendering rules."""

import re
import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from reproduction.commands.runs import Configs, PlanFile, open_project
from reproduction.run.results import FIGURES, REPORTS, table_path
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import atomic_path, read_text, write_text

report_app = typer.Typer(help="Tables, figures, pages and the scoreboard, from computed runs.", no_args_is_help=True)

TableName = Annotated[str, typer.Argument(help="A table's id, e.g. quarot_table1.")]
FigureForm = Annotated[Literal["svg", "pdf"], typer.Option("--format", help="PDF embeds its fonts (type 42).")]

FigureWidth = Annotated[
    Literal["page", "column"] | None,
    typer.Option(help="Width in a paper: of its text (7 in) or of one of its two columns (3.3 in); default as needed."),
]

_LATER = "the page of {0} is written without MLflow, and `rotquant runs sync-tracking {0}` shows it there later"


@report_app.command()
def table(
    name: TableName,
    form: Annotated[
        Literal["latex", "markdown", "csv", "json"] | None,
        typer.Option("--format", help="Print the table, of whatever kind, instead; LaTeX needs booktabs."),
    ] = None,
    config: Configs = None,
    plan: PlanFile = None,
) -> None:
    """Collect a table's numbers from the run files into `results/tables/<name>.csv` and `.parquet`, or print them."""
    from reproduction.frame import values

    project = open_project(config, plan)
    if form is not None:
        from reproduction.render.export import exported

        typer.echo(exported(project, name, form), nl=False)
        return
    numbers, _ = values.collect(project, project.table(name))
    values.write_values(project.root, name, numbers)
    typer.echo(str(table_path(name)))


@report_app.command()
def figure(
    name: TableName, form: FigureForm = "svg", width: FigureWidth = None, config: Configs = None, plan: PlanFile = None
) -> None:
    """Draw a table's figure into `reports/figures/<name>.svg`; for a paper: --format pdf --width column (or page).

    A width has its own file, `<name>-<width>.pdf`. What is higher than a page becomes a file for each quantity.
    """
    from reproduction.frame.values import read_values
    from reproduction.render.figures import draw as figures

    project = open_project(config, plan)
    chosen = project.table(name)
    if chosen.figure is None:
        raise ResultError(f"table {name} has no figure.")
    path = figures.figure_path(name, form, width)
    _echo_drawn(
        project.root, figures.draw(project, chosen, read_values(project.root, name), project.root / path, width)
    )


@report_app.command()
def page(name: TableName, config: Configs = None, plan: PlanFile = None) -> None:
    """Render a table's page into `reports/<name>.md`, and show its runs in MLflow (unless `tracking: false`).

    Where MLflow cannot be used, the page is written all the same, with a warning.
    """
    from reproduction.commands.tracking import attach, make_report, warning
    from reproduction.frame.values import read_back
    from reproduction.render import tracking
    from reproduction.render.pages.markdown import page_path

    project = open_project(config, plan)
    chosen, logged = project.table(name), None
    values, results = read_back(project, chosen)
    if project.config.tracking:
        with warning(_LATER.format(name)):
            (logged,) = tracking.log_tables(project, [chosen], {name: results})
    report = make_report(project, chosen, values, results, logged)
    typer.echo(str(page_path(name)))
    if logged:
        with warning(_LATER.format(name)):
            attach(project, name, logged, report)


@report_app.command()
def speed(name: TableName, config: Configs = None, plan: PlanFile = None) -> None:
    """Render the page of a speed table, and its numbers as CSV, from the record of this machine or a committed one.

    MLflow shows the record (unless `tracking: false`); where it cannot be used, there is a warning.
    """
    from reproduction.commands.tracking import log_speed, warning
    from reproduction.frame.values import write_frame
    from reproduction.render.pages.markdown import markdown, page_path
    from reproduction.render.speed.frame import speed_frame
    from reproduction.render.speed.numbers import read_numbers
    from reproduction.render.speed.report import speed_report

    project = open_project(config, plan)
    table = project.speed_table(name)
    measured = read_numbers(project, table)
    report = speed_report(project, table, measured)
    if table.grids:
        write_frame(project.root / table_path(name), speed_frame(measured))
    write_text(project.root / page_path(name), markdown(report))
    typer.echo(str(page_path(name)))
    if project.config.tracking:
        with warning(_LATER.format(name)):
            log_speed(project, table, measured, report)


@report_app.command()
def settings(name: TableName, config: Configs = None, plan: PlanFile = None) -> None:
    """Render the page of a table of settings, and the table as CSV, from the recipes; nothing is run."""
    from reproduction.frame.values import write_frame
    from reproduction.render.pages.markdown import markdown, page_path
    from reproduction.render.settings.frame import settings_frame
    from reproduction.render.settings.report import settings_report

    project = open_project(config, plan)
    found = project.settings_table(name)
    write_frame(project.root / table_path(name), settings_frame(found))
    write_text(project.root / page_path(name), markdown(settings_report(found)))
    typer.echo(str(page_path(name)))


@report_app.command()
def speed_figure(
    name: TableName, form: FigureForm = "svg", width: FigureWidth = None, config: Configs = None, plan: PlanFile = None
) -> None:
    """Draw the figure of a speed table into `reports/figures/<name>.svg`, or as `report figure` does for a paper."""
    from reproduction.render.figures.draw import figure_path
    from reproduction.render.speed import figures

    project = open_project(config, plan)
    table = project.speed_table(name)
    if table.drawing is None:
        raise ResultError(f"table {name} has no figure.")
    path = project.root / figure_path(name, form, width)
    _echo_drawn(project.root, figures.draw(project, table, path, width))


def _echo_drawn(root: Path, files: list[Path]) -> None:
    """Print where figures were written."""
    for file in files:
        typer.echo(str(file.relative_to(root)))


@report_app.command()
def index(config: Configs = None, plan: PlanFile = None) -> None:
    """Render the scoreboard over all targets of the papers into reports/index.md, and as a page into index.html.

    Beside it, every report that index.html links to as a page: `reports/<name>.html`.
    """
    from reproduction.render import html, scoreboard
    from reproduction.render.html.pages import render_pages

    project = open_project(config, plan)
    for name, text in render_pages(project).items():
        write_text(project.root / REPORTS / name, text)
    found = scoreboard.standings(project)
    for name, text in (("index.md", scoreboard.index(project, found)), ("index.html", html.index(project, found))):
        write_text(project.root / REPORTS / name, text)
        typer.echo(str(REPORTS / name))


@report_app.command()
def gallery(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the copies.")] = Path("docs/gallery"),
    config: Configs = None,
) -> None:
    """Copy the rendered reports and figures to docs/gallery/, which is committed for readers on a code host.

    index.html stays out, since code hosts show it as source; links to it and to files that are not committed (results/)
    become plain text there.
    """
    project = open_project(config)
    reports = project.root / REPORTS
    pages = sorted(reports.glob("*.md"))
    if not pages:
        raise ResultError(f"{reports} holds no rendered report; run `snakemake --cores all` first.")
    target = project.root / output
    depth = "../" * len(output.parts)
    for file in pages:
        text = read_text(file, "report")
        text = re.sub(r"\[([^\]]*)\]\((?:\.\./results/(?!bench/)[^)]*|index\.html)\)", r"\1", text)
        write_text(target / file.name, text.replace("](../", f"]({depth}"))
    for file in sorted((project.root / FIGURES).glob("*.svg")):
        with atomic_path(target / "figures" / file.name) as temporary:
            shutil.copyfile(file, temporary)
    typer.echo(f"{len(pages)} reports copied to {output}")
