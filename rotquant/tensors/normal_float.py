"""NormalFloat with a scale for either side of a centre (AFPQ, Zhang et al. 2023), learned in RCP (Eqs. 12-13).

Shapes and arithmetic as in `tensors.partition`. Straight-through rounding: the value is that of the quantizer, the
gradient that of rounding with derivative one. A slow reference stands next to it.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rotquant.tensors.codebook import LevelTable
from rotquant.tensors.value_range import ValueRange, dynamic_range, exact, with_gradient_of


@lru_cache(maxsize=4)
def normal_float(bits: int) -> Tensor:
    """NormalFloat's values in ascending order, float64 [2^bits], from -1 over 0 to 1 (Dettmers et al. 2023, Sec. 3).

    Quantiles of the normal distribution at equal distances, from 1/2 outwards: 2^(bits-1) positive ones, one fewer
    negative, and zero. The outermost is that of 1 - (1/m + 1/(m - 2)) / 2 with m = 2^(bits+1), as in QLoRA's four bits.
    """
    m, half = 2 ** (bits + 1), 2 ** (bits - 1)
    outermost = 1 - (1 / m + 1 / (m - 2)) / 2

    def side(count: int) -> Tensor:
        quantiles = torch.special.ndtri(torch.linspace(0.5, outermost, count + 1, dtype=torch.float64))
        return quantiles / quantiles[-1]

    return torch.cat([-side(half - 1).flip(0), side(half)[1:]])


def float_range(view: Tensor) -> ValueRange:
    """Range from the smallest to the largest element, and always over zero: AFPQ's two scales are its sides."""
    low, high = dynamic_range(view)
    return ValueRange(low.clamp(max=0), high.clamp(min=0))


def float_centre(value_range: ValueRange, s1: Tensor) -> Tensor:
    """c = low + h sigma(s1), which stands where zero does in AFPQ (Sec. 4.3)."""
    return value_range.low + value_range.span * torch.sigmoid(s1.to(value_range.low))


def float_table(value_range: ValueRange, centre: Tensor, bits: int = 3) -> LevelTable:
    """Levels c + s_neg v for the negative values v of NormalFloat and c + s_pos v for the others, edges half-way."""
    values = normal_float(bits).to(value_range.low)
    below, above = _sides(value_range, centre)
    levels = centre + torch.where(values < 0, below, above) * values
    return LevelTable((levels[..., 1:] + levels[..., :-1]) / 2, levels)


def normal_float_asymmetric(view: Tensor, value_range: ValueRange, centre: Tensor, bits: int = 3) -> Tensor:
    """NormalFloat with a scale for either side of a centre (AFPQ, Zhang et al. 2023; RCP Eqs. 12-13).

    Of the view's shape and type, differentiable by the view, the range and the centre. Straight-through: rounding to
    the nearest value has derivative one, so a weight's gradient is one inside the range and zero outside.

    Args:
        view: [rows, groups, size].
        value_range: of every group, `float_range` for AFPQ, `clipped_range` for RCP.
        centre: [rows, groups, 1], zero for AFPQ, `float_centre` for RCP.
    """
    return _NormalFloat.apply(view, *value_range, centre, bits)


def normal_float_reference(view: Tensor, value_range: ValueRange, centre: Tensor, bits: int = 3) -> Tensor:
    """`normal_float_asymmetric` as Eqs. 12 and 13 have it, by autograd."""
    values = normal_float(bits).to(view)
    below, above = (centre - value_range.low).abs(), (value_range.high - centre).abs()

    def rounded(z: Tensor, table: Tensor) -> Tensor:
        nearest = table[(z.unsqueeze(-1) - table).abs().argmin(-1)]
        return with_gradient_of(nearest, z)

    positive = rounded(((view - centre) / above).clamp(max=1), values[values >= 0]) * above + centre
    negative = rounded(((view - centre) / below).clamp(min=-1), values[values <= 0]) * below + centre
    return torch.where(view > centre, positive, negative)


def _sides(value_range: ValueRange, centre: Tensor) -> tuple[Tensor, Tensor]:
    """s_neg and s_pos (Eq. 12); the centre lies inside the range. An empty side gets the smallest positive number."""
    tiny = torch.finfo(centre.dtype).tiny
    return (centre - value_range.low).clamp(min=tiny), (value_range.high - centre).clamp(min=tiny)


class _NormalFloat(torch.autograd.Function):
    """`normal_float_asymmetric` as a single node, with the gradients of `normal_float_backward`."""

    @staticmethod
    def forward(ctx: Any, view: Tensor, low: Tensor, high: Tensor, centre: Tensor, bits: int) -> Tensor:
        table = float_table(ValueRange(low, high), centre, bits)
        codes = table.encode(view)
        ctx.save_for_backward(view, low, high, centre, codes)
        ctx.bits = bits
        return table.decode(codes, view.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        view, low, high, centre, codes = ctx.saved_tensors
        found = normal_float_backward(
            gradient.to(centre.dtype), exact(view), ValueRange(low, high), centre, codes, ctx.bits
        )
        return found[0].to(view.dtype), *found[1:], None


def normal_float_backward(
    g: Tensor, x: Tensor, value_range: ValueRange, centre: Tensor, codes: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `normal_float_asymmetric` by the view, low, high and the centre, from that of its value.

    With z = (W - c) / s on its side, q its value and [] one inside the range, else zero: d out/dW = [], and with
    e = q - [] z:  above c,  d out/d high = e and d out/d c = 1 - q - [] (1 - z);  below, d out/d low = -e and
    d out/d c = 1 + q - [] (1 + z).

    Args:
        g, x: the gradient and the view [rows, groups, size] in the type of arithmetic.
        codes: of the view, by `float_table`.
    """
    below, above = _sides(value_range, centre)
    right = centre < x
    z = (x - centre) / torch.where(right, above, below)
    inside = (z >= -1) & (z <= 1)
    q = normal_float(bits).to(x)[codes.long()]
    error = torch.where(inside, q - z, q)
    sign = right.to(x.dtype) * 2 - 1
    to_centre = (g * torch.where(inside, -sign * error, 1 - sign * q)).sum(-1, keepdim=True)
    to_low = (g * -error).masked_fill(right, 0.0).sum(-1, keepdim=True)
    to_high = (g * error).masked_fill(~right, 0.0).sum(-1, keepdim=True)
    return g * inside, to_low, to_high, to_centre
