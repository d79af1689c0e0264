"""The Hadamard transform on a GPU, over the last axis or across heads: QuaRot's online transforms (Sec. 4, 1b-1d).

The same normalized H as `rotquant.hadamard`; 16-bit rows meet +-1 on the tensor cores: exact products, float32 sums,
and one rounding of the result. It never quantizes: see `activations` for the fused forms.
"""

import torch
from torch import Tensor

from rotquant.errors import KernelError
from rotquant.hadamard import decompose, hadamard_transform, head_hadamard_transform
from rotquant.kernels.loading import Source
from rotquant.kernels.operators import operator


def sources(architecture: str) -> list[Source]:
    """What the launchers ask for at the papers' shapes."""
    return []


def transform_reference(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    """The transform of x [rows, n] as float32, not rounded to the type of x; float16 arithmetic with `half`.

    Rows of float64, which only references take, stay float64, as `rotation.online_dtype` has it.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(torch.float16 if half and x.dtype != torch.float64 else wide)
    if heads:
        return head_hadamard_transform(x, heads, inverse=inverse, backend="torch").to(wide)
    return hadamard_transform(x, inverse=inverse, backend="torch").to(wide)


def _reference(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    return transform_reference(x, heads, inverse, half).to(x.dtype)


def _cuda(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    raise KernelError("not built yet.")


def _fake(x: Tensor, heads: int, inverse: bool, half: bool) -> Tensor:
    _check(x, heads)
    return torch.empty_like(x)


def _check(x: Tensor, heads: int) -> None:
    if x.dim() != 2:
        raise KernelError(f"the Hadamard operators take [rows, n], not a tensor of shape {tuple(x.shape)}.")
    if heads < 0 or (heads and x.shape[1] % heads):
        raise KernelError(f"{x.shape[1]} columns are not {heads} heads of equal size.")
    decompose(heads or x.shape[1])


def unsupported(n: int, inner: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel cannot transform the middle axis of [rows, n, inner] on this GPU; None where it can."""
    return "it is not built yet"


hadamard = operator(
    "hadamard(Tensor x, int heads, bool inverse, bool half) -> Tensor",
    reference=_reference,
    cuda=_cuda,
    fake=_fake,
)
