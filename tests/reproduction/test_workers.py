"""How many processes compute by default, and which GPUs they may see."""

import os

import pytest

from reproduction.run.workers import usual_workers, visible_gpus


@pytest.mark.parametrize(
    ("visible", "device", "usual"),
    [
        ("0,1", "cuda", 2),
        ("3, MIG-7 ,4", "auto", 3),
        ("0,1", "cuda:1", 1),  # the user has said which
        ("1", "cuda", 1),
        ("", "cuda", 1),  # refused by `check_gpu` where there is none
        ("-1", "cuda", 1),
    ],
)
def test_there_is_a_process_for_each_visible_gpu(
    visible: str, device: str, usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert usual_workers(device) == usual


def test_without_a_gpu_there_is_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    cores = len(os.sched_getaffinity(0))
    assert (usual_workers("cpu"), usual_workers("auto")) == (cores, cores)
    assert all(name.isdigit() for name in visible_gpus())
