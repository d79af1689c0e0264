"""`rotquant report`: from run files to tables, figures, pages, scoreboard; the commands of the rendering rules."""

import os
import re
import shutil
from collections.abc import Collection, Iterable
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
from rotquant.commands.outputs import Arguments, Writes
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
#: What a report of models says of them, and what it links to where they ship with the project: their cards.
_MODELS, _SHIPPED = "\n- Models: ", "workflow/resources/models/"
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


def _placed(output: Path, beside: Path | None) -> dict[Path, Path]:
    """Where `gallery` copies reports and figures to: what measures no model to the folder that has it already.

    An index that somebody wrote stays.
    """
    root = find_root()
    places: dict[Path, Path] = {}
    for page in sorted((root / REPORTS).glob("*.md")):
        if page.stem != "index":
            modelless = beside and (root / beside / page.name).exists() and _MODELS not in read_text(page, "report")
            places[page] = root / (beside if beside and modelless else output) / page.name
        elif not (written := root / output / page.name).exists() or PAGE.is_one(written):
            places[page] = written
    for figure in sorted((root / FIGURES).glob("*.svg")):
        page = places.get(root / REPORTS / f"{figure.stem}.md", root / output / "of no page")
        places[figure] = page.parent / "figures" / figure.name
    return places


def _copies(output: Path, arguments: Arguments) -> Iterable[Path]:
    """The files that `gallery` writes."""
    return _placed(output, arguments.get("beside")).values()


def _namesakes(beside: Path, arguments: Arguments) -> list[Path]:
    """The pages on other models to which `gallery` adds a line, those that exist."""
    copies = [*_copies(arguments["output"], arguments)]
    found = (find_root() / beside / path.name for path in copies if path.suffix == ".md" and path.stem != "index")
    return [path for path in found if path not in copies]


def _naming(text: str, page: Path, other: Path) -> str:
    """A page's text with a line below its title that names the page of the same table on other models."""
    which = "the models that ship with the project" if _SHIPPED in read_text(other, "report") else "a pretrained model"
    title, _, rest = text.partition("\n\n")
    rest = re.sub(r"\AOn (?:the models that ship|a pretrained model)[^\n]*\n\n", "", rest)
    return f"{title}\n\nOn {which}: [{other.stem}]({os.path.relpath(other, page.parent)}).\n\n{rest}"


def _copied(text: str, target: Path, folders: Collection[Path], copies: Collection[Path]) -> str:
    """A report as the gallery has it, where its links lead to files that are committed, or are plain text."""

    def link(match: re.Match[str]) -> str:
        places = [folder / match[1] for folder in (target.parent, *folders)]
        found = next((path for path in places if path in copies or path.exists()), places[0])
        return f"]({os.path.relpath(found, target.parent)}"

    text = re.sub(r"\[([^\]]*)\]\((?:\.\./results/(?!bench/)[^)]*|index\.html)\)", r"\1", text)
    text = text.replace("](../", f"]({os.path.relpath(find_root(), target.parent)}/")
    return re.sub(r"\]\((\w+\.md)", link, text)


@report_app.command()
def gallery(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the copies."), Writes(PAGE, files=_copies)
    ] = Path("docs/gallery"),
    beside: Annotated[
        Path | None,
        typer.Option(help="Folder of the same reports on other models: they name each other."),
        Writes(PAGE, files=_namesakes),
    ] = None,
    config: Configs = None,
) -> None:
    """Copy the rendered reports and figures to docs/gallery/, which is committed for readers on a code host.

    Of the models that ship with the project: `-o docs/gallery/shipped --beside docs/gallery`. A report that measures no
    model goes to the one of the two folders that has it. index.html stays out, since code hosts show it as source;
    links to it and to files that are not committed (results/) become plain text there.
    """
    root = open_project(config).root
    placed = _placed(output, beside)
    pages = {file: target for file, target in placed.items() if file.suffix == ".md"}
    if not pages:
        raise ResultError(f"{root / REPORTS} holds no rendered report; run `snakemake --cores all` first.")
    folders = [root / folder for folder in (output, beside) if folder]
    for file, target in pages.items():
        text, other = _copied(read_text(file, "report"), target, folders, placed.values()), folders[-1] / target.name
        write_text(target, _naming(text, target, other) if other.exists() and other not in pages.values() else text)
    for other in _namesakes(beside, {"output": output, "beside": beside}) if beside else ():
        if other.exists():
            write_text(other, _naming(read_text(other, "report"), other, root / output / other.name))
    for file in placed.keys() - pages.keys():
        with atomic_path(placed[file]) as temporary:
            shutil.copyfile(file, temporary)
    typer.echo(f"{len(pages)} reports copied to {output}")
