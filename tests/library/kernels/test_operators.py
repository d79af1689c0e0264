"""What all operators share: references on the CPU, refusals of one sentence, missing compilers."""

import os
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import CudaFile
from rotquant.kernels.launch import loading, operators
from rotquant.kernels.launch.loading import TranslationUnit, architecture_of_device, compile_source
from rotquant.kernels.launch.operators import SlowKernelWarning, Written, references
from rotquant.kernels.products.linear import PackedWeight, quantized_linear


def linear_arguments(device: str = "cpu") -> dict[str, Tensor | PackedWeight]:
    weight = PackedWeight.pack(
        torch.randint(-8, 8, (48, 128), dtype=torch.int8, device=device), torch.rand(48, device=device) + 0.1
    )
    codes = torch.randint(-8, 8, (100, 128), dtype=torch.int8, device=device)
    return {"codes": codes, "row_scale": torch.rand(100, device=device) + 0.1, "weight": weight}


class Several(NamedTuple):
    x: Tensor
    total: Written
    mode: Literal["first", "second"]


def test_an_operator_takes_what_its_reference_takes_and_of_a_tuple_the_fields() -> None:
    def reference(gradient: Tensor | None, several: Several) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def alone(several: Several) -> None:
        raise NotImplementedError

    schema, takes = operators._signature(reference)
    assert schema == "(Tensor? gradient, Tensor x, Tensor(a2!) total, str mode) -> (Tensor, Tensor)"
    assert takes(lambda *given: given)(0, 1, 2, "first") == (0, Several(1, 2, "first"))
    schema, takes = operators._signature(alone)
    assert schema == "(Tensor x, Tensor(a1!) total, str mode) -> ()"
    assert takes(lambda several: several.mode)(1, 2, "second") == "second"


def test_the_cpu_says_once_that_it_is_slow() -> None:
    operators._say_slow.cache_clear()
    with pytest.warns(SlowKernelWarning, match="plain torch"):
        quantized_linear(**linear_arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized_linear(**linear_arguments())


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(KernelError, match="need CuPy and NVRTC"):
        compile_source(TranslationUnit(CudaFile("any.cu")), "sm_80")


def test_a_missing_source_is_one_sentence() -> None:
    with pytest.raises(KernelError, match="compiled from a checkout"):
        compile_source(TranslationUnit(CudaFile("no_such_kernel.cu")), "sm_80")


@pytest.mark.parametrize(("capability", "architecture"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a")])
def test_a_gpu_is_compiled_for_by_its_capability(
    capability: tuple[int, int], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert architecture_of_device(torch.device("cuda", 0)) == architecture


def test_a_gpu_older_than_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(KernelError, match=r"8\.0 or newer, and Tesla T4 has 7\.5"):
        architecture_of_device(torch.device("cuda", 0))


def test_compiled_kernels_lie_in_the_cache_and_a_home_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "_nvrtc", lambda: types.SimpleNamespace(getVersion=lambda: (13, 0)))
    monkeypatch.setattr(loading, "_compile", lambda *_: (b"code", {}))
    monkeypatch.setattr(loading, "_include_options", tuple)
    source = TranslationUnit(CudaFile(next(loading.SOURCES.glob("*.cu")).name))
    (tmp_path / "file").touch()
    for cache, place in ((tmp_path / "mine", tmp_path / "mine"), (tmp_path / "file", Path(tempfile.gettempdir()))):
        monkeypatch.setenv("ROTQUANT_CACHE", str(cache))
        cubin = loading.compile_source(source, "sm_90a").cubin
        assert cubin.read_bytes() == b"code"
        assert cubin.is_relative_to(place)
        assert cubin.parent.name == "kernels"


def test_cupy_keeps_its_code_in_our_cache_unless_the_user_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())
    monkeypatch.setenv("ROTQUANT_CACHE", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_DIR", "mine")
    loading._cupy()
    assert os.environ["CUPY_CACHE_DIR"] == "mine"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    loading._cupy()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "cupy")


def test_a_module_is_never_destroyed() -> None:
    program = """
from rotquant.kernels.launch.loading import _keep
class Module:
    def __del__(self):
        print("destroyed")
_keep(Module())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not ended.stdout


def test_more_than_48_kib_of_shared_memory_are_asked_for() -> None:
    function = types.SimpleNamespace(max_dynamic_shared_size_bytes=0)
    operators.allow_shared(function, 48 << 10)
    assert function.max_dynamic_shared_size_bytes == 0
    for shared in (64 << 10, 32 << 10):
        operators.allow_shared(function, shared)
        assert function.max_dynamic_shared_size_bytes == 64 << 10


BAD_TENSORS = {
    "not contiguous": lambda a: a | {"codes": a["codes"].T.contiguous().T},
    "float16, and the kernel takes int8 or uint8": lambda a: a | {"codes": a["codes"].half()},
    "pad them with zeros": lambda a: a | {"codes": a["codes"][:, :100].contiguous()},
    "row scale has 7 elements": lambda a: a | {"row_scale": a["row_scale"][:7].contiguous()},
    "row scale is on cpu": lambda a: a | {"row_scale": a["row_scale"].cpu()},
    "float64": lambda a: a | {"dtype": torch.float64},
    "multiple of 16 bytes": lambda a: a | {"codes": a["codes"].view(-1)[1 : 1 + 99 * 128].view(99, 128)},
    r"bias has shape \(7,\)": lambda a: a | {"bias": torch.zeros(7, dtype=torch.float16, device="cuda")},
}


@pytest.mark.gpu
@pytest.mark.parametrize("message", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(KernelError, match=message):
        quantized_linear(**BAD_TENSORS[message](linear_arguments("cuda")))


@pytest.mark.gpu
def test_launches_follow_the_current_stream() -> None:
    arguments = linear_arguments("cuda")
    expected = quantized_linear(**arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments["codes"].record_stream(stream)
        found = quantized_linear(**arguments)
    stream.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_references_run_on_the_gpu_when_asked() -> None:
    arguments = linear_arguments("cuda")
    with references():
        slow = quantized_linear(**arguments)
    # Integer sums are exact and both scale in the same order, so nothing may differ.
    assert torch.equal(slow, quantized_linear(**arguments))
