"""`rotquant runs`: the cells of the tables as runs; list them, show one, compute one.

These are the commands of the Snakemake rules. Run by hand inside the project folder they do the same, with
config/config.yaml as the configuration or with the files given by --config on top of it.
"""

import os
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from reproduction.commands import completion
from reproduction.planning.current import current_plan
from reproduction.run import execution
from reproduction.run.plan import Plan, config_file, read_plan
from reproduction.run.results import read_result, run_path
from reproduction.run.stages.jobs import prepare_tasks
from reproduction.run.workers import usual_workers
from reproduction.sources import load_project
from reproduction.tables.configuration import find_root
from reproduction.tables.fitting import Fitting
from reproduction.tables.project import Project
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import AllowCode
from rotquant.commands.outputs import FILE
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import json_text, read_json

runs_app = typer.Typer(
    help="The runs of the tables: list, show, compute, and show them in MLflow.", no_args_is_help=True
)

Configs = Annotated[
    list[Path] | None,
    typer.Option("--config", help="Configuration on top of config/config.yaml, e.g. config/paper.yaml. Repeatable."),
    FILE,
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="The plan that Snakemake wrote, below results/plans/, with its configuration."),
    FILE,
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that compute, spread over the GPUs. Default: one for each GPU, else one for each core."
    ),
]
OtherDevice = Annotated[
    str | None, typer.Option("--device", help="In place of the configuration's: cpu, cuda, cuda:1 ..., auto.")
]
Key = Annotated[str, typer.Argument(help="A run's key, as `rotquant runs list` prints it.")]


def device_of(asked: str | None, configured: str) -> str:
    """The device that an option asks for, or the configuration's.

    Raises:
        ConfigError: there is no such kind of device.
    """
    if asked is not None and not re.fullmatch(r"cpu|auto|cuda(:\d+)?", asked):
        raise ConfigError(f"unknown device {asked!r}; use cpu, cuda, cuda:N or auto.")
    return asked or configured


def open_project(config: list[Path] | None, plan: Path | None = None) -> Project:
    """The project around the working folder; its folder becomes the working folder, to which corpora are relative.

    Args:
        plan: take the configuration from this plan.
    """
    if plan is not None:
        chosen = open_plan(config, plan)
        fits = {name: Fitting.model_validate(one) for name, one in chosen.fits.items()}
        return load_project([config_file(Path.cwd(), chosen)], fits=fits)
    overrides = [path.resolve() for path in config or []]
    os.chdir(find_root())
    return load_project(overrides)


def open_plan(config: list[Path] | None, plan: Path | None) -> Plan:
    """The plan of that file, or of the configuration where none is named; the working folder becomes the project's.

    Raises:
        ConfigError: both are named.
        ResultError: there is no such plan, or it is damaged.
    """
    if plan is not None and config:
        raise ConfigError("a plan has its configuration in it: name --plan or --config, not both.")
    overrides, path = [path.resolve() for path in config or []], plan and plan.resolve()
    os.chdir(find_root())
    return read_plan(path) if path else current_plan(Path.cwd(), overrides, write=False)


@runs_app.command("list")
@answers({"runs": "each with its keys, table, row, column, metric, seed, and value, null where it is not computed"})
def list_runs(
    table: Annotated[
        str | None,
        typer.Argument(autocompletion=completion.tables, help="Only the runs of this table, e.g. quarot_table1."),
    ] = None,
    config: Configs = None,
) -> CommandResult:
    """List the runs of all tables or of one: its keys, cell, seed, and the value where it is computed.

    Example: `rotquant runs list quarot_table1`
    """
    project = open_project(config)
    head = ("key", "weights", "rotation", "table", "row", "column", "metric", "seed", "value")
    shown, listed = RichTable(*head), []
    for column in shown.columns:
        column.no_wrap = True  # keys must be whole where they are piped
    for name in [table] if table else project.tables:
        for cell in project.cells(name):
            for run in cell.runs:
                path = project.root / run_path(run.key)
                value = read_result(path).value if path.exists() else None
                keys = (run.key, run.weights_key, run.rotation_key)
                line = (*keys, name, cell.row, cell.column, run.metric.kind, run.seed)
                listed.append(dict(zip(head, (*line, value), strict=True)))
                cells = ("-" if part is None else str(part) for part in line)
                shown.add_row(*cells, "-" if value is None else f"{value:.4f}")
    return CommandResult({"runs": listed}, (shown,))


@runs_app.command()
@answers({"run": "model, recipe, metric, seed", "metrics, provenance and others": "once it is computed; else its keys"})
def show(key: Key, config: Configs = None) -> CommandResult:
    """Print a run as JSON: its recipe and, once it is computed, its metrics and where they come from."""
    path = find_root() / run_path(key)
    if path.exists():
        read_result(path)
        found = read_json(path, "run file")
    else:
        run = open_plan(config, None).run(key)
        keys = {"key": key, "weights_key": run.weights_key, "rotation_key": run.rotation_key}
        found = {**keys, "run": run.model_dump(mode="json")}
    return CommandResult(found, (json_text(found),))


@runs_app.command()
def tasks(
    key: Annotated[str, typer.Argument(help="A set of zero-shot tasks: a file below results/tasks/.")],
    config: Configs = None,
    plan: PlanFile = None,
) -> None:
    """Make or check the data of the zero-shot tasks before any job needs them, and record what they are."""
    prepare_tasks(open_plan(config, plan), key, typer.echo)


@runs_app.command()
def execute(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=completion.tables,
            help="Tables, papers, or keys of `rotquant runs list`: runs, weights, rotations. Default: all.",
        ),
    ] = None,
    jobs: Jobs = None,
    device: OtherDevice = None,
    config: Configs = None,
    plan: PlanFile = None,
    again: Annotated[
        bool, typer.Option(help="Compute the named runs, weights or rotations though they are there.")
    ] = False,
    allow_code_execution: AllowCode = False,
) -> None:
    """Compute what is not current of tables or of all: rotations, weights, runs; the workflow's jobs do no other thing.

    It needs neither Snakemake nor MLflow, and lm-eval only for zero-shot accuracy. Each result is a file at once, so an
    interrupted call continues, several may run on one project, and the workflow finds the results current.

    Example: `rotquant runs execute quarot spinquant --device cuda --jobs 8 --config config/thorough.yaml`
    """
    chosen = open_plan(config, plan)
    allowed = allow_code_execution or chosen.allow_code_execution
    changes = {"device": device_of(device, chosen.device), "allow_code_execution": allowed}
    chosen = chosen.model_copy(update=changes)
    execution.execute(chosen, targets or (), jobs or usual_workers(chosen.device), typer.echo, again)
