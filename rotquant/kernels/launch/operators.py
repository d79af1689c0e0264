"""Torch custom operators in the namespace `rotquant`: a CUDA kernel, a slow torch reference and a shape rule each.

`torch.ops.rotquant.<name>` therefore works under torch.compile and in CUDA graphs. On the CPU an operator runs its
reference, says so once, and gives the same results. On a GPU nothing falls back by itself: what a kernel cannot do is
an error of one sentence, unless the caller asked for the references (`with references():`).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import Kernel

_LIBRARY = torch.library.Library("rotquant", "DEF")
_references: ContextVar[bool] = ContextVar("rotquant_kernel_references", default=False)


class SlowKernelWarning(UserWarning):
    """An operator ran its torch reference because its tensors are not on a GPU."""


@contextlib.contextmanager
def references() -> Iterator[None]:
    """Run every operator's torch reference, also on a GPU: for tests and comparisons."""
    token = _references.set(True)
    try:
        yield
    finally:
        _references.reset(token)


def references_asked() -> bool:
    """Whether the caller stands inside of `references()`."""
    return _references.get()


def operator(schema: str, *, reference: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register one operator; returns `torch.ops.rotquant.<name>`, to be called with the arguments of the schema.

    Args:
        schema: such as "hadamard(Tensor x, bool inverse=False) -> Tensor".
        reference: plain torch on any device, slow and obvious; defines what the kernel computes.
        cuda: launches the kernel; checks its tensors and raises `KernelError`.
        fake: shapes and dtypes of the results, for meta tensors and torch.compile.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)

    @functools.wraps(reference)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        _say_slow()
        return reference(*args, **kwargs)

    @functools.wraps(cuda)
    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        return (reference if _references.get() else cuda)(*args, **kwargs)

    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"rotquant::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.rotquant, name)


def differentiable(name: str, *, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an operator a derivative, which is usually another operator.

    Args:
        name: of the operator, without the namespace.
        setup_context: (ctx, inputs, output) keeps what the derivative needs.
        backward: (ctx, gradient of the output) -> a gradient, or None, for every argument.
    """
    torch.library.register_autograd(f"rotquant::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


@functools.cache
def _say_slow() -> None:
    warnings.warn(
        "no GPU: rotquant's kernels run as plain torch operations, with the same results and slowly.",
        SlowKernelWarning,
        stacklevel=4,
    )


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    *arguments: Any,
    device: torch.device,
    shared: int = 0,
) -> None:
    """Launch a kernel on torch's current stream of `device`.

    Args:
        arguments: what the kernel's parameters are declared to be (`arguments.Parameters`): tensors or None for
            pointers, structures as `Structure.of` makes them.
        shared: dynamic shared memory in bytes.

    Raises:
        KernelError: a number is too large for its parameter.
    """
    import cupy

    packed = kernel.parameters.pack(arguments)
    allow_shared(kernel.function, shared)
    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(stream.device_index), _for_cupy(stream):
        kernel.function(grid, block, packed, shared_mem=shared)


def allow_shared(function: Any, shared: int) -> None:
    """Let a CuPy kernel take so many bytes of dynamic shared memory: more than 48 KiB must be asked for.

    Raises:
        cupy.cuda.driver.CUDADriverError: more than the GPU has.
    """
    if shared > 48 * 1024 and function.max_dynamic_shared_size_bytes < shared:
        function.max_dynamic_shared_size_bytes = shared


def _for_cupy(stream: torch.cuda.Stream) -> Any:
    """The same stream for CuPy, whose older releases take its handle."""
    from cupy.cuda import ExternalStream, Stream

    if hasattr(Stream, "from_external"):
        return Stream.from_external(stream)
    return ExternalStream(stream.cuda_stream, stream.device_index)


def check_tensor(
    tensor: Tensor, name: str, *, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None = None
) -> None:
    """Raise one sentence unless a tensor is what a kernel can read: on a GPU, of a dtype, contiguous, 16-byte aligned.

    Args:
        shape: expected sizes, None for any.

    Raises:
        KernelError: naming the tensor, what it is and what it should be.
    """
    if tensor.device.type != "cuda":
        raise KernelError(f"{name} is on {tensor.device}, and the kernel needs it on the GPU.")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and the kernel takes {wanted}.")
    if shape is not None and (
        tensor.dim() != len(shape)
        or any(want not in (None, size) for size, want in zip(tensor.shape, shape, strict=True))
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(f"{name} has shape {tuple(tensor.shape)}, and the kernel needs ({wanted}).")
    if not tensor.is_contiguous():
        raise KernelError(f"{name} is not contiguous (strides {tensor.stride()}): call .contiguous() first.")
    if tensor.data_ptr() % 16:
        raise KernelError(f"{name} does not start at a multiple of 16 bytes: clone it first.")


def check_same_device(first: Tensor, **others: Tensor | None) -> None:
    """Raise one sentence unless all tensors are on the device of the first."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise KernelError(f"{name} is on {tensor.device} and the other tensors on {first.device}.")
