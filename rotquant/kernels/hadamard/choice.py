"""The Hadamard transform by whoever computes it best: the CUDA kernel, torch, or Dao's fast-hadamard-transform package.

All multiply by the same normalized H; the package only at powers of two, since its matrices of order 12, 20, 28 and 40
are others than this library's. Differentiable: the gradient is the opposite transform.
"""

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.launch import row_problem
from rotquant.kernels.hadamard.operator import hadamard as hadamard_kernel
from rotquant.tensors import hadamard as reference
from rotquant.tensors.hadamard.constructions import decompose
from rotquant.tensors.hadamard.transform import check_transform

#: dtypes the CUDA kernel reads and writes.
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: Who computes a transform; "auto" takes the CUDA kernel for a CUDA tensor where it has one, else torch.
Backend = Literal["auto", "cuda", "torch", "fast-hadamard-transform"]


def hadamard_transform(
    x: Tensor,
    *,
    inverse: bool = False,
    normalize: bool = True,
    compute_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`rotquant.tensors.hadamard.hadamard_transform` by a backend.

    The CUDA kernel computes 16-bit tensors in float32 and rounds once, unless float16 is asked for.

    Raises:
        HadamardSizeError, TypeError: as there.
        KernelError: the backend asked for cannot take this tensor.
    """
    n = x.shape[-1] if x.dim() else 0
    chosen = _choice(backend, x, n, 1, normalize, compute_dtype) if n else "torch"
    if chosen == "torch":
        return reference.hadamard_transform(x, inverse=inverse, normalize=normalize, compute_dtype=compute_dtype)
    return transform(chosen, x, n, 1, inverse, compute_dtype)


def head_hadamard_transform(
    x: Tensor,
    num_heads: int,
    *,
    inverse: bool = False,
    compute_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`rotquant.tensors.hadamard.head_hadamard_transform` by a backend.

    Raises:
        HadamardSizeError, TypeError, ValueError: as there.
        KernelError: the backend asked for cannot take this tensor.
    """
    equal = num_heads > 0 and x.dim() > 0 and x.shape[-1] > 0 and x.shape[-1] % num_heads == 0
    inner = x.shape[-1] // num_heads if equal else 0
    chosen = _choice(backend, x, num_heads, inner, True, compute_dtype) if equal else "torch"
    if chosen == "torch":
        return reference.head_hadamard_transform(x, num_heads, inverse=inverse, compute_dtype=compute_dtype)
    return transform(chosen, x, num_heads, inner, inverse, compute_dtype)


def _choice(backend: str, x: Tensor, n: int, inner: int, normalize: bool, compute_dtype: torch.dtype | None) -> str:
    """`choose` where there is a choice; what no backend can compute, torch is to refuse."""
    if backend == "torch" or (backend == "auto" and x.device.type != "cuda"):
        return "torch"
    check_transform(x, n, compute_dtype)
    return choose(backend, x, n, inner, normalize, compute_dtype)


def choose(backend: str, x: Tensor, n: int, inner: int, normalize: bool, compute_dtype: torch.dtype | None) -> str:
    """Resolve "auto" for x seen as [..., n, inner]; a backend asked for by name is checked instead.

    Raises:
        KernelError: the named backend cannot compute this, or is unknown.
    """
    if backend not in ("auto", "cuda", "fast-hadamard-transform"):
        raise KernelError(f"{backend!r} is no backend: choose auto, cuda, torch or fast-hadamard-transform.")
    if backend == "fast-hadamard-transform":
        problem = _package_problem(x, n, normalize, compute_dtype)
    else:
        problem = _kernel_problem(x, n, inner, normalize, compute_dtype)
    if problem is None:
        return "cuda" if backend == "auto" else backend
    if backend == "auto":
        return "torch"
    raise KernelError(f"the backend {backend} cannot compute this transform: {problem}.")


def transform(backend: str, x: Tensor, n: int, inner: int, inverse: bool, compute_dtype: torch.dtype | None) -> Tensor:
    """The transform of x [..., n * inner] along n by a backend that `choose` returned; same shape and dtype."""
    rows = x.reshape(-1, n * inner).contiguous()
    return _Backend.apply(rows, backend, n, inverse, compute_dtype == torch.float16).reshape(x.shape)


class _Backend(torch.autograd.Function):
    """Transform rows [rows, n * inner] by one backend; nothing is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: str, n: int, inverse: bool, half: bool) -> Tensor:
        ctx.arguments = (backend, n, not inverse, half)
        heads = 0 if n == x.shape[1] else n
        if backend == "cuda":
            return hadamard_kernel(x, heads, inverse, half)
        from fast_hadamard_transform import hadamard_transform  # pyright: ignore[reportMissingImports]  # optional

        if not heads:
            return hadamard_transform(x, n**-0.5)
        return hadamard_transform(x.unflatten(1, (n, -1)).mT.contiguous(), n**-0.5).mT.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        return _Backend.apply(gradient.contiguous(), *ctx.arguments), None, None, None, None


def _kernel_problem(x: Tensor, n: int, inner: int, normalize: bool, compute_dtype: torch.dtype | None) -> str | None:
    if x.device.type != "cuda":
        return f"the tensor is on {x.device}"
    if x.dtype not in KERNEL_DTYPES or compute_dtype not in (None, torch.float16, torch.float32):
        return f"it has no {x.dtype} tensors with arithmetic in {compute_dtype or x.dtype}"
    if not normalize:
        return "it always divides by sqrt(n)"
    return row_problem(n, inner, x.dtype, x.device, compute_dtype == torch.float16)


def _package_problem(x: Tensor, n: int, normalize: bool, compute_dtype: torch.dtype | None) -> str | None:
    if importlib.util.find_spec("fast_hadamard_transform") is None:
        return "the package is not installed"
    if x.device.type != "cuda":
        return f"the tensor is on {x.device}"
    if x.dtype not in KERNEL_DTYPES or compute_dtype not in (None, torch.float32) or not normalize:
        return "it computes normalized transforms in float32, of float16, bfloat16 or float32 tensors"
    if decompose(n)[0] != 1:
        return f"its matrix of order {n} is another than this library's, which agree at powers of two only"
    return None
