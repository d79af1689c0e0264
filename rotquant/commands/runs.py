"""`rotquant runs`: the cells of the tables as runs; list them, show one, compute one, and keep MLflow in step.

These are the commands of the Snakemake rules. Run by hand inside the project folder they do the same, with
config/config.yaml as the configuration or with the files given by --config on top of it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from rotquant.configuration import find_root
from rotquant.errors import ResultError, RotquantError
from rotquant.files import read_json, write_json
from rotquant.provenance import code_digest
from rotquant.recipes import Run
from rotquant.results import RunResult, batch_path, read_result, run_path, weights_path, write_result
from rotquant.tables import Project, load_project

runs_app = typer.Typer(
    help="The runs behind the tables: list, show, compute, and show them in MLflow.", no_args_is_help=True
)

Configs = Annotated[
    list[Path] | None,
    typer.Option("--config", help="Configuration on top of config/config.yaml, e.g. config/paper.yaml. Repeatable."),
]
Key = Annotated[str, typer.Argument(help="A run's key, as `rotquant runs list` prints it.")]


def open_project(config: list[Path] | None) -> Project:
    """The project around the working folder; its folder becomes the working folder, to which corpora are relative."""
    overrides = [path.resolve() for path in config or []]
    os.chdir(find_root())
    return load_project(overrides)


@runs_app.command("list")
def list_runs(
    table: Annotated[str | None, typer.Argument(help="Only the runs of this table, e.g. quarot_table1.")] = None,
    config: Configs = None,
) -> None:
    """List the runs of all tables or of one: key, weights key, cell, seed, and the value where it is computed.

    Example: `rotquant runs list quarot_table1`
    """
    project = open_project(config)
    shown = RichTable("key", "weights", "table", "row", "column", "seed", "value")
    for column in shown.columns:
        column.no_wrap = True
    for name in [table] if table else project.tables:
        for cell in project.cells(name):
            for run in cell.runs:
                path = project.root / run_path(run.key)
                value = f"{read_result(path).value:.4f}" if path.exists() else "-"
                shown.add_row(run.key, project.batch_of(run) or "-", name, cell.row, cell.column, str(run.seed), value)
    Console(width=None if sys.stdout.isatty() else 200).print(shown)  # keys must be whole where they are piped


@runs_app.command()
def show(key: Key, config: Configs = None) -> None:
    """Print a run as JSON: its recipe and, once it is computed, its metrics and where they come from."""
    project = open_project(config)
    path = project.root / run_path(key)
    console = Console()
    if path.exists():
        read_result(path)
        console.print_json(path.read_text(encoding="utf-8"))
    else:
        run = project.run(key)
        console.print_json(data={"key": key, "weights_key": run.weights_key, "run": run.model_dump(mode="json")})


@runs_app.command()
def weights(
    batch: Annotated[str, typer.Argument(help="A key of the weights column of `rotquant runs list`.")],
    config: Configs = None,
    measure: Annotated[bool, typer.Option(help="Also measure the first run that uses each of these weights.")] = True,
    again: Annotated[bool, typer.Option(help="Make them again where they are there already.")] = False,
) -> None:
    """Rotate and quantize the weights of all seeds of a recipe, each into its folder below results/weights/.

    Weights that the current code has made already are kept, so an interrupted call continues. The first run of each is
    measured in the same process and kept beside the weights, where `rotquant runs compute` finds it: starting a process
    costs as much as evaluating a small model.
    """
    project = open_project(config)
    members = project.batch(batch)
    records = {key: _make_weights(project, runs[0], again) for key, runs in members.items()}
    if measure:
        for runs in members.values():
            _measure_ahead(project, runs[0])
    write_json(project.root / batch_path(batch), {"batch": batch, "weights": records})


@runs_app.command()
def compute(key: Key, config: Configs = None) -> None:
    """Measure one run into results/runs/<key>.json; its weights must be there (`rotquant runs weights`)."""
    project = open_project(config)
    run = project.run(key)
    result = _measured_ahead(project, run) or _measure(project, run)
    write_result(project.root / run_path(key), result)
    typer.echo(_summary(result))


@runs_app.command("init-tracking")
def init_tracking(
    output: Annotated[Path | None, typer.Option(help="Write which store is used to this file.")] = None,
) -> None:
    """Create MLflow's database where it is missing, so that parallel processes find it complete."""
    from rotquant import tracking

    root = find_root()
    uri = tracking.initialise(root)
    if output:
        write_json(
            output, {"tracking_uri": tracking.printable(uri), "initialised": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        )
    typer.echo(tracking.printable(uri))


@runs_app.command("sync-tracking")
def sync_tracking(
    table: Annotated[list[str] | None, typer.Argument(help="Only these tables. Default: all.")] = None,
    config: Configs = None,
) -> None:
    """Make MLflow show exactly the result files: one run per computed run, older ones of the same key deleted."""
    from rotquant import tracking

    project = open_project(config)
    for name in table or project.tables:
        logged = tracking.log_table(project, project.table(name))
        typer.echo(f"{name}: {len(logged.runs)} runs in experiment {project.table(name).paper}")


def _make_weights(project: Project, run: Run, again: bool) -> dict[str, Any]:
    """Make a run's stored weights, unless the current code has done so; return their provenance."""
    folder = project.root / weights_path(run.weights_key)
    record = folder / "weights.json"
    if record.exists() and not again:
        provenance = read_json(record, "weights record")
        if provenance.get("code_digest") == code_digest("weights", run.recipe):
            typer.echo(f"weights {run.weights_key}: there already")
            return provenance
    from rotquant.execution.weights import compute_weights

    provenance = compute_weights(run, project.checkpoint_path(run.checkpoint), folder, project.config.device)
    write_json(record, provenance)
    typer.echo(f"weights {run.weights_key}: {provenance['seconds']:.1f} s")
    return provenance


def _measure_ahead(project: Project, run: Run) -> None:
    """Measure a run into its weights' folder. A failure is left to the run's own job, which will meet it again."""
    if _measured_ahead(project, run) is not None:
        return
    try:
        result = _measure(project, run)
    except RotquantError as error:
        typer.echo(f"run {run.key} not measured ahead: {error}")
        return
    write_result(project.root / weights_path(run.weights_key) / "runs" / f"{run.key}.json", result)
    typer.echo(_summary(result))


def _measure(project: Project, run: Run) -> RunResult:
    """Measure a run on its checkpoint or its stored weights."""
    from rotquant.execution.runs import compute_run

    folder = project.root / weights_path(run.weights_key) if run.weights_key else None
    weights = _weights_record(project, run) if folder else None
    slot = project.config.slot(project.cells_of_runs[run.key][1])
    checkpoint = project.checkpoint_path(run.checkpoint)
    metrics, provenance = compute_run(run, checkpoint, folder, project.config.device, slot.batch_size)
    return RunResult(run, metrics, provenance, weights)


def _measured_ahead(project: Project, run: Run) -> RunResult | None:
    """The run as the weights job measured it, unless weights or code have changed since."""
    if run.weights_key is None:
        return None
    path = project.root / weights_path(run.weights_key) / "runs" / f"{run.key}.json"
    if not path.exists():
        return None
    try:
        result = read_result(path)
    except RotquantError:
        return None
    same = result.provenance.get("code_digest") == code_digest("runs", run.recipe)
    return result if same and result.weights == _weights_record(project, run) else None


def _weights_record(project: Project, run: Run) -> dict[str, Any]:
    """The provenance of a run's stored weights.

    Raises:
        ResultError: they are not there; the sentence says how to make them.
    """
    path = project.root / weights_path(run.weights_key) / "weights.json"
    if not path.exists():
        batch = project.batch_of(run)
        raise ResultError(
            f"run {run.key} needs the weights {path.parent}, which are not there: `rotquant runs weights {batch}` "
            f"makes them (or delete {batch_path(batch)} and start Snakemake again)."
        )
    return read_json(path, "weights record")


def _summary(result: RunResult) -> str:
    kind = result.run.metric.kind
    return f"run {result.key}: {kind} {result.value:.4f} in {result.provenance['seconds']:.1f} s"
