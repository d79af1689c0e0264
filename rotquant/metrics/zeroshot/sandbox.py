"""Running what a model wrote: in a process that has no network, no other programs, few means and little time.

The process is a fresh interpreter with the standard library alone, in an empty folder that is removed afterwards, with
an environment of its own; `confined` says what it gives up. All that comes back is whether a token did, so output is
lost, and a program that ends before its test has not passed. This guards against what models write by accident. It can
read files that its user can, and a program made to deceive may find the token in its own process: against a determined
attacker take a virtual machine.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_SCRIPT = Path(__file__).with_name("confined.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use. wall_seconds: until it is killed, whatever it waits for."""

    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    wall_seconds: float = 20.0


def passes(program: str, test: str, limits: Limits = Limits()) -> bool:
    """Whether a program and then a test, which sees what it defines, come to their end without an exception.

    Args:
        program, test: Python.
    """
    token = secrets.token_hex(16)
    job = json.dumps({"program": program, "test": test, "token": token, **asdict(limits)}).encode()
    with tempfile.TemporaryDirectory(prefix="rotquant-program-") as folder:
        ours, theirs = os.pipe()
        try:
            _run(job, folder, theirs, limits.wall_seconds)
        finally:
            os.close(theirs)  # so that reading ends
        with os.fdopen(ours, "rb") as answer:
            return answer.read(len(token) + 1) == token.encode()


def _run(job: bytes, folder: str, answer: int, seconds: float) -> None:
    """Start the process, and wait until it has ended or its time has; then nothing of it is left."""
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    try:
        process.communicate(job, timeout=seconds)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
