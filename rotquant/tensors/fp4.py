"""4-bit floats in groups that share a scale of 8 bits, as pure functions: MXFP4 (OCP Microscaling 1.0) and NVFP4.

A code is a number of E2M1, 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign. MXFP4 has groups of 32 and scales that are powers
of two (E8M0). NVFP4 has groups of 16, scales of E4M3, and one number g for the tensor: values are code * scale / g.
Codes and scales are those of the library compressed-tensors, bit for bit, for float32 values below 1.75 * 2^127.
"""

import torch
from torch import Tensor

from rotquant.recipes.schemes import LARGEST_E2M1, LARGEST_E4M3, QuantizationScheme

#: Ratios of scales that are tried to the one that covers a group, the first of equally good ones taken.
_RATIOS = {
    "paper": (1.0,),
    "four_over_six": (1.0, 1.5),
    "mse": tuple(tenths / 10 for tenths in (10, 9, 8, 7, 11, 12, 13, 14, 15)),
}
#: Those of scales that are powers of two.
_POWERS = (1.0, 2.0, 0.5)
#: Exponents of E8M0.
_EXPONENTS = (-127, 127)
#: What compressed-tensors takes for a scale of E4M3 that is zero.
_NOT_ZERO = 0.125


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest numbers of E2M1, of two the one with an even last bit; x lies within ±6."""
    size = x.abs()
    step = (size >= 2).to(x.dtype).add_(size >= 4, alpha=2).add_(1).mul_(0.5)  # 0.5 below 2, 1 below 4, then 2
    return torch.round(size / step).mul_(step).mul_(x.sign())


def encode(values: Tensor) -> Tensor:
    """Numbers of E2M1 as uint8, the sign in bit 3; without a table, which a CUDA graph could not copy to the GPU."""
    size = values.abs()
    codes = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return codes.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`."""
    code = (codes & 7).to(dtype)
    size = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes >= 8, -size, size)


def global_scale(largest: Tensor) -> Tensor:
    """g of NVFP4 of a tensor's largest |value|, by which that becomes 6 * 448; 1 where that is no number."""
    found = LARGEST_E4M3 * LARGEST_E2M1 / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.nan_to_num(found, nan=1.0, posinf=1.0)


def choose_scales(
    view: Tensor, scheme: QuantizationScheme, clip: float | Tensor, scale_of_all: Tensor | None, padded: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Scales of groups, and g of NVFP4.

    Args:
        view: [..., groups, size], float32 or float64. padded: how many of its last elements repeat another.
        scheme: its `scale` says which scales are tried; of several the one with the least squared error is taken.
        clip: share of the range that the scale covers.
        scale_of_all: g; by default each row [groups, size] has its own.

    Returns:
        [..., groups, 1]: what codes are multiplied by, of NVFP4 divided by g already.
    """
    largest = view.abs().amax(-1, keepdim=True)
    if scheme.fp4 == "NVFP4" and scale_of_all is None:
        scale_of_all = global_scale(largest.amax(-2, keepdim=True))
    powers = scheme.fp4 == "MXFP4"
    ratios = _POWERS if powers and scheme.scale == "mse" else _RATIOS[scheme.scale]
    best, least = largest, torch.full_like(largest, torch.inf)
    for ratio in ratios:
        covered = largest * (clip * ratio)
        scale = _power(covered) if scale_of_all is None else _e4m3(covered, scale_of_all)
        if ratio == ratios[0]:
            best = scale
        if len(ratios) == 1:
            break
        error = (round_e2m1((view / scale).clamp_(-LARGEST_E2M1, LARGEST_E2M1)) * scale).sub_(view).square_()
        if padded:
            error[..., -1, -padded:] = 0
        error = error.sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best, scale_of_all


def _power(largest: Tensor) -> Tensor:
    """The power of two by which the largest |value| of a group lies in [3.5, 7)."""
    mantissa, exponent = torch.frexp(largest)  # the mantissa in [0.5, 1)
    exponent = (exponent - 3 + (mantissa >= 0.875).int()).clamp(*_EXPONENTS)
    return torch.ldexp(torch.ones_like(largest), exponent.masked_fill(largest == 0, _EXPONENTS[0]))


def _e4m3(largest: Tensor, scale_of_all: Tensor) -> Tensor:
    """The scale of E4M3 by which the largest |value| of a group is 6, less its factor g."""
    scale = (scale_of_all * (largest / LARGEST_E2M1)).clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn).to(largest.dtype)
    return torch.where(scale == 0, _NOT_ZERO, scale) / scale_of_all


def pack_scales(scale: Tensor, scale_of_all: Tensor | None) -> Tensor:
    """Scales as they are stored: float8_e4m3fn before g, or of powers of two the exponents + 127, uint8."""
    if scale_of_all is None:
        return (torch.frexp(scale).exponent + 126).to(torch.uint8)
    return (scale * scale_of_all).to(torch.float8_e4m3fn)


def unpack_scales(stored: Tensor, scale_of_all: Tensor | None) -> Tensor:
    """The inverse of `pack_scales`; float32, or the type of g."""
    if scale_of_all is None:
        return torch.ldexp(torch.ones(stored.shape, device=stored.device), stored.int() - 127)
    return stored.to(scale_of_all.dtype) / scale_of_all
