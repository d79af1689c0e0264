"""The tree of `rotquant`'s commands: those about models, and those that other installed packages add."""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from rotquant import __version__
from rotquant.commands import (
    compare,
    convert,
    diagnose,
    distil,
    doctor,
    families,
    formats,
    frontier,
    methods,
    models,
    plan,
)
from rotquant.commands.outputs import guard

#: Entry points of this group are functions that take the tree and add their commands to it.
GROUP = "rotquant.commands"

#: The commands of the reproduction, which a library alone does not have.
REPRODUCTION = ("runs", "report", "bench", "tune", "prefix", "corpus", "pack", "train", "tasks", "card")

cli = typer.Typer(
    name="rotquant",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
cli.command()(models.quantize)
cli.command()(plan.plan)
cli.command()(models.evaluate)
cli.command()(compare.compare)
cli.command()(frontier.frontier)
cli.command()(formats.export)
cli.command()(formats.import_gguf)
cli.command()(distil.train_quantized)
cli.command()(convert.convert)
cli.command()(convert.generate)
cli.command()(diagnose.diagnose)
cli.command()(families.families)
cli.command()(methods.methods)
cli.command()(methods.recipe)
cli.command()(doctor.doctor)
for point in sorted(entry_points(group=GROUP)):
    point.load()(cli)
guard(cli)


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
    """Rotation-based LLM quantization: QuaRot, SpinQuant, RCP and PrefixQuant."""


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
