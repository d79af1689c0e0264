"""The command `rotquant`, run in this process."""

import re

import pytest

from rotquant.cli import app
from rotquant.foundation import progress

SMALL = ["--samples", "4", "--sequence-length", "32", "--device", "cpu"]


def rotquant(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setenv("COLUMNS", "300")  # so that no sentence is wrapped
    # A command begins its own intervals: work that follows other work at once shows its progress with that.
    with progress.shown_on(), pytest.raises(SystemExit) as stop:
        app(arguments)
    return int(stop.value.code or 0)


def printed_perplexity(output: str) -> str:
    return re.search(r"perplexity ([\d.]+)", output).group(1)
