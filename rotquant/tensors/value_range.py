"""Where the range of every group of a weight begins and ends, and uniform rounding over it (RCP, Secs. 2.2 and 4.2).

A weight comes as a view [rows, groups, size]; what belongs to a group is [rows, groups, 1]. Arithmetic is in float32
(float64 for float64). W is the paper's W_r, the weight of the rotated network.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, dequantize, fake_quantize, quantize


class ValueRange(NamedTuple):
    """Where the range of every group begins and ends, [rows, groups, 1]."""

    low: Tensor
    high: Tensor

    @property
    def span(self) -> Tensor:
        """h = high - low. An empty range gets the smallest positive number, whose gradient is that of h."""
        h = self.high - self.low
        return with_gradient_of(h.clamp(min=torch.finfo(h.dtype).tiny), h)


def dynamic_range(view: Tensor) -> ValueRange:
    """Range from the smallest to the largest element (Eq. 1); differentiable, equal ones share the gradient."""
    x = exact(view)
    return ValueRange(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))


def clipped_range(view: Tensor, gamma: Tensor, beta: Tensor) -> ValueRange:
    """Range from sigma(beta) min W to sigma(gamma) max W (LWC, Eq. 5); differentiable."""
    low, high = dynamic_range(view)
    return ValueRange(torch.sigmoid(beta.to(low)) * low, torch.sigmoid(gamma.to(high)) * high)


def uniform_scheme(bits: int) -> QuantizationScheme:
    """How a view's elements are rounded by the scales and zero points of `uniform_qparams`."""
    return QuantizationScheme(bits=bits, symmetric=False, granularity="token")


def uniform_qparams(value_range: ValueRange, bits: int) -> QParams:
    """Scale s = h / (2^bits - 1) and zero point z = -round(low / s) of every group (Eq. 1, which prints h for this s).

    Differentiable, rounding with derivative one. Unlike `choose_qparams` it never widens a range that lies on one side
    of zero. A range of next to nothing gets a scale by which zero points stay numbers that codes can be added to.
    """
    low, high = value_range
    info = torch.finfo(low.dtype)
    least = info.eps * torch.maximum(low.abs(), high.abs()).detach() + info.tiny
    scale = torch.maximum((high - low) / (2**bits - 1), least)
    return QParams(scale, -_round(low / scale))


def uniform(view: Tensor, value_range: ValueRange, bits: int) -> Tensor:
    """The view rounded by Eq. 1 over a range, of its shape and type, differentiable by the view and by the range.

    Straight-through rounding: the weight's gradient is one where no code is clamped, else zero.
    """
    return fake_quantize(view, uniform_scheme(bits), uniform_qparams(value_range, bits))


def uniform_codes(view: Tensor, value_range: ValueRange, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of `uniform`, uint8 of the view's shape, and the levels they stand for, [rows, groups, 2^bits]."""
    qparams, scheme = uniform_qparams(value_range, bits), uniform_scheme(bits)
    every = torch.arange(2**bits, device=view.device).expand(*view.shape[:-1], -1)
    return quantize(view, qparams, scheme), dequantize(every, qparams, scheme, qparams.scale.dtype)


def uniform_reference(view: Tensor, value_range: ValueRange, bits: int) -> Tensor:
    """`uniform` as Eq. 1 has it, by autograd."""
    low, high = value_range
    scale = (high - low) / (2**bits - 1)
    zero_point = -_round(low / scale)
    return (((_round(view / scale) + zero_point).clamp(0, 2**bits - 1)) - zero_point) * scale


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Floating-point type of the arithmetic: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def exact(view: Tensor) -> Tensor:
    """A view in the type of arithmetic."""
    return view.to(exact_type(view.dtype))


def with_gradient_of(value: Tensor, stand_in: Tensor) -> Tensor:
    """`value` exactly, with the gradient of what stands in for it."""
    return value.detach() + (stand_in - stand_in.detach())


def _round(x: Tensor) -> Tensor:
    """Rounding with derivative one; halves to even."""
    return with_gradient_of(x.round(), x)
