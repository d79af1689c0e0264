"""Reference of `rows.partition`, slow and for all types: values by `rotquant.tensors`, gradients spelled out.

An operator runs below torch's autograd, so what the kernels differentiate by hand is differentiated by hand here as
well, one formula after the other; the tests hold both against autograd.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from rotquant.tensors.normal_float import (
    float_centre,
    float_range,
    float_table,
    normal_float_asymmetric,
    normal_float_backward,
)
from rotquant.tensors.partition import Spacing, StraightThrough, ldp, ldp_backward
from rotquant.tensors.value_range import ValueRange, clipped_range, dynamic_range, exact, uniform, uniform_qparams

_SPACINGS: dict[str, Spacing] = {"ldp": "partition", "n2uq": "uniform"}


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of a weight and of gamma, beta, s1 and s2."""


class WeightGroups(NamedTuple):
    """A weight [out, in] and how groups of its input features are quantized: what both operators take.

    gamma, beta, s1, s2: float32 [out, groups, 1], those that the kind has. kind: see `qat.quantizers.make_quantizer`.
    straight_through: of kinds with steps, see `tensors.partition.ldp`.
    """

    weight: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    s1: Tensor | None
    s2: Tensor | None
    group_size: int
    bits: int
    kind: str
    straight_through: StraightThrough

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """gamma, beta, s1 and s2."""
        return self.gamma, self.beta, self.s1, self.s2


def forward_reference(w: WeightGroups) -> Tensor:
    """`fake_quantize_groups` in plain torch."""
    view = w.weight.unflatten(1, (-1, w.group_size))
    if w.kind in _SPACINGS:
        value = ldp(view, *_given(w), w.straight_through, _SPACINGS[w.kind])
    elif w.kind in ("range", "learned_range"):
        value = uniform(view, _value_range(view, w), w.bits)
    else:
        value_range = _value_range(view, w)
        value = normal_float_asymmetric(view, value_range, _centre(value_range, w.s1), w.bits)
    return value.flatten(1)


def backward_reference(gradient: Tensor, w: WeightGroups) -> Gradients:
    """`fake_quantize_groups_backward` in plain torch."""
    view, g = (x.unflatten(1, (-1, w.group_size)) for x in (w.weight, gradient))
    if w.kind in _SPACINGS:
        to_view, *others = ldp_backward(g, view, *_given(w), w.straight_through, _SPACINGS[w.kind])
        return cast(Gradients, (to_view.flatten(1), *others))
    x, g = exact(view), exact(g)
    value_range = _value_range(view, w)
    to_s1 = None
    if w.kind in ("range", "learned_range"):
        to_x, to_low, to_high = _uniform_backward(g, x, value_range, w.bits)
    else:
        centre = _centre(value_range, w.s1)
        codes = float_table(value_range, centre, w.bits).encode(x)
        to_x, to_low, to_high, to_centre = normal_float_backward(g, x, value_range, centre, codes, w.bits)
        if w.s1 is not None:
            share = torch.sigmoid(w.s1.to(x))
            to_low, to_high = to_low + to_centre * (1 - share), to_high + to_centre * share
            to_s1 = to_centre * value_range.span * share * (1 - share)
    to_x, to_gamma, to_beta = _range_backward(x, w, to_x, to_low, to_high)
    pairs = zip((to_gamma, to_beta, to_s1, None), w.parameters, strict=True)
    found = (w.weight.new_empty(0) if own is None or like is None else own.to(like) for own, like in pairs)
    return cast(Gradients, (to_x.to(w.weight.dtype).flatten(1), *found))


def _given(w: WeightGroups) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gamma, beta, s1, s2 = (parameter for parameter in w.parameters if parameter is not None)
    return gamma, beta, s1, s2


def _value_range(view: Tensor, w: WeightGroups) -> ValueRange:
    if w.gamma is not None and w.beta is not None:
        return clipped_range(view, w.gamma, w.beta)
    return float_range(view) if w.kind == "nf3" else dynamic_range(view)


def _centre(value_range: ValueRange, s1: Tensor | None) -> Tensor:
    return torch.zeros_like(value_range.low) if s1 is None else float_centre(value_range, s1)


def _uniform_backward(g: Tensor, x: Tensor, value_range: ValueRange, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 1 with rounding of derivative one: to the elements [rows, groups, size], to low and to high.

    With r = x / s, v the clamped code less the zero point, and [] one where nothing is clamped, else zero:
    d out/dx = [],  d out/ds = v - [] r,  d out/dz = -s (1 - []);  z = -low / s, and s = (high - low) / (2^bits - 1)
    unless the range is next to nothing.
    """
    qparams = uniform_qparams(value_range, bits)
    s, z = qparams.scale, qparams.zero_point
    assert z is not None
    r = x / s
    codes = r.round() + z
    clamped = codes.clamp(0, 2**bits - 1)
    inside = codes == clamped
    to_z = -s * (g * ~inside).sum(-1, keepdim=True)
    to_s = (g * (clamped - z - inside * r)).sum(-1, keepdim=True) + to_z * value_range.low / s**2
    step = (value_range.high - value_range.low) / (2**bits - 1)
    to_step = torch.where(step == s, to_s, 0.0) / (2**bits - 1)
    return g * inside, -to_z / s - to_step, to_step


def _range_backward(
    x: Tensor, w: WeightGroups, to_x: Tensor, to_low: Tensor, to_high: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Backpropagate from low and high to gamma, beta and the extremes; elements that equal an extreme share its
    gradient."""
    least, most = dynamic_range(x)
    to_gamma = to_beta = None
    if w.gamma is not None and w.beta is not None:
        low, high = torch.sigmoid(w.beta.to(x)), torch.sigmoid(w.gamma.to(x))
        to_gamma, to_beta = to_high * most * high * (1 - high), to_low * least * low * (1 - low)
        to_low, to_high = to_low * low, to_high * high
    elif w.kind == "nf3":
        to_low, to_high = to_low * (least <= 0), to_high * (most >= 0)
    for extreme, to_extreme in ((least, to_low), (most, to_high)):
        equal = x == extreme
        to_x = to_x + equal * (to_extreme / equal.sum(-1, keepdim=True))
    return to_x, to_gamma, to_beta
