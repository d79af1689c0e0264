"""`rotquant runs`: the cells of the tables as runs; list them, show one, compute one.

These are the commands of the Snakemake rules. Run by hand inside the project folder they do the same, with
config/config.yaml as the configuration or with the files given by --config on top of it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from rotquant.foundation.errors import ConfigError, ResultError, RotquantError
from rotquant.foundation.files import check_output_file, file_digest, read_json, write_json
from rotquant.recipes.recipe import Run
from rotquant.study.configuration import find_root
from rotquant.study.digests import code_digest
from rotquant.study.project import Project, load_project
from rotquant.study.quantities import quantities
from rotquant.study.results import (
    HISTORY_FILE,
    ROTATION_RECORD,
    ROTATIONS_FILE,
    RunResult,
    batch_path,
    group_path,
    read_result,
    rotation_path,
    run_path,
    task_set_path,
    weights_path,
    write_result,
)

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
    """List the runs of all tables or of one: its keys, cell, seed, and the value where it is computed.

    Example: `rotquant runs list quarot_table1`
    """
    project = open_project(config)
    shown = RichTable("key", "group", "weights", "rotation", "table", "row", "column", "metric", "seed", "value")
    for column in shown.columns:
        column.no_wrap = True
    for name in [table] if table else project.tables:
        for cell in project.cells(name):
            for run in cell.runs:
                path = project.root / run_path(run.key)
                value = f"{read_result(path).value:.4f}" if path.exists() else "-"
                keys = (run.key, project.group_of[run.key], project.batch_of(run) or "-", run.rotation_key or "-")
                shown.add_row(*keys, name, cell.row, cell.column, run.metric.kind, str(run.seed), value)
    Console(width=None if sys.stdout.isatty() else 270).print(shown)  # keys must be whole where they are piped


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
        keys = {"key": key, "weights_key": run.weights_key, "rotation_key": run.rotation_key}
        console.print_json(data={**keys, "run": run.model_dump(mode="json")})


@runs_app.command()
def rotations(
    key: Annotated[str, typer.Argument(help="A key of the rotation column of `rotquant runs list`.")],
    config: Configs = None,
    again: Annotated[bool, typer.Option(help="Learn them again where they are there already.")] = False,
) -> None:
    """Learn rotations R1 and R2 (SpinQuant) into `results/rotations/<key>/`, for all weights that are made with them.

    An interrupted call continues at its last checkpoint.
    """
    project = open_project(config)
    run = project.rotation(key)[0]
    folder = project.root / rotation_path(key)
    if not again and (folder / ROTATION_RECORD).exists():
        record = read_json(folder / ROTATION_RECORD, "record of rotations")
        same_code = record.get("code_digest") == code_digest("rotations", run.recipe)
        whole = record.get("digest") == file_digest(folder / ROTATIONS_FILE) and (folder / HISTORY_FILE).exists()
        if same_code and whole:
            typer.echo(f"rotations {key}: there already")
            return
    check_output_file(folder / ROTATION_RECORD)
    from rotquant.study.stages.rotations import compute_rotations

    record = compute_rotations(run, project.checkpoint_path(run.checkpoint), folder, project.config.device)
    write_json(folder / ROTATION_RECORD, record)
    typer.echo(f"rotations {key}: {record['seconds']:.1f} s")


@runs_app.command()
def weights(
    batch: Annotated[str, typer.Argument(help="A key of the weights column of `rotquant runs list`.")],
    config: Configs = None,
    measure: Annotated[bool, typer.Option(help="Also measure what all tables with these weights show.")] = True,
    again: Annotated[bool, typer.Option(help="Make them again where they are there already.")] = False,
) -> None:
    """Rotate and quantize the weights of all seeds of a recipe, each into its folder below results/weights/.

    Weights that the current code has made already are kept, so an interrupted call continues. The group of runs that
    every table with these weights shows, if there is one, is measured in the same process, where `rotquant runs
    measure` finds it done: starting a process costs as much as evaluating a small model.
    """
    project = open_project(config)
    members = project.batch(batch)
    records = {key: _make_weights(project, runs[0], again) for key, runs in members.items()}
    group = project.measured_with(batch) if measure else None
    if group is not None:
        try:
            _measure(project, project.group(group))
        except RotquantError as error:  # left to the group's own job, which will meet it again
            typer.echo(f"not measured ahead: {error}")
    write_json(project.root / batch_path(batch), {"batch": batch, "weights": records})


@runs_app.command()
def tasks(
    key: Annotated[str, typer.Argument(help="A set of zero-shot tasks: a file below results/tasks/.")],
    config: Configs = None,
) -> None:
    """Make or check the data of the zero-shot tasks before any job needs them, and record what they are."""
    from rotquant.metrics import zeroshot

    project = open_project(config)
    if key not in project.task_sets:
        raise ConfigError(f"no run is measured on the tasks {key!r} under this configuration.")
    run = project.task_sets[key]
    folder = zeroshot.prepare(run.metric, Path(), run.corpora.get(run.metric.corpus))
    write_json(project.root / task_set_path(key), zeroshot.identity(run.metric, folder))
    typer.echo(str(folder))


@runs_app.command()
def measure(
    group: Annotated[str, typer.Argument(help="A key of the group column of `rotquant runs list`.")],
    config: Configs = None,
    again: Annotated[bool, typer.Option(help="Measure again what is there already.")] = False,
) -> None:
    """Measure a group of runs, each into `results/runs/<key>.json`; needs their weights (`rotquant runs weights`).

    A group is what one job measures: runs on equal weights, all seeds, that the same tables ask for. Runs that the
    current code has measured on these weights are kept, so an interrupted call continues.
    """
    project = open_project(config)
    runs = project.group(group)
    _measure(project, runs, again)
    values = {run.key: read_result(project.root / run_path(run.key)).value for run in runs}
    write_json(project.root / group_path(group), {"group": group, "runs": values})


@runs_app.command()
def compute(key: Key, config: Configs = None) -> None:
    """Measure one run into `results/runs/<key>.json`; its weights must be there (`rotquant runs weights`)."""
    project = open_project(config)
    _measure(project, (project.run(key),), again=True)


def _make_weights(project: Project, run: Run, again: bool) -> dict[str, Any]:
    """Make a run's stored weights, unless the current code has done so; return their provenance."""
    folder = project.root / weights_path(run.weights_key)
    record = folder / "weights.json"
    rotation = None if run.rotation_key is None else project.root / rotation_path(run.rotation_key)
    digest = None if rotation is None else _rotation_record(rotation)["digest"]
    if record.exists() and not again:
        provenance = read_json(record, "weights record")
        same_code = provenance.get("code_digest") == code_digest("weights", run.recipe)
        if same_code and provenance.get("rotation", {}).get("digest") == digest:
            typer.echo(f"weights {run.weights_key}: there already")
            return provenance
    check_output_file(record)
    from rotquant.study.stages.weights import compute_weights

    provenance = compute_weights(run, project.checkpoint_path(run.checkpoint), folder, project.config.device, rotation)
    write_json(record, provenance)
    typer.echo(f"weights {run.weights_key}: {provenance['seconds']:.1f} s")
    return provenance


def _measure(project: Project, runs: Sequence[Run], again: bool = False) -> None:
    """Measure runs that are not measured yet, loading each weights folder once, and write each result at once."""
    waiting: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        if again or not _is_measured(project, run):
            waiting.setdefault((run.checkpoint, run.weights_key), []).append(run)
        else:
            typer.echo(f"run {run.key}: there already")
    if not waiting:
        return
    check_output_file(project.root / run_path(runs[0].key))
    from rotquant.study.stages.runs import measure_runs

    for (checkpoint, weights_key), members in waiting.items():
        record = None if weights_key is None else _weights_record(project, members[0])
        folder = None if weights_key is None else project.root / weights_path(weights_key)
        place = project.places[members[0].key]
        batch_size = project.slot(project.table(place.table), place.column).batch_size
        device = project.config.device
        for run, found, provenance in measure_runs(
            members, project.checkpoint_path(checkpoint), folder, device, batch_size
        ):
            result = RunResult(run, found.metrics, provenance, record, found.arrays)
            write_result(project.root / run_path(run.key), result)
            typer.echo(_summary(result))


def _is_measured(project: Project, run: Run) -> bool:
    """Whether a run's result is there, by the current code and on the weights that are there."""
    path = project.root / run_path(run.key)
    if not path.exists():
        return False
    try:
        result = read_result(path)
    except RotquantError:
        return False
    record = None if run.weights_key is None else _weights_record(project, run)
    current = code_digest("runs", run.recipe, run.metric)
    return result.provenance.get("code_digest") == current and result.weights == record


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


def _rotation_record(folder: Path) -> dict[str, Any]:
    """The record of learned rotations.

    Raises:
        ResultError: they are not there; the sentence says how to make them.
    """
    path = folder / ROTATION_RECORD
    if not path.exists():
        raise ResultError(
            f"the weights need the learned rotations {folder}, which are not there: "
            f"`rotquant runs rotations {folder.name}` learns them."
        )
    return read_json(path, "record of rotations")


def _summary(result: RunResult) -> str:
    name = quantities(result.run.metric)[0].name
    return f"run {result.key}: {name} {result.value:.4f} in {result.provenance['seconds']:.1f} s"
