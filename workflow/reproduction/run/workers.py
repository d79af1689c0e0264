"""Processes that compute: how many there are by default, which GPU each may see, and how one ended."""

import os
import shutil
import signal
from pathlib import Path

#: By this variable CUDA knows which GPUs a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, each by what `CUDA_VISIBLE_DEVICES` calls it; found without CUDA."""
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]


def usual_workers(device: str) -> int:
    """Default number of worker processes: one for each GPU that may be used, else one for each core."""
    if device == "cpu" or (device == "auto" and shutil.which("nvidia-smi") is None):
        return len(os.sched_getaffinity(0))
    return 1 if ":" in device else max(1, len(visible_gpus()))


def ending(status: int | None) -> str:
    """Description of how a process ended."""
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        memory = ", which is how a system short of memory ends a process" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{memory}"
    return f"its process ended with status {status}; its last words stand above"
