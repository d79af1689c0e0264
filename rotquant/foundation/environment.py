"""The circumstances of a computation: time, commit, versions of what it runs with, the machine.

They stand in the provenance of every number. Nothing here imports torch.
"""

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: Distributions whose version can change a computed number, or whose version a reader wants to know.
VERSIONS = ("rotquant", "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "lm_eval")


#: Entry points by which other packages register methods (`rotquant.recipes.registry`).
_METHODS = "rotquant.methods"

#: The variable that names a folder of texts that models write, for processes of one machine that work together.
SHARED_TEXTS = "ROTQUANT_TEXTS"

#: This package's code, wherever the working folder is.
CODE = Path(__file__).resolve()


def environment(code: Path = CODE, methods: Collection[str] = ()) -> dict[str, Any]:
    """The circumstances of a computation as plain data: time, commit, versions, machine. Imports nothing heavy.

    The GPU's name is added by the stages that use one.

    Args:
        code: a file of the code that computes, or the folder of its checkout.
        methods: names of the methods that act.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(code),
        "git_dirty": git_dirty(code),
        "versions": versions(methods),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
    }


def largest_memory(allocated: Iterable[int] = ()) -> int:
    """Largest memory of a computation in bytes: what torch had allocated on a GPU, or without one this process's
    resident memory since it began.

    Args:
        allocated: on a GPU, by part; zeros or nothing without one.
    """
    import resource  # which Windows lacks

    unit = 1 if sys.platform == "darwin" else 1024
    return max(allocated, default=0) or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def versions(methods: Collection[str] = ()) -> dict[str, str]:
    """Installed versions of the distributions that matter for a number, and of those that register these methods."""
    points = importlib.metadata.entry_points(group=_METHODS) if methods else ()
    names = (*VERSIONS, *(point.dist.name for point in points if point.name in methods and point.dist))
    return {name: version for name in names if (version := _version(name))}


@functools.cache
def _version(name: str) -> str | None:
    """The installed version of a distribution, which stays what it is while a process runs."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(code: Path = CODE) -> str | None:
    """The commit of the checkout that has the code; without one (a copy of the files) what GIT_COMMIT says, or None."""
    known = _git(code, "rev-parse", "HEAD") if _is_tracked(code) else None
    return known or os.environ.get("GIT_COMMIT")


def git_dirty(code: Path = CODE) -> bool | None:
    """Whether tracked files differ from the commit; None outside of a checkout."""
    status = _git(code, "status", "--porcelain", "--untracked-files=no") if _is_tracked(code) else None
    return None if status is None else bool(status)


def _is_tracked(code: Path) -> bool:
    """Whether git has the code; an installed package may lie in the folder of another project."""
    return code.is_dir() or _git(code, "ls-files", "--error-unmatch", code.name) is not None


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


def _git(code: Path, *arguments: str) -> str | None:
    folder = code if code.is_dir() else code.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
