"""The Hadamard transform on a GPU, over the last axis or across heads: QuaRot's online transforms (Sec. 4, 1b-1d).

The same normalized H as `rotquant.tensors.hadamard`; 16-bit rows meet +-1 on the tensor cores: exact products, float32
sums, and one rounding of the result. It never quantizes: see `activations` for the fused forms.
"""

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import TYPES
from rotquant.kernels.hadamard.launch import launch_transform, sources
from rotquant.kernels.launch.operators import check_tensor, operator
from rotquant.tensors.hadamard import decompose, hadamard_transform, head_hadamard_transform

__all__ = ["check_heads", "hadamard", "sources", "transform_reference"]


def transform_reference(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    """The transform of x [rows, n] as float32, not rounded to the type of x; float16 arithmetic with `half`.

    Rows of float64, which only references take, stay float64, as in `Transform.dtype`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(torch.float16 if half and x.dtype != torch.float64 else wide)
    if heads:
        return head_hadamard_transform(x, heads, inverse=inverse).to(wide)
    return hadamard_transform(x, inverse=inverse).to(wide)


def _reference(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    """H applied to x [rows, n], float16, bfloat16 or float32: H / sqrt(n) over the row, or over `heads` heads of it.

    inverse: the transpose; half: float16 arithmetic, else float32 and one rounding. Returns a tensor like x. Raises
    `HadamardSizeError` for an order without a matrix, and `KernelError` for what a kernel cannot read.
    """
    return transform_reference(x, heads, inverse, half).to(x.dtype)


def _cuda(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    check_tensor(x, "the Hadamard transform's input", dtypes=tuple(TYPES), shape=(None, None))
    check_heads(x.shape[1], heads)
    y = torch.empty_like(x)
    launch_transform(x, y, heads=heads, inverse=inverse, half=half)
    return y


def _fake(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    if x.dim() != 2:
        raise KernelError(f"the Hadamard operators take [rows, n], not a tensor of shape {tuple(x.shape)}.")
    check_heads(x.shape[1], heads)
    return torch.empty_like(x)


def check_heads(width: int, heads: int) -> None:
    """Raise one sentence unless rows of `width` values are `heads` heads of equal size, or a transform's order with 0.

    Raises:
        HadamardSizeError: no construction for the order.
        KernelError: heads of unequal size.
    """
    if heads < 0 or (heads and width % heads):
        raise KernelError(f"{width} columns are not {heads} heads of equal size.")
    decompose(heads or width)


hadamard = operator("hadamard", reference=_reference, cuda=_cuda, fake=_fake)
