"""Worker processes that stay alive between jobs, so that slow imports are loaded once for all of them.

Workers are forked from a server that has loaded the imports and computed nothing. If a worker is killed, only its job
is lost. All workers end with the process that started them, however that ends. Each has one GPU of several.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from rotquant.foundation.errors import RotquantError

_LOADED = "reproduction.run.stages.loaded"
_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: By this variable CUDA knows which GPUs a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


@dataclass
class _Worker(Generic[Job]):
    """A process, its pipe, the one GPU that it sees (None: all) and its current job."""

    process: BaseProcess
    pipe: Any
    gpu: str | None
    job: Job | None = None


class Workers(Generic[Job, Outcome]):
    """Processes that perform one job at a time each; a context manager that kills them at its end.

    count: number of processes. perform: the function of a job; it, jobs and its results can be pickled.
    gpus: of `visible_gpus`; processes are spread over them, and each sees one. Without, each sees all there are.
    """

    def __init__(self, count: int, perform: Callable[[Job], Outcome], gpus: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_LOADED])
        self.count, self._perform, self._gpus = count, perform, gpus
        self._workers: list[_Worker[Job]] = []

    def __enter__(self) -> "Workers[Job, Outcome]":
        # Snakemake sets the libraries' threads to those of the job; here each worker would use as many.
        threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.update(dict.fromkeys(_THREADS, threads))
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()

    @property
    def free(self) -> int:
        """The number of jobs that can be given now."""
        return self.count - len(self.jobs)

    @property
    def jobs(self) -> list[Job]:
        """The running jobs."""
        return [worker.job for worker in self._workers if worker.job is not None]

    def give(self, job: Job) -> None:
        """Give a job to a free worker; start a worker if none waits."""
        worker = next((worker for worker in self._workers if worker.job is None), None) or self._start()
        worker.job = job
        with suppress(OSError):  # the process is gone, which `outcomes` reports
            worker.pipe.send(job)

    def outcomes(self, seconds: float) -> Iterator[tuple[Job, Outcome | str]]:
        """Ended jobs with their results, or how their process ended; waits up to `seconds` for one."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        for pipe in wait([*busy], timeout=seconds):
            worker = busy[pipe]
            job, worker.job = cast(Job, worker.job), None
            try:
                yield job, worker.pipe.recv()
            except (EOFError, OSError):
                self._workers.remove(worker)
                worker.process.join()
                yield job, ending(worker.process.exitcode)

    def _start(self) -> _Worker[Job]:
        pipe, theirs = self._context.Pipe()
        used = Counter(worker.gpu for worker in self._workers)
        gpu = min(self._gpus, key=lambda one: used[one], default=None)
        process = self._forked(theirs, gpu) or self._forked(theirs, gpu)
        theirs.close()  # so that its end is detected here
        if process is None:
            raise RotquantError("The server that workers are forked from was ended twice; start again.")
        self._workers.append(_Worker(process, pipe, gpu))
        return self._workers[-1]

    def _forked(self, pipe: Any, gpu: str | None) -> BaseProcess | None:
        """Start a worker process; None if the server was ended meanwhile: the next call starts another."""
        process = self._context.Process(target=_serve, args=(pipe, self._perform, gpu), daemon=True)
        with suppress(EOFError, OSError):
            process.start()
            return process
        return None


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, each by what `CUDA_VISIBLE_DEVICES` calls it; found without CUDA."""
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]


def shared_gpus(device: str, count: int) -> list[str]:
    """The GPUs that so many processes share, one each: none where there is one GPU or one process, or `device` says
    which it is."""
    gpus = visible_gpus() if device in ("cuda", "auto") and count > 1 else []
    return gpus if len(gpus) > 1 else []


def usual_workers(device: str) -> int:
    """Default number of worker processes: one for each GPU that may be used, else one for each core."""
    if device == "cpu" or (device == "auto" and shutil.which("nvidia-smi") is None):
        return len(os.sched_getaffinity(0))
    return 1 if ":" in device else max(1, len(visible_gpus()))


def _serve(pipe: Any, perform: Callable[[Job], Outcome], gpu: str | None) -> None:
    """Main loop of a worker. It ignores Ctrl-C, which a terminal sends to all processes; its parent handles it."""
    if gpu is not None:
        os.environ[VISIBLE] = gpu  # before CUDA is first used
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            pipe.send(perform(pipe.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def ending(status: int | None) -> str:
    """Description of how a process ended."""
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        memory = ", which is how a system short of memory ends a process" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{memory}"
    return f"its process ended with status {status}; its last words stand above"
