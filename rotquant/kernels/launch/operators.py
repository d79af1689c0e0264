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
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import Kernel

Written = Annotated[Tensor, "written"]
"""A tensor that an operator writes in place."""

_LIBRARY = torch.library.Library("rotquant", "DEF")
#: What torch's schemas call the types of arguments; {} is the argument's place.
_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Written: "Tensor(a{}!)",
    torch.dtype: "ScalarType",
    **{kind: kind.__name__ for kind in (int, float, bool, str)},
}
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


def operator(
    name: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
) -> Any:
    """Register one operator; returns `torch.ops.rotquant.<name>`.

    Args:
        reference: plain torch on any device, slow and obvious; defines what the kernel computes. Its annotations are
            the operator's signature. Many arguments are stated as the fields of a `NamedTuple`: it may be the last
            parameter, here and in the other functions, and who calls the operator gives the fields one by one.
        fake: shapes and dtypes of the results, for meta tensors and torch.compile.
        cuda: launches the kernel; checks its tensors and raises `KernelError`.
        cpu: the same on a CPU, for the few operators that have a kernel there.
        gradient: of an operator that can be differentiated: (ctx, inputs, output) keeps what the derivative needs, and
            (ctx, gradient of the output) gives a gradient, or None, for every argument.
    """
    schema, takes = _signature(reference)
    plain = takes(reference)

    def slow(*arguments: Any) -> Any:
        _say_slow()
        return plain(*arguments)

    def unless_asked(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (plain if _references.get() else kernel)(*arguments)

    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, slow if cpu is None else unless_asked(takes(cpu)), "CPU")
    if cuda is not None:
        _LIBRARY.impl(name, unless_asked(takes(cuda)), "CUDA")
    torch.library.register_fake(f"rotquant::{name}", takes(fake), lib=_LIBRARY)
    if gradient is not None:
        setup_context, backward = gradient
        torch.library.register_autograd(f"rotquant::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.rotquant, name)


def _signature(reference: Callable[..., Any]) -> tuple[str, Callable[..., Callable[..., Any]]]:
    """A reference's schema, and what makes a function of the same parameters one of the operator's arguments."""
    hints = get_type_hints(reference, include_extras=True)
    result = hints.pop("return")
    name, last = hints.popitem()
    before = len(hints)
    if isinstance(last, type) and issubclass(last, tuple):
        hints |= get_type_hints(last, include_extras=True)
        if before:
            return _schema(hints, result), lambda f: lambda *given: f(*given[:before], last(*given[before:]))
        return _schema(hints, result), lambda f: lambda *given: f(last(*given))
    return _schema(hints | {name: last}, result), lambda f: f


def _schema(arguments: dict[str, Any], result: Any) -> str:
    """The operator's schema, such as "(Tensor x, bool inverse) -> (Tensor)"."""
    taken = ", ".join(f"{_type(kind).format(place)} {name}" for place, (name, kind) in enumerate(arguments.items()))
    results = () if result is type(None) else get_args(result) or (result,)
    return f"({taken}) -> ({', '.join(map(_type, results))})"


def _type(kind: Any) -> str:
    return "str" if get_origin(kind) is Literal else _TYPES[kind]


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
    """Wrap torch's stream for CuPy, whose older releases take its handle."""
    from cupy.cuda import ExternalStream, Stream

    if hasattr(Stream, "from_external"):
        return Stream.from_external(stream)
    return ExternalStream(stream.cuda_stream, stream.device_index)


def as_rows(view: Tensor) -> Tensor:
    """A view [..., n] as rows [rows, n] that a kernel can read: contiguous, and from a multiple of 16 bytes on."""
    rows = view.reshape(-1, view.shape[-1]).contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows  # a part of a tensor may begin anywhere


def check_tensor(
    tensor: Tensor,
    name: str,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
) -> None:
    """Raise one sentence unless a tensor is what a kernel can read: of a dtype, contiguous, on a GPU 16-byte aligned.

    Args:
        shape: expected sizes, None for any.
        device: where the kernel runs.

    Raises:
        KernelError: naming the tensor, what it is and what it should be.
    """
    if tensor.device.type != device:
        place = "GPU" if device == "cuda" else "CPU"
        raise KernelError(f"{name} is on {tensor.device}, and the kernel needs it on the {place}.")
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
    if device == "cuda" and tensor.data_ptr() % 16:
        raise KernelError(f"{name} does not start at a multiple of 16 bytes: clone it first.")


def check_same_device(first: Tensor, **others: Tensor | None) -> None:
    """Raise one sentence unless all tensors are on the device of the first."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise KernelError(f"{name} is on {tensor.device} and the other tensors on {first.device}.")
