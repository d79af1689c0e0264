"""Launches that overlap: a kernel starts, and reads what nothing before it wrote, while the one before it still runs.

CUDA's programmatic dependent launch, on Hopper and newer, for kernels that wait (griddepcontrol.wait) before they touch
what earlier launches wrote: those of a decoded token. A product of few rows fetches its weight under its predecessors;
the others begin with the wait, and save the time of a start. Never on by itself: only the caller knows that no launch
under way writes a weight.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import Kernel
from rotquant.kernels.launch.operators import allow_shared, launch

_overlapping: ContextVar[bool] = ContextVar("rotquant_overlapping_launches", default=False)


@contextlib.contextmanager
def overlapping_launches() -> Iterator[None]:
    """Let kernels that can start before their predecessor ends; capture a CUDA graph inside to keep it so.

    The caller promises that no launch of the stream that may be under way writes weights or their scales: true of every
    model whose weights do not change.
    """
    token = _overlapping.set(True)
    try:
        yield
    finally:
        _overlapping.reset(token)


def overlaps(device: torch.device) -> bool:
    """Whether launches made now may overlap: inside `overlapping_launches`, on Hopper or newer."""
    return _overlapping.get() and torch.cuda.get_device_capability(device)[0] >= 9


def launch_waiting(
    kernel: Kernel,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    *arguments: Any,
    device: torch.device,
    shared: int = 0,
) -> None:
    """Launch, as `launch` does, a kernel that waits for its predecessors; it overlaps them if `overlaps(device)`.

    Raises:
        KernelError: CUDA refuses the launch, or a number is too large for its parameter.
    """
    if not overlaps(device):
        launch(kernel, grid, block, *arguments, device=device, shared=shared)
        return
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

    allow_shared(kernel.function, shared)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, *(1,) * (3 - len(grid))
    config.blockDimX, config.blockDimY, config.blockDimZ = *block, *(1,) * (3 - len(block))
    config.sharedMemBytes, config.hStream = shared, torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = [attribute], 1
    packed = [np.array(one) for one in kernel.parameters.pack(arguments)]
    places = np.array([one.ctypes.data for one in packed], np.uint64)  # CUDA copies what is there before it returns
    with torch.cuda.device(device):
        (status,) = driver.cuLaunchKernelEx(config, kernel.function.kernel.ptr, places.ctypes.data, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"CUDA refused a launch: {status.name}.")
