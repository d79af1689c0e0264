"""The way from jobs to the process that logs: lines of JSON on a socket, and the start of that process.

A job waits for no answer; what cannot be said is in its files later.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rotquant.foundation.files import short_hash

#: The environment's variable of the process with which the logging ends, and MLflow's of its store.
OWNER, STORE = "ROTQUANT_LOGS_WITH", "MLFLOW_TRACKING_URI"
LOG = Path("logs/tracking.log")
#: Seconds that a line may take, and that the end of a workflow waits for what is left to log.
PATIENCE, LAST_PATIENCE = 2, 20


def address(owner: int | None = None) -> str:
    """The logging process's address: in Linux's abstract space of names, where a killed process leaves nothing.

    There is one for each owner, project and store.
    """
    ends_with = owner or os.environ.get(OWNER) or os.getpid()
    return f"\0rotquant-{os.getuid()}-{ends_with}-{short_hash(f'{Path.cwd()} {os.environ.get(STORE)}')}"


class LogLine:
    """A connection to the process that logs, which is started unless it has another `owner`; without one, nothing."""

    def __init__(self, owner: int | None = None) -> None:
        self.connection: socket.socket | None = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(PATIENCE)
        try:
            self.connection.connect(address(owner))
        except OSError:
            if owner is None:
                with suppress(OSError):  # another job has just started it
                    _start()
            try:
                self.connection.connect(address(owner))
            except OSError:
                self.close()

    def say(self, **words: Any) -> None:
        """Send a line; after a failure none is sent any more."""
        if self.connection is None:
            return
        try:
            self.connection.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            self.close()

    def ask(self) -> str:
        """Wait until all that was said by anyone is logged, for some seconds; why something is not, or nothing."""
        self.say(settle=True)
        if self.connection is None:
            return ""
        self.connection.settimeout(LAST_PATIENCE)
        try:
            return self.connection.makefile().readline().strip()
        except OSError:
            return f"MLflow has not logged all within {LAST_PATIENCE} s."

    def close(self) -> None:
        """Say no more."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _start() -> None:
    """Start the process, which listens from the first moment on."""
    alone = {OWNER: str(os.getpid()), "OPENBLAS_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address())
        listening.listen(256)
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("a") as log:
            subprocess.Popen(
                [sys.executable, "-m", "reproduction.run.tracking.logger", str(listening.fileno())],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**alone, **os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )


def settled(owner: int) -> str:
    """Wait some seconds until what the jobs of an owner have said is logged; a sentence on what is not, or nothing."""
    line = LogLine(owner)
    said = line.ask()
    line.close()
    return said
