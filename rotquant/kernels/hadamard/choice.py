"""The Hadamard transform by the CUDA kernel, where a tensor lies on a GPU and there is one for it, else by torch.

Both multiply by the same normalized H. Differentiable: the gradient is the opposite transform.
"""

from typing import Any

import torch
from torch import Tensor

from rotquant.kernels.arguments import TYPES
from rotquant.kernels.hadamard.launch import has_kernel
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.tensors import hadamard as reference
from rotquant.tensors.hadamard.transform import check_transform


def hadamard_transform(x: Tensor, *, inverse: bool = False, compute_dtype: torch.dtype | None = None) -> Tensor:
    """`rotquant.tensors.hadamard.hadamard_transform`; the CUDA kernel computes 16-bit tensors in float32 and rounds
    once, unless float16 is asked for.

    Raises:
        HadamardSizeError, TypeError: as there.
    """
    n = x.shape[-1] if x.dim() else 0
    if _has_kernel(x, n, 1, compute_dtype):
        return _by_kernel(x, n, 1, inverse, compute_dtype)
    return reference.hadamard_transform(x, inverse=inverse, compute_dtype=compute_dtype)


def head_hadamard_transform(
    x: Tensor, num_heads: int, *, inverse: bool = False, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """`rotquant.tensors.hadamard.head_hadamard_transform`, as above.

    Raises:
        HadamardSizeError, TypeError, ValueError: as there.
    """
    equal = num_heads > 0 and x.dim() > 0 and x.shape[-1] % num_heads == 0
    inner = x.shape[-1] // num_heads if equal else 0
    if _has_kernel(x, num_heads, inner, compute_dtype):
        return _by_kernel(x, num_heads, inner, inverse, compute_dtype)
    return reference.head_hadamard_transform(x, num_heads, inverse=inverse, compute_dtype=compute_dtype)


def _has_kernel(x: Tensor, n: int, inner: int, compute_dtype: torch.dtype | None) -> bool:
    """Whether a kernel transforms x seen as [..., n, inner]; what nobody can compute, torch is to refuse."""
    if x.device.type != "cuda" or n * inner == 0:
        return False
    check_transform(x, n, compute_dtype)
    if x.dtype not in TYPES or compute_dtype not in (None, torch.float16, torch.float32):
        return False
    return has_kernel(n, inner, x.dtype, x.device, compute_dtype == torch.float16)


def _by_kernel(x: Tensor, n: int, inner: int, inverse: bool, compute_dtype: torch.dtype | None) -> Tensor:
    """The transform of x [..., n * inner] along n; same shape and dtype."""
    rows = x.reshape(-1, n * inner).contiguous()
    return _Kernel.apply(rows, 0 if inner == 1 else n, inverse, compute_dtype == torch.float16).reshape(x.shape)


class _Kernel(torch.autograd.Function):
    """Transform rows [rows, width], or `heads` heads of them; nothing is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
        ctx.arguments = (heads, not inverse, half)
        return hadamard(x, heads, inverse, half)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        return _Kernel.apply(gradient.contiguous(), *ctx.arguments), None, None, None
