"""Activations to integers in one pass: Hadamard, SwiGLU or RMSNorm, then per-token or static symmetric quantization.

QuaRot Sec. 4 (stages 1 and 2a) and PrefixQuant's static scales. Codes and scales follow `rotquant.quantization`, rows
are padded with zero codes to a multiple of 64 for `linear`, and the transformed row is never written to memory.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from rotquant.errors import KernelError
from rotquant.kernels.hadamard import transform_reference
from rotquant.kernels.layouts import K_BLOCK, pack_rows, padded
from rotquant.kernels.loading import Source
from rotquant.kernels.operators import operator
from rotquant.quantization import QParams, choose_qparams, quantize
from rotquant.schemes import QuantizationScheme

#: `heads` of `hadamard_quantize` that leaves the transform out.
NO_TRANSFORM = -1


def sources(architecture: str) -> list[Source]:
    """What the launchers ask for at the papers' shapes."""
    return []


def _codes(x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, n] as it is: codes [rows, Kp] or packed [rows, Kp / 2], and scales [rows] or [1]."""
    scheme = QuantizationScheme(bits=bits, symmetric=True, granularity="token")
    qparams = choose_qparams(x, scheme, clip_ratio) if static_scale is None else QParams(static_scale)
    codes = pad(quantize(x, qparams, scheme), (0, padded(x.shape[1], K_BLOCK) - x.shape[1]))
    return pack_rows(codes) if packed else codes, qparams.scale.flatten().clone()


def _gated(x: Tensor) -> Tensor:
    """silu(gate) * up of x = (gate | up) [rows, 2n], each operation rounded to the type of x, as a model does it."""
    gate, up = x.chunk(2, dim=1)
    return silu(gate) * up


def _quantize_reference(
    x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(x, bits, packed, static_scale)
    return _codes(x, clip_ratio, bits, packed, static_scale)


def _quantize_cuda(
    x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    raise KernelError("not built yet.")


def _quantize_fake(
    x: Tensor, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(x, bits, packed, static_scale)
    return empty_codes(x, x.shape[1], packed, static_scale)


quantize_rows = operator(
    "quantize_rows(Tensor x, float clip_ratio, int bits, bool packed, Tensor? static_scale) -> (Tensor, Tensor)",
    reference=_quantize_reference,
    cuda=_quantize_cuda,
    fake=_quantize_fake,
)


def _hadamard_reference(
    x: Tensor,
    heads: int,
    half: bool,
    swiglu: bool,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The transformed row stays float32: it is not rounded to the type of x before it is quantized."""
    _check(x, bits, packed, static_scale)
    x = _gated(x) if swiglu else x
    y = x if heads == NO_TRANSFORM else transform_reference(x, heads, False, half)
    return _codes(y, clip_ratio, bits, packed, static_scale)


def _hadamard_cuda(
    x: Tensor,
    heads: int,
    half: bool,
    swiglu: bool,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    raise KernelError("not built yet.")


def _hadamard_fake(
    x: Tensor,
    heads: int,
    half: bool,
    swiglu: bool,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check(x, bits, packed, static_scale)
    return empty_codes(x, x.shape[1] // (2 if swiglu else 1), packed, static_scale)


hadamard_quantize = operator(
    "hadamard_quantize(Tensor x, int heads, bool half, bool swiglu, float clip_ratio, int bits, bool packed,"
    " Tensor? static_scale) -> (Tensor, Tensor)",
    reference=_hadamard_reference,
    cuda=_hadamard_cuda,
    fake=_hadamard_fake,
)


def _norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm as transformers computes it: float32 statistics, the normalized row rounded before the weight."""
    _check(x, bits, packed, static_scale)
    hidden = x if residual is None else x + residual
    values = hidden.float()
    normal = (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    normal = normal if weight is None else weight * normal
    new = x.new_empty(0) if residual is None else hidden
    return *_codes(normal, clip_ratio, bits, packed, static_scale), new


def _norm_cuda(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    raise KernelError("not built yet.")


def _norm_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    clip_ratio: float,
    bits: int,
    packed: bool,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, bits, packed, static_scale)
    hidden = x.new_empty(0) if residual is None else torch.empty_like(x)
    return *empty_codes(x, x.shape[1], packed, static_scale), hidden


rms_norm_quantize = operator(
    "rms_norm_quantize(Tensor x, Tensor? residual, Tensor? weight, float eps, float clip_ratio, int bits,"
    " bool packed, Tensor? static_scale) -> (Tensor, Tensor, Tensor)",
    reference=_norm_reference,
    cuda=_norm_cuda,
    fake=_norm_fake,
)


def empty_codes(x: Tensor, n: int, packed: bool, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the codes and scales of rows of n values."""
    columns = padded(n, K_BLOCK)
    codes = x.new_empty((x.shape[0], columns // 2 if packed else columns), dtype=torch.uint8 if packed else torch.int8)
    return codes, x.new_empty(x.shape[0] if static_scale is None else 1, dtype=torch.float32)


def _check(x: Tensor, bits: int, packed: bool, static_scale: Tensor | None) -> None:
    """Raise one sentence unless rows [rows, n] can be quantized so."""
    if x.dim() != 2:
        raise KernelError(f"activations come as [rows, n], not in shape {tuple(x.shape)}.")
    if not 2 <= bits <= 8 or (packed and bits > 4):
        raise KernelError(f"{bits}-bit codes cannot be {'packed as int4' if packed else 'held in int8'}.")
    if static_scale is not None and (static_scale.numel() != 1 or static_scale.dtype != torch.float32):
        raise KernelError(
            f"a static scale is one float32 number, not {static_scale.dtype} of shape {tuple(static_scale.shape)}."
        )
