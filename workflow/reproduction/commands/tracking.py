"""`rotquant runs sync-tracking` and `ui`: MLflow's view of the results, completed from their files and looked at."""

import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from reproduction.commands.runs import Configs, open_plan
from reproduction.run.results import REPORTS
from reproduction.run.tracking.entries import KIND, entries_of, keys_of
from rotquant.foundation.errors import ResultError
from rotquant.foundation.progress import track

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: The only interface that a server started here listens on.
HOST = "127.0.0.1"

#: Runs of which MLflow draws charts before a user chooses others: the first.
_DRAWN = 10

#: Settings of a server started here, unless the user has set them: without ten processes that nothing here needs, and
#: without a warning about MLflow's own imports.
_SERVER_SETTINGS = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PYTHONWARNINGS": "ignore:starlette.middleware.wsgi is deprecated",
}


def sync_tracking(
    table: Annotated[
        list[str] | None, typer.Argument(help="Only these tables. Default: all of which something is there.")
    ] = None,
    config: Configs = None,
) -> None:
    """Log what MLflow lacks of the results whose files are there, for example after it could not be reached.

    Runs of an older result are deleted, and what a killed process has left running is marked so. Again, it changes
    nothing.
    """
    from reproduction.run.tracking.store import PaperExperiment, opened, refusing

    plan = open_plan(config, None)
    experiments, logged = dict[str, PaperExperiment](), set[str]()
    tables = {name: plan.table(name) for name in table or plan.tables}
    client = opened()
    for name, planned in tables.items():
        if not (planned.runs or planned.benchmarks):
            continue
        entries = [*entries_of(plan, name, plan.results(), logged)]
        keys, logged = keys_of(plan, planned), logged | {entry.key for entry in entries}
        if logged.isdisjoint(keys) and not (REPORTS / f"{name}.md").exists():
            continue
        with refusing():
            for entry in track(entries, name, "run"):
                for paper in entry.papers:
                    if paper not in experiments:
                        experiments[paper] = PaperExperiment(client, plan.tracking, paper)
                        experiments[paper].read_all()
                    experiments[paper].record(entry)
        there = len(logged.intersection(keys))
        typer.echo(f"{name}: {there} of {len(keys)} results, in experiment {experiments[planned.paper].name}")
    if not experiments:
        raise ResultError("no table is computed yet; `snakemake --cores all reports/quarot_table1.md` computes one.")


def _view(client: "MlflowClient", experiment: str) -> str:
    """The end of a link: charts of an experiment's runs where those that are drawn first share a metric, else a list.

    Runs are in the order of their names: in that of time MLflow folds them under their tables, which have no metrics.
    An experiment of tables alone has no runs to filter by.
    """
    only, name = f"tags.`{KIND}` = 'run'", "tags.`mlflow.runName`"
    runs = client.search_runs([experiment], only, max_results=_DRAWN, order_by=[f"{name} ASC"])
    shared = set[str].intersection(*(set(run.data.metrics) for run in runs)) if runs else set()
    chart = "&compareRunsMode=CHART" if shared - {"seconds"} else ""
    chosen = f"&searchFilter={quote(only)}&orderByKey={quote(name)}&orderByAsc=true" if runs else ""
    return f"runs?workflowType=machine_learning{chart}{chosen}"


def ui(port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server on this machine.")] = 5000) -> None:
    """Look at the runs in MLflow: print where each paper's are, and start its server, on this machine alone.

    Where MLFLOW_TRACKING_URI names a server, only print. Ctrl-C ends it.
    """
    from reproduction.run.tracking.store import TrackingError, is_server, location, opened, printable
    from reproduction.tables.configuration import find_root

    os.chdir(find_root())
    uri = location()
    server = printable(uri).rstrip("/") if is_server(uri) else f"http://{HOST}:{port}"
    client = opened()
    found = [one for one in client.search_experiments() if one.name != "Default"]
    for experiment in found:
        place = f"{server}/#/experiments/{experiment.experiment_id}"
        typer.echo(f"{experiment.name}: {place}/{_view(client, experiment.experiment_id)}")
    if not found:
        typer.echo("no runs yet: they are logged as they are computed, and by `rotquant runs sync-tracking`")
    if is_server(uri):
        return
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((HOST, port))
        except OSError as error:
            raise TrackingError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port."
            ) from None
    typer.echo(f"MLflow starts at {server}; Ctrl-C ends it. Below, it prints warnings and errors.")
    sys.stdout.flush()
    for name, value in _SERVER_SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI"):
        os.environ[name] = uri  # all users of a machine can read a command's arguments
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [*command, "--uvicorn-opts", "--log-level warning"])  # else a line for each request
