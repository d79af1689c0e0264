"""`rotquant doctor` finds what a machine lacks: each lack is made, and its finding and the exit status looked at."""

import importlib.metadata
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rotquant.commands import doctor
from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch import loading
from rotquant.tensors import devices
from tests.helpers.commands import rotquant


def states(check) -> dict[str, tuple[str, str]]:
    return {found.name: (found.state, found.advice) for found in doctor._guarded(check)}


def test_a_machine_without_a_gpu_is_well_and_told_what_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    assert rotquant(monkeypatch, "doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in found["checks"]}
    assert found["broken"] == 0
    assert by_name["GPU"]["state"] == "absent"
    assert "all commands work on the CPU" in by_name["GPU"]["advice"]
    assert by_name["torch"]["found"] == importlib.metadata.version("torch")
    assert by_name["NVRTC"]["state"] == "ok"
    assert all(check["advice"] for check in found["checks"] if check["state"] != "ok")


def test_what_is_needed_and_broken_gives_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    installed = doctor._version
    versions = {"tokenizers": None, "typer": "0.1"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else installed(name))
    assert rotquant(monkeypatch, "doctor") == 1
    shown = capsys.readouterr().out
    assert "2 broken: see what to do" in shown
    assert states(doctor._packages)["tokenizers"] == ("broken", "pip install 'tokenizers>=0.22'")
    assert states(doctor._packages)["typer"] == ("broken", "pip install 'typer>=0.29'")


@pytest.mark.parametrize(
    ("capability", "state", "advice"), [((9, 0), "ok", ""), ((7, 5), "slow", "need 8.0 (A100, RTX 30) or newer")]
)
def test_a_gpu_is_named_with_memory_and_capability(capability: tuple[int, int], state: str, advice: str) -> None:
    gpu = SimpleNamespace(name="GPU X", total_memory=80 * 2**30, major=capability[0], minor=capability[1])
    found = doctor._of_gpu(gpu, 0)
    assert found.found == "GPU X, 80 GiB, compute capability {}.{}".format(*capability)
    assert found.state == state
    assert advice in found.advice


@pytest.mark.parametrize(
    ("cuda", "advice"), [(None, "install torch's CUDA build"), ("13.0", "torch needs a driver for CUDA 13.0")]
)
def test_a_driver_that_torch_does_not_use_is_slow(
    cuda: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    state, said = states(doctor._gpu)["GPU"]
    assert state == "slow"
    assert advice in said


@pytest.mark.parametrize(("driver", "state"), [((12, 8), "broken"), ((13, 0), "ok"), ((14, 1), "ok")])
def test_the_driver_must_be_of_the_kernels_cuda(driver: tuple[int, int], state: str) -> None:
    assert doctor._driver_check(driver, "CUDA 13.0").state == state


@pytest.mark.parametrize(("gpu", "state"), [(False, "absent"), (True, "broken")])
def test_kernels_that_do_not_compile_matter_where_there_is_a_gpu(
    gpu: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("the CUDA kernels need CuPy and NVRTC.\nA log.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(loading, "architecture_of_device", lambda _: "sm_90a")
    monkeypatch.setattr(loading, "compile_source", refuse)
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    (found,) = (one for one in doctor._kernels() if one.name == "NVRTC")
    assert (found.state, found.found) == (state, "the CUDA kernels need CuPy and NVRTC.")


@pytest.mark.parametrize(("threads", "advice"), [(2, ""), (1, "cores are idle"), (9, "threads wait for each other")])
def test_threads_are_compared_with_cores(threads: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    state, said = states(doctor._cpu)["CPU"]
    assert state == ("slow" if advice else "ok")
    assert advice in said


def test_a_cache_that_is_lost_is_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROTQUANT_CACHE", str(tmp_path / "good"))
    assert states(doctor._caches)["cache of kernels"] == ("ok", "")
    monkeypatch.delenv("ROTQUANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    state, advice = states(doctor._caches)["cache of kernels"]
    assert state == "slow"
    assert "set ROTQUANT_CACHE" in advice


def test_a_check_that_fails_is_a_finding() -> None:
    def _broken():
        yield doctor.CheckResult("first", "ok", "")
        raise OSError("no such disk")

    first, second = doctor._guarded(_broken)
    assert first.state == "ok"
    assert (second.name, second.state, second.found) == ("broken", "broken", "OSError: no such disk")
