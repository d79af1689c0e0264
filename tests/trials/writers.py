"""Commands of projects that begin at the same moment, forked from a process that has imported MLflow and the first one.

Each is a process of its own, with its own environment and output, as Snakemake's jobs are; only the seconds of imports
are spent once. Copies of the project have the same code until one is edited, which then imports its own.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.project import Copy

_WAITING = """
import gc, json, os, sys
import alembic.command, jinja2, mlflow, pandas, psycopg2, pydantic, pyarrow.parquet, rich.console, rich.table
import scipy.optimize, scipy.stats, sqlalchemy, typer, yaml
import mlflow.store.tracking.sqlalchemy_store

sys.dont_write_bytecode = True
gc.set_threshold(20_000, 20, 100)


def load(path):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rotquant", "reproduction")]:
        del sys.modules[name]
    sys.path[:1] = path.split(":")
    import rotquant.cli, rotquant.commands.root, reproduction.commands.tracking
    rotquant.cli.tree()
    gc.collect()
    gc.freeze()  # no child looks through what is imported here, nor copies it thereby


for line in sys.stdin:
    if "rotquant" not in sys.modules:
        load(json.loads(line)[0][1]["PYTHONPATH"])
    ready, is_ready = os.pipe()
    wait, go = os.pipe()
    processes = []
    for folder, environment, arguments, output, edited in json.loads(line):
        process = os.fork()
        processes.append(process)
        if process == 0:
            os.close(go)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
                os.dup2(file, stream)
            sys.argv = arguments
            if edited:
                load(environment["PYTHONPATH"])
            os.write(is_ready, b".")
            os.read(wait, 1)
            sys.modules["rotquant.cli"].app()
    for _ in processes:
        os.read(ready, 1)
    print(json.dumps(processes), flush=True)
    for pipe in (ready, is_ready, wait, go):
        os.close(pipe)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in processes]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """What became of a command: its exit status, negative where a signal ended it, and all that it printed."""

    command: str
    status: int
    said: str

    @property
    def sentences(self) -> list[str]:
        """The lines that are no announcement of what was written."""
        return [line for line in self.said.splitlines() if line.startswith(("warning:", "rotquant:"))]


class Writers:
    """The process that forks writers, and those that it has forked last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen([sys.executable, "-c", _WAITING], cwd="/", text=True, **streams)
        self._commands: list[str] = []
        self.processes: list[int] = []

    def start(self, writers: Sequence[tuple[Copy, str]], environment: Mapping[str, str]) -> None:
        """Let commands of projects begin together."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        asked = [
            [
                str(copy.root),
                {**copy.environment(), **environment},
                ["rotquant", *command.split()],
                str(self._log(place)),
                copy.edited,
            ]
            for place, (copy, command) in enumerate(writers)
        ]
        self._commands = [command for _, command in writers]
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        self.processes = json.loads(self._server.stdout.readline())

    def wait(self) -> list[Ended]:
        """What became of them, once all have ended."""
        assert self._server.stdout is not None
        statuses = json.loads(self._server.stdout.readline())
        self.processes = []
        logs = [self._log(place).read_text(encoding="utf-8") for place in range(len(statuses))]
        return [Ended(*one) for one in zip(self._commands, statuses, logs, strict=True)]

    def run(self, writers: Sequence[tuple[Copy, str]], environment: Mapping[str, str]) -> list[Ended]:
        """Let commands begin together, and wait for them."""
        self.start(writers, environment)
        return self.wait()

    def kill(self, place: int = 0) -> None:
        """Kill one that was started, where it has not ended yet."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[place], signal.SIGKILL)

    def close(self) -> None:
        """End it, and what it has started."""
        for process in range(len(self.processes)):
            self.kill(process)
        self._server.kill()
        self._server.wait()

    def _log(self, place: int) -> Path:
        return self._folder / f"writer-{place}.log"
