"""The command `rotquant`, run in this process."""

import re
import sys

import pytest

from rotquant.cli import app
from rotquant.foundation import progress

SMALL = ["--samples", "4", "--sequence-length", "32", "--device", "cpu"]


def rotquant(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["rotquant", *arguments])
    monkeypatch.setenv("COLUMNS", "300")  # so that no sentence is wrapped
    display = progress._display
    # A command begins its own intervals: work that follows other work at once shows its progress with that.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_display", progress.Display(display.clock, thread=display._thread))
        with pytest.raises(SystemExit) as stop:
            app()
    return int(stop.value.code or 0)


def printed_perplexity(output: str) -> str:
    return re.search(r"perplexity ([\d.]+)", output).group(1)
