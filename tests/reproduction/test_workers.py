"""Worker processes: a server that is ended under them, and the GPUs that they share."""

import multiprocessing.process
import os
import signal

import pytest

from reproduction.run.workers import Workers, shared_gpus, usual_workers, visible_gpus
from rotquant.foundation.errors import RotquantError


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_is_ended_while_it_forks_a_worker_is_started_once_more(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, ended = multiprocessing.process.BaseProcess.start, [EOFError] * times

    def starts(process: multiprocessing.process.BaseProcess) -> None:
        if ended:
            raise ended.pop()
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starts)
    with Workers[int, int](1, abs) as workers:
        if times == 2:
            with pytest.raises(RotquantError, match="was ended twice; start again"):
                workers.give(-2)
            return
        workers.give(-2)
        outcomes = [*workers.outcomes(60)]
    assert outcomes == [(-2, 2)]


def test_each_worker_sees_one_gpu_and_one_that_takes_the_place_of_another_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    with Workers[str, str | None](4, os.getenv, shared_gpus("cuda", 4)) as workers:
        assert _seen(workers, 4) == ["2", "2", "GPU-5", "GPU-5"]
        lost = workers._workers[1]
        assert lost.process.pid is not None
        os.kill(lost.process.pid, signal.SIGKILL)
        lost.process.join()
        assert _seen(workers, 4) == ["2", "2", "GPU-5", f"its process was ended by SIGKILL{_MEMORY}"]
        assert _seen(workers, 4) == ["2", "2", "GPU-5", "GPU-5"]
    with Workers[str, str | None](2, os.getenv) as workers:
        one, other = _seen(workers, 2)
        assert one == other
        assert one not in ("2", "GPU-5")


_MEMORY = ", which is how a system short of memory ends a process"


def _seen(workers: Workers[str, str | None], count: int) -> list[str]:
    """What so many jobs at once are told of the GPUs."""
    for _ in range(count):
        workers.give("CUDA_VISIBLE_DEVICES")
    found: list[str] = []
    while workers.jobs:
        found += [str(outcome) for _, outcome in workers.outcomes(60)]
    return sorted(found)


@pytest.mark.parametrize(
    ("visible", "device", "count", "shared", "usual"),
    [
        ("0,1", "cuda", 6, ["0", "1"], 2),
        ("3, MIG-7 ,4", "auto", 2, ["3", "MIG-7", "4"], 3),
        ("0,1", "cuda", 1, [], 2),  # one process sees both
        ("0,1", "cuda:1", 6, [], 1),  # the user has said which
        ("1", "cuda", 6, [], 1),
        ("", "cuda", 6, [], 1),  # refused by `check_gpu` where there is none
        ("-1", "cuda", 6, [], 1),
    ],
)
def test_processes_are_spread_over_the_visible_gpus(
    visible: str, device: str, count: int, shared: list[str], usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert shared_gpus(device, count) == shared
    assert usual_workers(device) == usual


def test_without_a_gpu_there_is_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    cores = len(os.sched_getaffinity(0))
    assert (usual_workers("cpu"), usual_workers("auto")) == (cores, cores)
    assert all(name.isdigit() for name in visible_gpus())
