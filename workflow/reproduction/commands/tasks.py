"""`rotquant tasks`: the zero-shot tasks, and the folder of their definitions."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from reproduction.corpora import MODULES
from reproduction.tasks import TASKS, identity, prepare, suite_of, task_names
from reproduction.tasks.settings import ZeroShot
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.outputs import FILE, NEW
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import atomic_directory, check_output_folder


def _completed(incomplete: str) -> list[str]:
    """What a shell completes the last of the tasks with that commas separate."""
    before = incomplete.rpartition(",")
    return ["".join(before[:2]) + name for known in TASKS.values() for name in known]


Tasks = Annotated[
    str | None,
    typer.Option(
        autocompletion=_completed,
        help="Zero-shot tasks, separated by commas; `rotquant tasks` lists them. Default: a suite's.",
    ),
]
Suite = Annotated[str | None, typer.Option(help="paper or shipped. Default: the one that has the tasks.")]
Shots = Annotated[int, typer.Option(min=0, help="How many solved examples stand before each item of a task.")]
TaskData = Annotated[
    Path | None,
    typer.Option(help="Suite paper: a folder with one file per task (piqa.jsonl, ...) in place of the hub."),
    FILE,
]


@answers({"tasks": "by suite and name: measure, chance in percent, what it asks; with -o the items of each"})
def tasks(
    suite: Suite = None,
    tasks: Tasks = None,
    task_data: TaskData = None,
    shots: Shots = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the tasks' definitions for lm-eval here; local data is checked."),
        NEW,
    ] = None,
) -> CommandResult:
    """List the zero-shot tasks of the tables; with -o, write a suite as a folder of lm-eval's definitions.

    Example: `rotquant tasks --suite shipped -o tasks/`, of which `rotquant evaluate MODEL --tasks next_word
    --include-path tasks/` asks one.
    """
    metric = zero_shot_metric(tasks, suite, task_data, shots)
    if output is not None:
        return _write(metric, output)
    table, listed = Table("suite", "task", "quoted", "chance", "what it asks"), {}
    for name, known in TASKS.items():
        for key, task in known.items():
            if suite in (None, name) and key in (metric.tasks or known):
                chance = "-" if task.chance is None else f"{task.chance:.0f} %"
                table.add_row(name, key, task.measure, chance, task.description)
                about = {"measure": task.measure, "chance": task.chance, "asks": task.description}
                listed.setdefault(name, {})[key] = about
    return CommandResult({"tasks": listed}, (table,))


def zero_shot_metric(tasks: str | None, suite: str | None, task_data: Path | None, shots: int) -> ZeroShot:
    """The metric that command-line options ask for.

    Raises:
        RecipeError: unknown suite or task, or options that exclude each other.
    """
    names = () if tasks is None else tuple(name.strip() for name in tasks.split(","))
    if suite is None:
        suite = "paper" if task_data else suite_of(names)
    fields: dict[str, Any] = {"suite": suite, "tasks": names, "shots": shots}
    fields["path"] = str(task_data) if task_data else None
    fields["corpus"] = MODULES.name if suite == "shipped" else None
    try:
        metric = ZeroShot(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"--{first['loc'][0]}: " if first["loc"] else ""
        raise RecipeError(f"{where}{first['msg'].removeprefix('Value error, ')}.") from None
    task_names(metric)
    return metric


def _write(metric: ZeroShot, output: Path) -> CommandResult:
    check_output_folder(output)
    made = prepare(metric)
    entries = identity(metric, made)["tasks"]
    with atomic_directory(output) as new:
        shutil.copytree(made, new, dirs_exist_ok=True)
    items = {name: entry.get("items") for name, entry in entries.items()}
    said = (f"{name}: {'on the hub' if count is None else f'{count} items'}" for name, count in items.items())
    return CommandResult(
        {"tasks": {metric.suite: {name: {"items": count} for name, count in items.items()}}}, tuple(said)
    )
