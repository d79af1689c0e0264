"""Row kernels on a CPU: the CUDA source through a C++ compiler, a warp's lanes as coroutines that meet at shuffles.

What `emulation/` has in place of CUDA's headers is enough for kernels that use registers, shuffles, barriers and static
shared memory alone. Launches go through the same Python, so grids, packed arguments and the layout of lanes are tested
without a GPU; times are not.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rotquant.kernels.launch.loading import SOURCES, Kernel, TranslationUnit

SHIMS = Path(__file__).parent / "emulation"
_COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
#: Every operation rounds once, as the sources ask for on a GPU.
_FLAGS = ("-x", "c++", "-std=c++17", "-O0", "-ffp-contract=off", "-w", "-shared", "-fPIC")

needs_compiler = pytest.mark.skipif(_COMPILER is None, reason="needs a C++ compiler, and this machine has none")


@functools.cache
def _library(source: TranslationUnit) -> ctypes.CDLL:
    """The kernels of a source as functions kernel_0, kernel_1, ... of packed arguments, blocks and threads."""
    functions = "\n".join(
        f'extern "C" void kernel_{i}(void** arguments, unsigned blocks, unsigned threads) '
        f"{{ warp::launch({name}, arguments, blocks, threads); }}"
        for i, name in enumerate(source.instances)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for headers in (SOURCES / "include", SHIMS):  # an emulated one takes the other's place
            shutil.copytree(headers, folder, dirs_exist_ok=True)
        file, library = folder / "all.cpp", folder / "all.so"
        file.write_text(f'#include "warp.h"\n#include "{SOURCES / source.file.name}"\n{functions}')
        command = (str(_COMPILER), *_FLAGS, f"-I{folder}", str(file), "-o", str(library))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))  # stays loaded without its file


def _kernel(source: TranslationUnit, name: str, device: torch.device) -> Kernel:
    return Kernel(getattr(_library(source), f"kernel_{source.instances.index(name)}"), source.file.parameters(name))


def _launch(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any, **_: Any) -> None:
    packed = [bytearray(value.tobytes()) for value in kernel.parameters.pack(arguments)]
    buffers = [(ctypes.c_char * len(value)).from_buffer(value) for value in packed]
    pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    (blocks,), (threads,) = grid, block
    kernel.function(pointers, blocks, threads)


def emulate(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module of `rotquant.kernels` launch on tensors of the CPU; on those of a GPU it does as always."""
    check, load, start = module.check_tensor, module.kernel, module.launch

    def check_tensor(tensor: torch.Tensor, name: str, **wanted: Any) -> None:
        if tensor.device.type == "cuda":
            check(tensor, name, **wanted)

    def kernel(source: TranslationUnit, name: str, device: torch.device) -> Kernel:
        return (load if device.type == "cuda" else _kernel)(source, name, device)

    def launch(*arguments: Any, device: torch.device, **options: Any) -> None:
        (start if device.type == "cuda" else _launch)(*arguments, device=device, **options)

    for name, stand_in in (("check_tensor", check_tensor), ("kernel", kernel), ("launch", launch)):
        monkeypatch.setattr(module, name, stand_in)
