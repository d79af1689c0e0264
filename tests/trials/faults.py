"""How the faults of `tests.trials.chaos` are made: processes killed, disks that fill up, a clock that is set back.

Mounts are made in the mount namespace of the trial, so nobody else sees them.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import IO, ClassVar

from tests.helpers.project import Copy
from tests.trials.trial import REPOSITORY, Skip

#: Seconds after which a job that has not ended hangs.
PATIENCE = 600
DAY = 86400
#: The module of the warm processes; the variable by which all processes of a job are known, whatever their session.
SERVER, MARK = "reproduction.run.server", "ROTQUANT_TRIAL_JOB"
LOGGER = "reproduction.run.tracking.logger"
#: Bytes of a disk that is filled, and of one write that fills it.
SIZE, SECTOR = 64 * 2**20, 4096


@dataclass(frozen=True)
class Process:
    """A process of a job, as /proc shows it."""

    pid: int
    parent: int
    command: list[str]

    @property
    def serves(self) -> str:
        """The kind of a warm process, or of the children that it has forked; empty of another process."""
        return self.command[self.command.index(SERVER) + 1] if SERVER in self.command else ""


class Job:
    """A command under way in a project, with all processes that it has started: a mark in their environment says so."""

    begun: ClassVar[list["Job"]] = []

    def __init__(self, project: Copy, *command: str) -> None:
        self.root, self.started = project.root, time.monotonic()
        self._said: IO[str] = (project.root / f"said-{time.time_ns()}").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            cwd=project.root,
            env={**project.environment(), MARK: self._said.name},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.begun.append(self)

    @property
    def runs(self) -> bool:
        """Whether the command itself has not ended."""
        return self.process.poll() is None

    @property
    def processes(self) -> list[Process]:
        """All that live."""
        found, mark = [], f"{MARK}={self._said.name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX" and mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().decode().split("\0")
                    found.append(Process(int(folder.name), int(parent), command))
        return found

    def ends(self, patience: float = PATIENCE) -> tuple[int, str]:
        """Wait for the end of the command; its status and what it said, with all that its processes wrote.

        Raises:
            subprocess.TimeoutExpired: it hangs; all is killed then.
        """
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise
        return status, Path(self._said.name).read_text(encoding="utf-8")

    def kill_all(self) -> None:
        """Kill every process of the job at once."""
        while found := self.processes:
            for one in found:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        self.process.wait()

    def is_gone(self, patience: float = 20) -> bool:
        """Whether none of its processes is left, soon."""
        return soon(lambda: not self.processes, patience)


@contextmanager
def ending() -> Iterator[None]:
    """Leave no job behind, however the block ends."""
    try:
        yield
    finally:
        for job in Job.begun:
            if job.runs:
                job.kill_all()


def soon(what: Callable[[], object], patience: float) -> bool:
    """Whether something comes true within so many seconds."""
    deadline = time.monotonic() + patience
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait(job: Job, moment: float) -> None:
    """Wait until so many seconds after the start of a job, or its end."""
    soon(lambda: not job.runs or time.monotonic() - job.started > moment, PATIENCE)


def _warm(found: list[Process]) -> list[Process]:
    servers = {one.pid for one in found if one.serves}
    return [one for one in found if one.serves and one.parent not in servers]


def _children(kind: str, found: list[Process]) -> list[Process]:
    warm = {one.pid for one in _warm(found)}
    return [one for one in found if one.serves == kind and one.parent in warm]


def _clients(found: list[Process]) -> list[Process]:
    return [one for one in found if len(one.command) > 2 and one.command[2].endswith("/run/client.py")]


#: Whom a kill meets; the first two are there from the start to the end.
SNAKEMAKE, ALL = "Snakemake", "all processes"
VICTIMS: dict[str, Callable[[list[Process]], list[Process]]] = {
    SNAKEMAKE: lambda found: found,
    ALL: lambda found: found,
    "a warm process": _warm,
    "a job that computes": partial(_children, "cells"),
    "a job that renders": partial(_children, "pages"),
    "the process that logs to MLflow": lambda found: [one for one in found if LOGGER in one.command],
    "a client of a warm process": _clients,
}


def kill(job: Job, victim: str, moment: float, draws: Random) -> float | None:
    """Kill a victim with -9 so many seconds after the start, or up to a second after it appears later.

    Returns:
        The moment; None where the job ended before.
    """
    choose = VICTIMS[victim]
    wait(job, moment)
    if not choose(job.processes):
        soon(lambda: not job.runs or choose(job.processes), PATIENCE)
        time.sleep(draws.uniform(0, 1))
    targets = choose(job.processes)
    while job.runs and not targets:  # what lives for less than that is met when the next one appears
        targets = choose(job.processes)
    if not job.runs or not targets:
        return None
    at = time.monotonic() - job.started
    if victim == ALL:
        job.kill_all()
    else:
        pid = job.process.pid if victim == SNAKEMAKE else draws.choice(targets).pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


class Disk:
    """A small disk of its own, mounted on a folder with what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / ".filler"

    def fill(self) -> None:
        """Leave no byte of it."""
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(SECTOR))

    def make_room(self) -> None:
        """Remove what fills it."""
        self._filler.unlink()


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Mount a disk on a folder for as long as the block runs; what is on it then stays in the folder."""
    kept = folder.with_name(f"{folder.name}.kept")
    folder.mkdir(exist_ok=True)
    shutil.copytree(folder, kept)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], check=True)
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield Disk(folder)
    finally:
        shutil.rmtree(kept)
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write to a folder, root neither."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class Clock:
    """A clock that shows a day too much to the commands that it is put around, until it is set right.

    The kernel's own clock dates files. So at that moment what was written until then is dated a day later.
    """

    def __init__(self, folder: Path) -> None:
        unpacked = subprocess.run(
            [REPOSITORY / "scripts/debian", folder, "libfaketime"], stderr=subprocess.PIPE, text=True
        )
        if unpacked.returncode == 77:
            raise Skip(unpacked.stderr.strip().removeprefix("skipped: "))
        (self._library,) = folder.glob("usr/lib/*/faketime/libfaketimeMT.so.1")
        self._shown = folder / "shown"
        self._shown.write_text(f"+{DAY}")

    @property
    def around(self) -> list[str]:
        """What is to stand before a command."""
        settings = {
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": self._shown,
            "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
            "NO_FAKE_STAT": 1,
        }
        return ["env", *(f"{name}={value}" for name, value in settings.items())]

    def set_back(self, project: Copy) -> None:
        """Set it right, by a day back."""
        self._shown.write_text("+0")
        date_later(project)


def date_later(project: Copy) -> None:
    """Date all that was computed in a project a day later, as if the clock had been set back since."""
    for path in _made(project):
        with suppress(FileNotFoundError):
            entry = path.stat()
            os.utime(path, (entry.st_atime + DAY, entry.st_mtime + DAY))


def date_now(project: Copy) -> None:
    """Date what is dated in the future now, as a user does: find results reports -newermt now -exec touch {} +."""
    now = time.time()
    for path in _made(project):
        if path.stat().st_mtime > now:
            os.utime(path, (now, now))


def _made(project: Copy) -> list[Path]:
    return [path for name in ("results", "reports", "logs", ".snakemake") for path in (project.root / name).rglob("*")]


def loggers_ended(root: Path) -> None:
    """Wait for the logging process of a project, which may outlive those that it logs for while MLflow cannot write."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(_logs_for(process, root) for process in Path("/proc").glob("[0-9]*")):
        time.sleep(0.1)


def _logs_for(process: Path, root: Path) -> bool:
    with suppress(OSError):
        return LOGGER.encode() in (process / "cmdline").read_bytes() and (process / "cwd").resolve() == root.resolve()
    return False
