"""The circumstances of a computation: time, commit, versions of what it runs with, the machine.

They stand in the provenance of every number. Nothing here imports torch.
"""

import functools
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: Distributions whose version can change a computed number, or whose version a reader wants to know.
VERSIONS = ("rotquant", "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "lm_eval")


def environment(root: Path = Path()) -> dict[str, Any]:
    """The circumstances of a computation as plain data: time, commit, versions, machine. Imports nothing heavy.

    The GPU's name is added by the stages that use one.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(root),
        "git_dirty": git_dirty(root),
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
    }


def versions() -> dict[str, str]:
    """Installed versions of the distributions that matter for a number."""
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def git_commit(root: Path = Path()) -> str | None:
    """The commit of the checkout; outside of one (a copy of the files) what GIT_COMMIT says, or None."""
    return _git(root, "rev-parse", "HEAD") or os.environ.get("GIT_COMMIT")


def git_dirty(root: Path = Path()) -> bool | None:
    """Whether tracked files differ from the commit; None outside of a checkout."""
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


@functools.cache
def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
