"""The `rotquant` command: quantize and evaluate a model, train the shipped ones, and serve the workflow's stages.

Every command of the Snakemake workflow is one of these, so a failed job can be repeated by hand.
"""

import sys
from typing import NoReturn

import typer
from rich.console import Console

from rotquant import __version__
from rotquant.commands import bench, convert, data, models, tasks
from rotquant.commands.report import report_app
from rotquant.commands.runs import runs_app
from rotquant.errors import RotquantError

cli = typer.Typer(
    name="rotquant",
    help="Rotation-based LLM quantization: QuaRot, SpinQuant, RCP and PrefixQuant, reproduced.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
cli.command()(models.quantize)
cli.command()(models.evaluate)
cli.command()(models.export)
cli.command()(convert.convert)
cli.command()(convert.generate)
cli.command()(models.diagnose)
cli.command()(tasks.tasks)
cli.command()(data.corpus)
cli.command()(data.train)
cli.add_typer(bench.bench_app, name="bench")
cli.add_typer(runs_app, name="runs")
cli.add_typer(report_app, name="report")


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def app() -> None:
    """Run the command line; an expected error is one sentence on standard error and exit status 2."""
    try:
        cli()
    except RotquantError as error:
        _stop(error)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        _stop(error)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for its name
            raise
        _stop("the GPU's memory does not suffice: use a smaller batch, shorter texts, another device or another GPU.")


def _stop(sentence: Exception | str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"[red]rotquant:[/red] {sentence}", highlight=False)
    sys.exit(2)


if __name__ == "__main__":
    app()
