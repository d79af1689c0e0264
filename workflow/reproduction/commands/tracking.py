"""`rotquant runs init-tracking`, `sync-tracking` and `ui`: MLflow's view of the results, made, mended and looked at.

MLflow never decides whether results and reports are written: where it cannot be used, rendering goes on with a warning.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reproduction.commands.runs import Configs, open_project
from reproduction.run.results import FIGURES, REPORTS, TABLES, run_path
from reproduction.tables.configuration import find_root
from reproduction.tables.project import Project
from reproduction.tables.tables import Table
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import check_output_file, write_json, write_text

if TYPE_CHECKING:
    from reproduction.frame.values import Values
    from reproduction.render.pages.model import Report
    from reproduction.render.speed.numbers import Measured
    from reproduction.render.tracking import Logged
    from reproduction.run.results import RunResult
    from reproduction.tables.speed.definitions import SpeedTable

#: The only interface that a server started here listens on.
HOST = "127.0.0.1"


def init_tracking(
    output: Annotated[
        Path | None, typer.Option(help="Write which store is used to this file, and only warn where it cannot be used.")
    ] = None,
) -> None:
    """Create MLflow's database where it is missing, so that parallel processes find it complete."""
    from reproduction.render import tracking

    root = find_root()
    if output is None:
        typer.echo(tracking.initialise(root))
        return
    check_output_file(output)
    state = {"initialised": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "tracking_uri": None}
    with warning("reports are written without MLflow, and `rotquant runs sync-tracking` shows them in it later"):
        state["tracking_uri"] = tracking.initialise(root)
    write_json(output, state)


def sync_tracking(
    table: Annotated[
        list[str] | None, typer.Argument(help="Only these tables. Default: all that are computed.")
    ] = None,
    config: Configs = None,
) -> None:
    """Make MLflow show exactly the result files: one run per computed run, older ones of the same key deleted.

    A table's own run gets its rendered report, its numbers and its figure.
    """
    from reproduction.frame.values import collect, read_back
    from reproduction.render import tracking
    from reproduction.render.speed.numbers import read_numbers
    from reproduction.render.speed.report import speed_report

    project = open_project(config)
    names = table or [*filter(lambda name: _is_computed(project, name), project.tables)]
    speed = [name for name in names if name in project.speed]
    accuracy = [project.table(name) for name in names if name not in project.speed]
    if table is None:
        speed = [name for name in project.speed if (project.root / REPORTS / f"{name}.md").exists()]
    if not accuracy and not speed:
        raise ResultError("no table is computed yet; `snakemake --cores all reports/quarot_table1.md` computes one.")
    rendered = {table.id for table in accuracy if (project.root / REPORTS / f"{table.id}.md").exists()}
    read = {table.id: (read_back if table.id in rendered else collect)(project, table) for table in accuracy}
    results = {name: found for name, (_, found) in read.items()}
    for chosen, logged in zip(
        accuracy, tracking.log_tables(project, accuracy, results) if accuracy else [], strict=True
    ):
        report = make_report(project, chosen, *read[chosen.id], logged, write=chosen.id in rendered)
        attach(project, chosen.id, logged, report)
        typer.echo(f"{chosen.id}: {len(logged.runs)} runs in experiment {logged.experiment}")
    for name in speed:
        chosen = project.speed_table(name)
        measured = read_numbers(project, chosen)
        logged = log_speed(project, chosen, measured, speed_report(project, chosen, measured))
        typer.echo(f"{name}: {f'experiment {logged.experiment}' if logged else 'not measured'}")


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server on this machine.")] = 5000,
) -> None:
    """Look at the runs in MLflow: print where each paper's are, and start its server, on this machine alone.

    Where MLFLOW_TRACKING_URI names a server, only print. Ctrl-C ends it.
    """
    from reproduction.render import tracking

    location = tracking.find_location(find_root())
    server = tracking.printable(location.uri).rstrip("/") if location.is_server else f"http://{HOST}:{port}"
    with tracking.opened(find_root()) as store:
        links = tracking.links(store, server)
    for name, link in links.items():
        typer.echo(f"{name}: {link}")
    if not links:
        typer.echo("no runs yet: rendering a report shows its runs, `rotquant runs sync-tracking` those of all reports")
    if location.is_server:
        return
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((HOST, port))
        except OSError as error:
            raise tracking.TrackingError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port."
            ) from None
    sys.stdout.flush()
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # ten processes that nothing here needs
    os.environ["MLFLOW_BACKEND_STORE_URI"] = location.uri  # all users of a machine can read a command's arguments
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, command)


@contextmanager
def warning(consequence: str) -> Iterator[None]:
    """Go on where MLflow cannot be used, after a sentence on standard error."""
    from reproduction.render.tracking import TrackingError

    try:
        yield
    except TrackingError as error:
        typer.echo(f"warning: {error} {consequence[0].upper()}{consequence[1:]}.", err=True)


def make_report(
    project: Project,
    table: Table,
    values: "Values",
    results: "dict[str, RunResult]",
    logged: "Logged | None",
    *,
    write: bool = True,
) -> "Report":
    """A table's report; its page is written unless the file says the same already."""
    from reproduction.render.pages.markdown import markdown, page_path
    from reproduction.render.pages.report import report_of

    report = report_of(project, table, values, results, logged)
    text, file = markdown(report), project.root / page_path(table.id)
    if write and not (file.exists() and file.read_bytes() == text.encode()):
        write_text(file, text)
    return report


def attach(project: Project, name: str, logged: "Logged", report: "Report") -> None:
    """Attach the report, the numbers and the figure of a table, those that there are, to its run, with its score."""
    from reproduction.render import tracking

    picture = FIGURES / f"{report.picture or name}.svg"
    files = [project.root / path for path in (REPORTS / f"{name}.md", TABLES / f"{name}.csv", picture)]
    tracking.log_report(project.root, logged, report, [file for file in files if file.exists()])


def log_speed(project: Project, table: "SpeedTable", measured: "Measured", report: "Report") -> "Logged | None":
    """Show the record of a speed table in MLflow, with its report, numbers and figure; None: never measured."""
    from reproduction.render import tracking

    if measured.source is None:
        return None
    logged = tracking.log_speed(project, measured.source.record, table)
    attach(project, table.id, logged, report)
    return logged


def _is_computed(project: Project, name: str) -> bool:
    return all((project.root / run_path(run.key)).exists() for cell in project.cells(name) for run in cell.runs)
