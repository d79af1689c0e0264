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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reproduction.commands.runs import Configs, open_project
from reproduction.run.results import FIGURES, REPORTS, TABLES
from reproduction.sources import source_of
from reproduction.tables.configuration import find_root
from reproduction.tables.project import Project
from reproduction.tables.tables import Table
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import OutputKind, check_output_file, has_keys, write_json, write_text

if TYPE_CHECKING:
    from reproduction.render.pages.model import Logged, Report

#: The only interface that a server started here listens on.
HOST = "127.0.0.1"

#: Settings of a server started here, unless the user has set them: without ten processes that nothing here needs, and
#: without a warning about MLflow's own imports.
_SERVER_SETTINGS = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PYTHONWARNINGS": "ignore:starlette.middleware.wsgi is deprecated",
}


def init_tracking(
    output: Annotated[
        Path | None,
        typer.Option(help="Write which store is used to this file, and only warn where it cannot be used."),
        Writes(OutputKind("a record of which store is used", has_keys("initialised", "tracking_uri"))),
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
    project = open_project(config)
    chosen = [project.table(name) for name in table or project.tables]
    if table is None:
        chosen = [one for one in chosen if source_of(one).is_tracked(project, one)]
    if not chosen:
        raise ResultError("no table is computed yet; `snakemake --cores all reports/quarot_table1.md` computes one.")
    for source in dict.fromkeys(map(source_of, chosen)):
        own = [one for one in chosen if source_of(one) is source]
        rendered = {one.id for one in own if (project.root / REPORTS / f"{one.id}.md").exists()}
        read = {one.id: source.collect(project, one) for one in own}
        logged = source.log(project, own, read)
        for one in own:
            shown = logged.get(one.id)
            report = make_report(project, one, read[one.id], shown, write=one.id in rendered)
            if shown is not None:
                attach(project, one.id, shown, report)
            said = f"{len(shown.runs)} runs in experiment {shown.experiment}" if shown else "nothing to show"
            typer.echo(f"{one.id}: {said}")


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
    typer.echo(f"MLflow starts at {server}; Ctrl-C ends it. Below, it prints warnings and errors.")
    sys.stdout.flush()
    for name, value in _SERVER_SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI"):
        os.environ[name] = location.uri  # all users of a machine can read a command's arguments
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [*command, "--uvicorn-opts", "--log-level warning"])  # else a line for each request


@contextmanager
def warning(consequence: str) -> Iterator[None]:
    """Go on where MLflow cannot be used, after a sentence on standard error."""
    from reproduction.render.tracking import TrackingError

    try:
        yield
    except TrackingError as error:
        typer.echo(f"warning: {error} {consequence[0].upper()}{consequence[1:]}.", err=True)


def make_report(
    project: Project, table: Table, collected: Any, logged: "Logged | None", *, write: bool = True
) -> "Report":
    """A table's report; its page is written unless the file says the same already."""
    from reproduction.render.pages.markdown import markdown, page_path

    report = source_of(table).report(project, table, collected, logged)
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
