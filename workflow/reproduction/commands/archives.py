"""`rotquant runs archive`, `export` and `import`: results as files, between machines that share no file system."""

from pathlib import Path
from typing import Annotated

import typer

from reproduction.commands.runs import Configs, Jobs, PlanFile, open_plan
from reproduction.run import archives, execution
from reproduction.run.workers import usual_workers
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.outputs import FILE, Writes
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import OutputKind, check_output_file

ARCHIVE = OutputKind("an archive of runs", archives.is_archive)


def archive(
    output: Annotated[
        Path,
        typer.Argument(help="The archive, below whatever folder: weights/0123456789abcdef-01234567.tar."),
        Writes(ARCHIVE),
    ],
    needed: Annotated[
        list[Path] | None, typer.Option("--needs", help="An archive that it needs. Repeatable."), FILE
    ] = None,
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


@answers({"output": "the file", "tables": "", "runs": "how many", "of": "how many the tables have", "bytes": ""})
def export(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write, e.g. quarot.tar.xz."), Writes(ARCHIVE)
    ],
    tables: Annotated[
        list[str] | None, typer.Argument(help="Tables or papers. Default: all that are computed.")
    ] = None,
    config: Configs = None,
    plan: PlanFile = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave out what is not computed yet; another machine continues.")
    ] = False,
) -> CommandResult:
    """Write all runs of tables to one file: every seed, window and item, without models.

    `rotquant runs import` reads it elsewhere, where pages and verdicts are made from it again without a GPU.
    """
    output = output.absolute()
    chosen = open_plan(config, plan)
    check_output_file(output)
    names = archives.tables_of(chosen, tables or ())
    count, of = archives.export(chosen, names, output, partial)
    size = output.stat().st_size
    data = {"output": str(output), "tables": list(names), "runs": count, "of": of, "bytes": size}
    shown = f"{count} runs" if count == of else f"{count} of {of} runs"
    return CommandResult(data, (f"{output.name}: {shown}, {size / 1e6:.1f} MB",))


@answers(
    {"runs": "keys of those that are here", "others": "keys of those left out", "whole": "parts that are complete"}
)
def import_(
    archived: Annotated[
        list[Path] | None, typer.Argument(help="Files of `runs export` or `runs archive`."), FILE
    ] = None,
    config: Configs = None,
    plan: PlanFile = None,
) -> CommandResult:
    """Take runs out of files, but for those that are here and current, and record the parts of tables.

    Pages are rendered from them as if they had been computed here. Runs of other settings or code stay out. What two
    files hold is taken out of the first.
    """
    paths = [path.absolute() for path in archived or []]
    chosen = open_plan(config, plan)
    runs = archives.unpack(chosen, paths)
    touched = [part for part, planned in chosen.parts.items() if not runs.keys().isdisjoint(planned.runs)]
    whole = [part for part in touched if archives.record_whole(chosen, part)]
    others = [run for run, planned in runs.items() if not planned]
    if runs and len(others) == len(runs):
        raise ResultError(
            f"none of the {len(runs)} runs is of the settings and the code that this project has: have the commit and "
            "the configuration (--config) that they were computed with."
        )
    said = [f"{len(runs) - len(others)} runs are here" + (f", of {', '.join(whole)} all" if whole else "")]
    said += [f"{len(others)} runs of other settings or code were left out"] if others else []
    data = {"runs": [run for run, planned in runs.items() if planned], "others": others, "whole": whole}
    return CommandResult(data, tuple(said))
