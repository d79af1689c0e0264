"""The commands that the reproduction adds to `rotquant`: tables, runs, reports, benchmarks, texts."""

import typer

from reproduction.commands import archives, bench, data, tasks, tracking
from reproduction.commands.report import report_app
from reproduction.commands.runs import runs_app


def add_to(cli: typer.Typer) -> None:
    """Add all of them to the tree of commands (entry point `rotquant.commands`)."""
    cli.command()(tasks.tasks)
    cli.command()(data.corpus)
    cli.command()(data.pack)
    runs_app.command("sync-tracking")(tracking.sync_tracking)
    runs_app.command("ui")(tracking.ui)
    runs_app.command()(archives.export)
    runs_app.command("import")(archives.import_)
    cli.add_typer(bench.bench_app, name="bench")
    cli.add_typer(runs_app, name="runs")
    cli.add_typer(report_app, name="report")
