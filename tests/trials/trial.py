"""What all trials share: checks that are counted, a record of their figures, and how a skipped one ends."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rotquant.foundation.environment import environment
from rotquant.foundation.files import write_json

REPOSITORY = Path(__file__).parents[2]
RECORDS = REPOSITORY / "results/reliability"


class Skip(Exception):  # noqa: N818 - no error of the project
    """The machine lacks what a trial needs; the message is a sentence that says what."""


class Trial:
    """One trial under way.

    checks: how often each thing was tried and how often it held. figures: numbers that describe the load or the
    amount of work. versions: of programs and packages beyond those that `environment` names. note: what else the
    machine did, in a sentence.
    """

    def __init__(self, name: str, quick: bool, seed: int, note: str = "") -> None:
        self.name, self.quick, self.seed, self.note = name, quick, seed, note
        self.checks: dict[str, dict[str, int]] = {}
        self.figures: dict[str, float | str] = {}
        self.versions: dict[str, str] = {}
        self._started = time.monotonic()

    def check(self, what: str, held: bool, why: str = "") -> bool:
        """Count a check and print it; `why` is what was found where it does not hold."""
        counted = self.checks.setdefault(what, {"tried": 0, "held": 0})
        counted["tried"] += 1
        counted["held"] += bool(held)
        mark = "ok" if held else "FAILED"
        print(f"{self.name}: {mark}: {what}{'' if held or not why else f': {why}'}", flush=True)
        return held

    def figure(self, what: str, value: float | str) -> None:
        """Keep and print a figure."""
        self.figures[what] = value
        print(f"{self.name}: {what}: {value}", flush=True)

    def say(self, line: str) -> None:
        """Print a line of progress."""
        print(f"{self.name}: {line}", flush=True)

    @property
    def held(self) -> bool:
        """Whether something was checked, and all of it held."""
        return bool(self.checks) and all(one["held"] == one["tried"] for one in self.checks.values())

    def record(self) -> Mapping[str, Any]:
        """The trial as data."""
        circumstances = environment(REPOSITORY)
        versions = {**circumstances.pop("versions"), **self.versions}
        return {
            "trial": self.name,
            "quick": self.quick,
            "seed": self.seed,
            "seconds": round(time.monotonic() - self._started, 1),
            "checks": self.checks,
            "figures": self.figures,
            "note": self.note,
            **circumstances,
            "versions": versions,
        }


def run(
    name: str,
    summary: str,
    body: Callable[[Trial], None],
    arguments: Sequence[str] | None = None,
    records: Path = RECORDS,
) -> None:
    """Run a trial as a program: parse its options, try, write the record where asked, and exit.

    The status is 0 where all held or the machine lacks what it needs, 1 otherwise.

    Args:
        arguments: of the program; by default those of this process.
        records: the folder of records.
    """
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="the part that CI runs")
    parser.add_argument("--record", action="store_true", help=f"write the figures below {RECORDS.name}/")
    parser.add_argument("--note", default="", help="a sentence for the record: what else the machine did")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: moments, inputs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers and mounts are ended on the way
    trial = Trial(name, options.quick, options.seed, options.note)
    try:
        body(trial)
    except Skip as reason:
        print(f"{name}: skipped: {reason}", flush=True)
        sys.exit(0)
    print(f"{name}: {'all held' if trial.held else 'FAILED'} in {trial.record()['seconds']} s", flush=True)
    if options.record and trial.held:
        write_json(records / f"{name}.json", trial.record())
    sys.exit(0 if trial.held else 1)
