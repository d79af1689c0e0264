"""The fast Hadamard transform over the last axis or across heads: QuaRot's online transforms (Sec. 4, stages 1b-1d).

H_n is a Kronecker product, so x @ H_n is a few small matrix products, one per factor: O(n log n + n K) per row. Plain
torch operations on any device, and the reference for the CUDA kernel (`kernels.hadamard.choice` takes whichever is at
hand). It never forms a large H_n and never quantizes.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rotquant.tensors.hadamard.constructions import decompose, hadamard_matrix
from rotquant.tensors.onednn import linear

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# A dense factor up to this order costs one pass over the data; beyond it the multiplications outweigh the saved pass.
_MAX_SYLVESTER_FACTOR = 128
# Below this width a CPU turns blocks round and multiplies rows, because its batches of [order, order] @ [order, width]
# are slow (K = 108, width 8, [4096, 864]: 37 ms, turned round 8 ms).
_NARROW = 16
# Elements worked on at a time on a CPU, so that all factors of a block of rows meet it in cache: about half the time of
# whole-tensor passes at [16384, 4096] in float32 (1 MiB), and flat between 2^17 and 2^19.
_CPU_BLOCK = 2**18


def hadamard_transform(
    x: Tensor,
    *,
    inverse: bool = False,
    normalize: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply the last axis by a Hadamard matrix: `x @ H / sqrt(n)`, or with `inverse` `x @ H.T / sqrt(n)`.

    H is `hadamard_matrix(n)`. The two are inverses and transposes of each other, and differ unless H_K is symmetric.
    Any strides; differentiable to any order, the gradient being the opposite transform, with nothing saved for it.

    Args:
        x: [..., n], float64, float32, bfloat16 or float16.
        inverse: apply the transpose. With `normalize=False` the round trip multiplies by n.
        normalize: divide by sqrt(n), which keeps every row's norm.
        compute_dtype: dtype of the arithmetic (QuaRot Table 10 compares float32 and float16); x's own by default. Each
            factor's result is rounded to it. float32 on CUDA follows torch's global TF32 setting.

    Returns:
        [..., n] in the dtype of x.

    Raises:
        HadamardSizeError: no construction for n.
        TypeError: x or compute_dtype is not one of the four float dtypes.
    """
    if x.dim() == 0:
        raise TypeError("hadamard_transform needs at least one axis, and this tensor is a scalar")
    return _transform_axis(x, x.shape[-1], 1, inverse, normalize, compute_dtype)


def head_hadamard_transform(
    x: Tensor,
    num_heads: int,
    *,
    inverse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Mix heads: multiply the last axis by `(H_num_heads (x) I_head_dim) / sqrt(num_heads)`, or by its transpose.

    QuaRot's online transform before o_proj (Sec. 4, stage 1c). After a per-head transform (I (x) H_head_dim), fused
    into v_proj, it completes the full one: H_num_heads (x) H_head_dim = H_(num_heads * head_dim) whenever head_dim is a
    power of two; num_heads need not be.

    Args:
        x: [..., num_heads * head_dim], head-major as attention returns it; float64, float32, bfloat16 or float16.
        num_heads: any supported Hadamard order.
        inverse, compute_dtype: as in `hadamard_transform`.

    Raises:
        HadamardSizeError: no construction for num_heads.
        ValueError: the last axis does not hold num_heads heads of equal size.
        TypeError: not a supported float dtype.
    """
    if num_heads < 1 or x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % num_heads:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no last axis of {num_heads} equally sized heads")
    return _transform_axis(x, num_heads, x.shape[-1] // num_heads, inverse, True, compute_dtype)


def check_transform(x: Tensor, n: int, compute_dtype: torch.dtype | None) -> None:
    """Raise `TypeError` or `HadamardSizeError` unless x can be transformed along an axis of length n."""
    for dtype, name in ((x.dtype, "its input"), (compute_dtype or x.dtype, "compute_dtype")):
        if dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"the Hadamard transform needs {name} in float64, float32, bfloat16 or float16, not {dtype}"
            )
    _factors(n)  # an impossible size is reported before any work


def _transform_axis(
    x: Tensor, n: int, inner: int, inverse: bool, normalize: bool, compute_dtype: torch.dtype | None
) -> Tensor:
    """Transform the axis of length n in x seen as [..., n, inner]."""
    check_transform(x, n, compute_dtype)
    y = _Transform.apply(x.to(compute_dtype or x.dtype).reshape(-1, n, inner), inverse, normalize)
    return y.reshape(x.shape).to(x.dtype)


class _Transform(torch.autograd.Function):
    """Linear map on [rows, n, inner]; its backward is the opposite transform, so no activation is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: bool, normalize: bool) -> Tensor:
        ctx.inverse, ctx.normalize = inverse, normalize
        with torch.autocast(x.device.type, enabled=False):
            return _transform(x.contiguous(), inverse, normalize)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        return _Transform.apply(grad, not ctx.inverse, ctx.normalize), None, None


def _transform(x: Tensor, inverse: bool, normalize: bool) -> Tensor:
    """Apply every Kronecker factor to contiguous x [rows, n, inner], block of rows by block of rows on a CPU.

    CPUs multiply 16-bit numbers slowly, so there a factor is applied in float32 and its result rounded to 16 bits: the
    products with +-1 are exact and a GPU's sums are float32 too.
    """
    rows, n, inner = x.shape
    factors, on_cpu = _factors(n), x.device.type == "cpu"
    rounded_to = x.dtype if on_cpu and x.dtype.itemsize == 2 else None
    x = x if rounded_to is None else x.float()
    y = torch.empty_like(x)
    block = max(1, _CPU_BLOCK // (n * inner)) if on_cpu and len(factors) > 1 else max(1, rows)
    scratch = [torch.empty_like(x[:block]) for _ in factors[1:3]]  # ping-pong between the factors before the last
    for start in range(0, rows, block):
        source, width = x[start : start + block], inner
        for i, order in enumerate(reversed(factors)):
            last = i == len(factors) - 1
            target = y[start : start + block] if last else scratch[i % 2][: len(source)]
            table = _table(order, x.dtype, x.device)
            _apply_factor(source, table if not inverse else table.T, width, normalize, out=target)
            if rounded_to is not None and not last:
                target.copy_(target.to(rounded_to))
            source, width = target, width * order
    return y if rounded_to is None else y.to(rounded_to)


def _apply_factor(x: Tensor, table: Tensor, width: int, normalize: bool, *, out: Tensor) -> None:
    """out = x times one factor, on x seen as [-1, order, width]. The scale is applied to the accumulated sums.

    Scaling factor by factor keeps float16 in range.
    """
    order = table.shape[0]
    scale = order**-0.5 if normalize else 1.0
    blocks, target = x.view(-1, order, width), out.view(-1, order, width)
    if x.device.type == "cpu" and width < _NARROW:
        rows = blocks.transpose(1, 2).reshape(-1, order)
        products = linear(rows, table.T).view(-1, width, order)
        torch.mul(products.transpose(1, 2), scale, out=target)
    elif width == 1:
        out.view(-1, order).addmm_(x.view(-1, order), table, beta=0, alpha=scale)
    else:
        target.baddbmm_(table.T.expand(len(blocks), order, order), blocks, beta=0, alpha=scale)


@lru_cache(maxsize=1024)
def _factors(n: int) -> tuple[int, ...]:
    """Orders whose Hadamard matrices multiply (Kronecker, left to right) to H_n; each is applied as one dense block."""
    core, doublings = decompose(n)
    if n <= _MAX_SYLVESTER_FACTOR:
        return (n,)
    largest = _MAX_SYLVESTER_FACTOR.bit_length() - 1
    count = -(-doublings // largest)
    exponents = [doublings // count + (i < doublings % count) for i in range(count)]
    return (core,) * (core > 1) + tuple(2**exponent for exponent in exponents)


@lru_cache(maxsize=256)
def _table(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The dense factor, shared between calls; internal, so that nobody writes to it."""
    return hadamard_matrix(order, dtype, device)
