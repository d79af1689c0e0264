"""The tree of `rotquant`'s commands."""

from typing import Annotated

import typer

from rotquant import __version__
from rotquant.commands import (
    archives,
    bench,
    convert,
    data,
    diagnose,
    distil,
    methods,
    models,
    prefix,
    tasks,
    tracking,
    tune,
)
from rotquant.commands.report import report_app
from rotquant.commands.runs import runs_app

cli = typer.Typer(
    name="rotquant",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
cli.command()(models.quantize)
cli.command()(models.evaluate)
cli.command()(models.export)
cli.command()(distil.train_quantized)
cli.command()(convert.convert)
cli.command()(convert.generate)
cli.command()(diagnose.diagnose)
cli.command()(prefix.prefix)
cli.command()(methods.methods)
cli.command()(methods.recipe)
cli.command("tune")(tune.tune_method)
cli.command()(tasks.tasks)
cli.command()(data.corpus)
cli.command()(data.pack)
cli.command()(data.train)
runs_app.command("init-tracking")(tracking.init_tracking)
runs_app.command("sync-tracking")(tracking.sync_tracking)
runs_app.command("ui")(tracking.ui)
runs_app.command()(archives.archive)
runs_app.command()(archives.export)
runs_app.command("import")(archives.import_)
cli.add_typer(bench.bench_app, name="bench")
cli.add_typer(runs_app, name="runs")
cli.add_typer(report_app, name="report")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@cli.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Rotation-based LLM quantization: QuaRot, SpinQuant, RCP and PrefixQuant, reproduced."""


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
