"""`rotquant runs archive` and `receive`: results as archives, between machines that share no file system."""

from pathlib import Path
from typing import Annotated

import typer

from rotquant.commands.runs import Configs, Jobs, PlanFile, open_plan
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import check_output_file
from rotquant.study import archives, execution
from rotquant.study.workers import usual_workers


def archive(
    output: Annotated[
        Path, typer.Argument(help="The archive, below whatever folder: weights/0123456789abcdef-01234567.tar.")
    ],
    needed: Annotated[list[Path] | None, typer.Option("--needs", help="An archive that it needs. Repeatable.")] = None,
    jobs: Jobs = None,
    config: Configs = None,
    plan: PlanFile = None,
) -> None:
    """Compute what an archive is named after and write it: learned rotations, stored weights, or the part of a table.

    The jobs of workflow/storage.smk do no other thing. What the archives that it needs hold is taken from them.
    """
    output, needed = output.absolute(), [path.absolute() for path in needed or []]
    chosen = open_plan(config, plan)
    check_output_file(output)
    target = archives.target_of(chosen, output.as_posix())
    archives.unpack(chosen, needed)
    execution.execute(chosen, [target], jobs or usual_workers(chosen.device), typer.echo)
    archives.pack(chosen, output)


def receive(
    archived: Annotated[list[Path] | None, typer.Argument(help="Archives of parts of tables.")] = None,
    config: Configs = None,
    plan: PlanFile = None,
) -> None:
    """Take results out of archives, but for those that are here and current, and record the parts of tables.

    Pages are rendered from them as if they had been computed here.
    """
    paths = [path.absolute() for path in archived or []]
    chosen = open_plan(config, plan)
    parts = [archives.target_of(chosen, path.as_posix()) for path in paths]
    if unknown := [part for part in parts if part not in chosen.parts]:
        raise ResultError(f"{unknown[0]} is no part of a table; name archives below measured/.")
    archives.unpack(chosen, paths)
    for part in parts:
        archives.record_received(chosen, part)
        typer.echo(f"{part}: {len(chosen.part(part).runs)} runs are here")
