"""`rotquant runs export` and `import`: results as Parquet files, between machines that share no file system."""

from pathlib import Path
from typing import Annotated

import typer

from reproduction.commands.runs import Configs, PlanFile, open_plan
from reproduction.run import archives
from reproduction.run.plan import Plan
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.outputs import FILE, Writes
from rotquant.foundation.errors import ConfigError, ResultError, nearest
from rotquant.foundation.files import OutputKind

ARCHIVE = OutputKind("a Parquet file of runs", archives.is_archive)


def _files(output: Path, _: object) -> list[Path]:
    """The files of these names that are there: `export` replaces them."""
    return [path for kind in archives.KINDS for path in sorted(output.glob(f"*-{kind}.parquet"))]


@answers({"files": "", "tables": "", "runs": "how many", "of": "how many the tables have", "bytes": ""})
def export(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The folder of the files, PAPER-runs.parquet and others."),
        Writes(ARCHIVE, files=_files),
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
    """Write all runs of tables to Parquet files: every seed, window and item, without models.

    `rotquant runs import` reads them elsewhere, where pages and verdicts are made from them again without a GPU.
    """
    output = output.absolute()
    chosen = open_plan(config, plan)
    names = tables_of(chosen, tables or ())
    files, count, of = archives.export(chosen, names, output, partial)
    size = sum(file.stat().st_size for file in files)
    data = {"files": [*map(str, files)], "tables": names, "runs": count, "of": of, "bytes": size}
    shown = f"{count} runs" if count == of else f"{count} of {of} runs"
    return CommandResult(data, (f"{', '.join(file.name for file in files)}: {shown}, {size / 1e6:.1f} MB",))


@answers({"runs": "keys of those that are here", "others": "names of those left out"})
def import_(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of `runs export`, or folders of them."), FILE
    ] = None,
    config: Configs = None,
    plan: PlanFile = None,
    any_code: Annotated[
        bool,
        typer.Option("--any-code", help="Take what other commits computed, too. Pages say which commit computed what."),
    ] = False,
) -> CommandResult:
    """Take results out of files, but for those that are here.

    Pages are rendered from them as if they had been computed here. Runs of other settings or code stay out.
    """
    paths = [path.absolute() for path in files or []]
    runs, others = archives.import_(open_plan(config, plan), paths, any_code)
    if others and not runs:
        raise ResultError(
            f"none of the {len(others)} runs is of the settings and the code that this project has: have the "
            "configuration (--config) that they were computed with, and its commit or --any-code."
        )
    said = [f"{len(runs)} runs are here"]
    said += [f"{len(others)} runs of other settings or code were left out"] if others else []
    return CommandResult({"runs": runs, "others": others}, tuple(said))


def tables_of(plan: Plan, asked: tuple[str, ...] | list[str]) -> list[str]:
    """The tables that names of tables and papers mean; without names those with a run that is there.

    Raises:
        ConfigError: a name is neither.
    """
    results = plan.results()
    if not asked:
        return [name for name, one in plan.of_runs.items() if any(results.run(run).exists() for run in one.runs)]
    papers = dict.fromkeys(table.paper for table in plan.of_runs.values())
    for name in asked:
        if name not in plan.of_runs and name not in papers:
            raise ConfigError(
                f"no table or paper with runs is called {name!r}{nearest(name, [*plan.of_runs, *papers])}."
            )
    return [name for name, table in plan.of_runs.items() if name in asked or table.paper in asked]
