"""Who computes a Hadamard transform on a GPU: the library's CUDA kernel, or Dao's fast-hadamard-transform package.

Both multiply by the same normalized H as the torch reference; the package only at powers of two, since its matrices of
order 12, 20, 28 and 40 are others than this library's. Differentiable: the gradient is the opposite transform.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.launch import row_problem
from rotquant.kernels.hadamard.operator import hadamard as hadamard_kernel
from rotquant.tensors.hadamard.constructions import decompose

#: dtypes the CUDA kernel reads and writes.
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
    """One backend on rows [rows, n * inner]; nothing is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: str, n: int, inverse: bool, half: bool) -> Tensor:
        ctx.arguments = (backend, n, not inverse, half)
        heads = 0 if n == x.shape[1] else n
        if backend == "cuda":
            return hadamard_kernel(x, heads, inverse, half)
        from fast_hadamard_transform import hadamard_transform

        if not heads:
            return hadamard_transform(x, n**-0.5)
        return hadamard_transform(x.unflatten(1, (n, -1)).mT.contiguous(), n**-0.5).mT.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
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
