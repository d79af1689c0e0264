"""`rotquant report`: from run files to tables, figures, pages, scoreboard; the commands of the rendering rules."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reproduction.commands.runs import Configs, Place, PlanFile, open_plan, open_project, table_names
from reproduction.run.results import FIGURES, REPORTS, table_path
from reproduction.run.tracking.job import log_table
from reproduction.sources import Source, source_of
from reproduction.tables.configuration import find_root
from reproduction.tables.project import Project
from reproduction.tables.tables import Table
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import OutputKind, atomic_path, read_text, write_text

if TYPE_CHECKING:
    from reproduction.render.pages.model import Report

report_app = typer.Typer(help="Tables, figures, pages and the scoreboard, from computed runs.", no_args_is_help=True)

TableName = Annotated[str, typer.Argument(autocompletion=table_names, help="A table's id, e.g. quarot_table1.")]
TableForm = Literal["latex", "markdown", "csv"]
FigureForm = Annotated[Literal["svg", "pdf"], typer.Option("--format", help="PDF embeds its fonts (type 42).")]

#: Bytes of a file by which its kind is recognized.
_HEAD = 2**22
#: What is in every page: its last part, of older ones the first, or the scoreboard's command.
_PAGES = (b"<summary>Provenance</summary>", b"## What it means", b"`snakemake --cores all reports/")
#: A figure of this project, and a file of the gallery.
FIGURE = OutputKind(
    "a figure of this project", lambda path: _has(path, b"<svg") and _has(path, b"Matplotlib", b"rotquant")
)
PAGE = OutputKind("a page or figure of reports", lambda path: FIGURE.is_one(path) or _has(path, *_PAGES))


def _has(path: Path, *marks: bytes) -> bool:
    """Whether one of these texts is in the head of a file."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return any(mark in head for mark in marks)


def of_name(project: Project, name: str) -> tuple[Table, Source[Any, Any]]:
    """Find a table by id, with its source.

    Raises:
        ConfigError: there is none.
    """
    table = project.table(name)
    return table, source_of(table)


def exported(project: Project, name: str, form: TableForm) -> str:
    """A table's numbers: LaTeX and Markdown of its grids, CSV of its frame.

    Raises:
        ConfigError: the table does not exist.
        ResultError: something is not measured yet, or its file is damaged.
    """
    from reproduction.frame.lines import as_csv
    from reproduction.render.pages.latex import latex
    from reproduction.render.pages.markdown import grids_markdown

    chosen, source = of_name(project, name)
    collected = source.collect(project, chosen)
    if form == "csv":
        return as_csv(source.frame(collected))
    report = source.report(project, chosen, collected)
    return latex(report) if form == "latex" else grids_markdown(report)


@report_app.command()
@answers({"table": "", "title": "", "values": "every line of its CSV: row, column, quantity, seed, value, published"})
def table(
    name: TableName,
    form: Annotated[
        TableForm | None, typer.Option("--format", help="Print the table instead; LaTeX needs booktabs.")
    ] = None,
    config: Configs = None,
    plan: PlanFile = None,
    place: Place = None,
) -> CommandResult:
    """Collect a table's numbers into `results/tables/<name>.csv` and `.parquet`, or print them.

    They are those of the run files, of the record of this machine or a committed one, or of what the table names.
    """
    from reproduction.frame.lines import write_frame

    project = open_project(config, plan, place)
    chosen, source = of_name(project, name)
    frame, shown = source.frame(source.collect(project, chosen)), str(table_path(name))
    if form is None:
        write_frame(project.root / table_path(name), frame)
    else:
        shown = exported(project, name, form)
    lines = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return CommandResult({"table": name, "title": chosen.title, "values": lines}, (shown,))


@report_app.command()
def figure(
    name: TableName, form: FigureForm = "svg", config: Configs = None, plan: PlanFile = None, place: Place = None
) -> None:
    """Draw a table's figure into `reports/figures/<name>.svg`, or `.pdf` for a paper, at most as wide as its page."""
    from reproduction.render.figures.draw import figure_path

    project = open_project(config, plan, place)
    chosen, source = of_name(project, name)
    if chosen.drawn is None:
        raise ResultError(f"table {name} has no figure.")
    collected = source.collect(project, chosen)
    source.draw(project, chosen, collected, project.root / figure_path(name, form))
    typer.echo(str(figure_path(name, form)))


@report_app.command()
def page(name: TableName, config: Configs = None, plan: PlanFile = None, place: Place = None) -> None:
    """Render all of a table: its numbers, its figure, and its page `reports/<name>.md`.

    A job of the workflow shows them in MLflow too, with the results behind them that were not logged as they were
    computed; otherwise `rotquant runs sync-tracking` does.
    """
    from reproduction.frame.lines import write_frame
    from reproduction.render.figures.draw import figure_path
    from reproduction.render.pages.markdown import page_path

    project = open_project(config, plan, place)
    chosen, source = of_name(project, name)
    collected = source.collect(project, chosen)
    if source.has_numbers(chosen):
        write_frame(project.root / table_path(name), source.frame(collected))
    if chosen.drawn is not None and source.picture(project, chosen) == name:
        source.draw(project, chosen, collected, project.root / figure_path(name))
    make_report(project, chosen, collected)
    typer.echo(str(page_path(name)))
    if plan is not None and project.config.tracking:
        log_table(open_plan(config, plan), name, project.results)


def make_report(project: Project, table: Table, collected: Any) -> "Report":
    """A table's report; its page is written unless the file says the same already."""
    from reproduction.render.pages.markdown import markdown, page_path

    report = source_of(table).report(project, table, collected)
    text, file = markdown(report), project.root / page_path(table.id)
    if not (file.exists() and file.read_bytes() == text.encode()):
        write_text(file, text)
    return report


@report_app.command()
def index(config: Configs = None, plan: PlanFile = None) -> None:
    """Render the scoreboard over all targets of the papers into reports/index.md, and as a page into index.html.

    Next to it, every report that index.html links to as a page: `reports/<name>.html`.
    """
    from reproduction.render.html.pages import render_pages
    from reproduction.scoreboard import page, standings

    project = open_project(config, plan)
    for name, text in render_pages(project).items():
        write_text(project.root / REPORTS / name, text)
    found = standings.standings(project)
    for name, text in (("index.md", standings.index(project, found)), ("index.html", page.index(project, found))):
        write_text(project.root / REPORTS / name, text)
        typer.echo(str(REPORTS / name))


def _copies(output: Path, _: object) -> list[Path]:
    """The files that `gallery` writes."""
    root = find_root()
    pages, figures = (root / REPORTS).glob("*.md"), (root / FIGURES).glob("*.svg")
    return [*(root / output / one.name for one in pages), *(root / output / "figures" / one.name for one in figures)]


@report_app.command()
def gallery(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the copies."), Writes(PAGE, files=_copies)
    ] = Path("docs/gallery"),
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
