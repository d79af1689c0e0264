"""Launches that overlap: a kernel starts, and reads what nothing before it wrote, while the one before it still runs.

CUDA's programmatic dependent launch, on Hopper and newer, for kernels that wait (griddepcontrol.wait) before they touch
what earlier launches wrote. A product of few rows fetches its weight that way under the end of its predecessor. Never
on by itself: only the caller knows that the launch just before does not write a weight.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np
import torch

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import Kernel
from rotquant.kernels.launch.operators import allow_shared, launch

_overlapping: ContextVar[bool] = ContextVar("rotquant_overlapping_launches", default=False)


@contextlib.contextmanager
def overlapping_launches() -> Iterator[None]:
    """Let kernels that can start before their predecessor ends; capture a CUDA graph inside to keep it so.

    The caller promises that weights and their scales were written, at the latest, by the last launch but one on the
    stream: true of every model whose weights do not change.
    """
    token = _overlapping.set(True)
    try:
        yield
    finally:
        _overlapping.reset(token)


def overlaps(device: torch.device) -> bool:
    """Whether launches made now may overlap: inside `overlapping_launches`, on Hopper or newer."""
    return _overlapping.get() and torch.cuda.get_device_capability(device)[0] >= 9


def launch_structure(
    kernel: Kernel, blocks: int, threads: int, structure: np.void, *, device: torch.device, shared: int = 0
) -> None:
    """Launch a kernel whose one argument is a structure by value, overlapping if `overlaps(device)`.

    Raises:
        KernelError: CUDA refuses the launch.
    """
    if not overlaps(device):
        launch(kernel, (blocks,), (threads,), structure, device=device, shared=shared)
        return
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

    allow_shared(kernel.function, shared)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = [attribute], 1
    (argument,) = map(np.array, kernel.parameters.pack((structure,)))
    arguments = np.array([argument.ctypes.data], np.uint64)  # CUDA copies the structure before it returns
    with torch.cuda.device(device):
        (status,) = driver.cuLaunchKernelEx(config, kernel.function.kernel.ptr, arguments.ctypes.data, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"CUDA refused a launch: {status.name}.")
