"""Running what a model wrote: in a process that can compute and answer, and do nothing else to the machine.

The process is a fresh interpreter with modules of the standard library alone and an environment of its own; `confined`
says what it gives up. All that comes back is whether a token did, so output is lost, and a program that ends before its
test has not passed. A program made to deceive may find the token in its own process and pass, as it may change what its
test calls; what it says of itself is all that it can falsify.
"""

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rotquant.foundation.errors import TaskError

_SCRIPT = Path(__file__).with_name("confined.py")
#: Comes to its end where a file that everybody may read is refused.
_PROBE = "try:\n    open('/dev/null')\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError\n"


@dataclass(frozen=True)
class Limits:
    """What a program may use. wall_seconds: until it is killed, whatever it waits for."""

    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 24
    wall_seconds: float = 20.0


@functools.cache
def check() -> None:
    """Raise `TaskError` where programs cannot be confined, which are never run then."""
    if not _comes_to_its_end(_PROBE, "", Limits()):
        raise TaskError(
            "programs that a model writes are run only where the kernel can confine them, which this machine's cannot: "
            "that takes Linux with seccomp on x86-64 or aarch64; leave their task out."
        )


def passes(program: str, test: str, limits: Limits = Limits()) -> bool:
    """Whether a program and then a test, which sees what it defines, come to their end without an exception.

    Args:
        program, test: Python.

    Raises:
        TaskError: this machine cannot confine programs.
    """
    check()
    return _comes_to_its_end(program, test, limits)


def _comes_to_its_end(program: str, test: str, limits: Limits) -> bool:
    token = secrets.token_hex(16)
    job = json.dumps({"program": program, "test": test, "token": token, **asdict(limits)}).encode()
    ours, theirs = os.pipe()
    try:
        _run(job, theirs, limits.wall_seconds)
    finally:
        os.close(theirs)  # so that reading ends
        with os.fdopen(ours, "rb") as answer:
            found = answer.read(len(token) + 1)
    return found == token.encode()


def _run(job: bytes, answer: int, seconds: float) -> None:
    """Start the process, and wait until it has ended or its time has; then nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-B", "-W", "ignore", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"LANG": "C.UTF-8", "TZ": "UTC0", "PYTHONHASHSEED": "0"},
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
