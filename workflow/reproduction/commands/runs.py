"""`rotquant runs`: the cells of the tables as runs; list them, show one, compute one.

These are the commands of the Snakemake rules. Run by hand inside the project folder they do the same, with
config/config.yaml as the configuration or with the files given by --config on top of it.
"""

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from reproduction.identity.names import placed
from reproduction.planning.current import current_plan
from reproduction.run import execution
from reproduction.run.plan import Plan, config_file, read_plan, write_plan
from reproduction.run.results import read_result
from reproduction.run.stages.jobs import make as make_result
from reproduction.run.workers import usual_workers
from reproduction.sources import load_project, patterns
from reproduction.tables.configuration import find_root
from reproduction.tables.fitting import Fitting
from reproduction.tables.project import Project
from reproduction.tables.shorthand import each
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.outputs import FILE
from rotquant.foundation.errors import ConfigError, RotquantError
from rotquant.foundation.files import json_text, read_json
from rotquant.foundation.written import yaml_value

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
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code-execution",
        help="Run the programs that a model writes for HumanEval, in a process without network and with limits.",
    ),
]
Key = Annotated[str, typer.Argument(help="A run's key, as `rotquant runs list` prints it.")]


def table_names() -> list[str]:
    """What a shell completes: the ids of all tables around the working folder, read without validation; else none."""
    try:
        root = find_root()
        files = {path for pattern, _ in patterns() for path in (root / "workflow").glob(pattern)}
        data = [yaml_value(path.read_text(encoding="utf-8"), path.name) for path in sorted(files)]
        return [table["id"] for one in data for table in each(one["tables"])]
    except (RotquantError, OSError, KeyError, TypeError):  # a file that is being written completes nothing
        return []


def device_of(asked: str | None, configured: str) -> str:
    """The device that an option asks for, or the configuration's.

    Raises:
        ConfigError: there is no such kind of device.
    """
    if asked is not None and not re.fullmatch(r"cpu|auto|cuda(:\d+)?", asked):
        raise ConfigError(f"unknown device {asked!r}; use cpu, cuda, cuda:N or auto.")
    return asked or configured


Place = Annotated[
    Path | None, typer.Option("--results", help="The folder of results, where they do not lie in the project."), FILE
]


def open_project(config: list[Path] | None, plan: Path | None = None, place: Path | None = None) -> Project:
    """The project around the working folder; its folder becomes the working folder, to which corpora are relative.

    Args:
        plan: take the configuration from this plan. place: the folder of results.
    """
    if plan is None:
        overrides = [path.resolve() for path in config or []]
        os.chdir(find_root())
        project = load_project(overrides)
        shown = any(map(project.is_only_shown, project.config.slots))
        return dataclasses.replace(project, named=project.names) if shown else project
    chosen = open_plan(config, plan)
    project = _of_plan(Path.cwd(), chosen.path.resolve())
    return project if place is None else dataclasses.replace(project, place=place.resolve())


@functools.cache
def _of_plan(root: Path, path: Path) -> Project:
    """The project of a plan, once in a process."""
    plan = read_plan(path)
    fits = {name: Fitting.model_validate(one) for name, one in plan.fits.items()}
    return load_project([config_file(root, plan)], fits=fits, named=plan.names)


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
        str | None, typer.Argument(autocompletion=table_names, help="Only the runs of this table, e.g. quarot_table1.")
    ] = None,
    config: Configs = None,
) -> CommandResult:
    """List the runs of all tables or of one: its keys, cell, seed, and the value where it is computed.

    Example: `rotquant runs list quarot_table1`
    """
    plan = open_plan(config, None)
    head, results = ("key", "weights", "rotation", "table", "row", "column", "metric", "seed", "value"), plan.results()
    shown, listed = RichTable(*head), []
    for column in shown.columns:
        column.no_wrap = True  # keys must be whole where they are piped
    for name in [table] if table else plan.tables:
        for key, places in plan.table(name).runs.items():
            path, weights = results.run(key), plan.runs[key].weights
            value = read_result(path).value if path.exists() else None
            keys = (key, weights, plan.weights[weights].rotation if weights else None)
            metric, seed = plan.metric(key)["kind"], plan.planned(key).fields["seed"]
            for row, column, _ in places:
                line = (*keys, name, row, column, metric, seed)
                listed.append(dict(zip(head, (*line, value), strict=True)))
                cells = ("-" if part is None else str(part) for part in line)
                shown.add_row(*cells, "-" if value is None else f"{value:.4f}")
    return CommandResult({"runs": listed}, (shown,))


@runs_app.command()
@answers({"run": "model, recipe, metric, seed", "metrics, provenance and others": "once it is computed; else its keys"})
def show(key: Key, config: Configs = None) -> CommandResult:
    """Print a run as JSON: its recipe and, once it is computed, its metrics and where they come from."""
    plan = open_plan(config, None)
    path, run = plan.results().run(key), plan.run(key)
    if path.exists():
        read_result(path)
        found = read_json(path, "run file")
    else:
        keys = {"key": key, "weights_key": run.weights_key, "rotation_key": run.rotation_key}
        found = {**keys, "run": run.model_dump(mode="json")}
    return CommandResult(found, (json_text(found),))


@runs_app.command()
def make(
    result: Annotated[
        str, typer.Argument(help="A key, or a file of the result: results/runs/KEY-CODE.json, another folder's too.")
    ],
    device: OtherDevice = None,
    config: Configs = None,
    plan: PlanFile = None,
    allow_code_execution: AllowCode = False,
) -> None:
    """Compute one result: learned rotations, stored weights, a run, or the tasks of runs. What it needs must be there.

    This is what a job of the workflow does. `rotquant runs execute KEY` computes what is needed too.
    """
    path = Path(result).absolute() if "/" in result else None
    chosen = _changed(open_plan(config, plan), device, allow_code_execution)
    place, key = (None, result) if path is None else placed(path)
    typer.echo(make_result(chosen, key, chosen.results(place)))


def _changed(plan: Plan, device: str | None, allow_code_execution: bool) -> Plan:
    """A plan with what options say."""
    allowed = allow_code_execution or plan.allow_code_execution
    return plan.model_copy(update={"device": device_of(device, plan.device), "allow_code_execution": allowed})


@runs_app.command()
def execute(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=table_names,
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
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the tensors of weights when all runs on them are there.")
    ] = False,
    allow_code_execution: AllowCode = False,
) -> None:
    """Compute what is not there of tables or of all: rotations, weights, runs, each in a process of its own.

    It needs neither Snakemake nor MLflow, and lm-eval only for zero-shot accuracy. Each result is a file at once, so an
    interrupted call continues, and the workflow finds the results.

    Example: `rotquant runs execute quarot spinquant --device cuda --jobs 8 --config config/thorough.yaml`
    """
    chosen = open_plan(config, plan)
    changed = _changed(chosen, device, allow_code_execution)
    keys = execution.wanted(chosen, targets or ())
    write_plan(Path.cwd(), chosen)
    options = ["--plan", str(chosen.path), "--device", changed.device]
    options += ["--allow-code-execution"] * changed.allow_code_execution
    execution.execute(changed, options, keys, jobs or usual_workers(changed.device), typer.echo, again, keep)
