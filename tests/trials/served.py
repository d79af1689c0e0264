"""An `mlflow server` before a database, and waiting for what other processes do."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from tests.trials.faults import soon
from tests.trials.trial import Skip


@contextmanager
def mlflow_server(where: Path, uri: str, workers: int) -> Iterator[str]:
    """An `mlflow server` before a database, on this machine alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        str(workers),
    ]
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    where.mkdir()
    with (where / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=where, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: process.poll() is not None or answers(address))
        if process.poll() is not None:
            raise Skip(f"mlflow server does not start: {(where / 'log').read_text().strip().splitlines()[-1]}")
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    """Whether a server is there."""
    try:
        return requests.get(f"{address}/health", timeout=1).ok
    except requests.RequestException:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until something holds, at most for some minutes."""
    assert soon(condition, seconds), "what was waited for did not come"
