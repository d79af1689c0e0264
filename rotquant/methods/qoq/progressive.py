"""Progressive group quantization (QServe Sec. 4.1): weights become INT8 codes, these become 4-bit codes of groups.

Per output channel W = Q8 s0 with a floating s0 (Eq. 3), per group Q8 = (Q4 - z) s1 with whole z and s1 (Eq. 4). Q8
keeps to a protective range, so that what a kernel makes of Q4 is INT8 without saturation. Stored is (Q4 - z) (s0 s1),
one level of floating scales: s0 has a float16's 11 significant bits, s1 at most 5 and Q4 - z 4, so that in float32 no
product is rounded and both forms are the same numbers. Weights per channel have the one level alone.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, dequantize, grouped, quantize, ungrouped

Intermediate = Literal["integers", "real"]
#: Largest magnitude of Q8. s1 is at most 2 * 119 / 15, rounded 16, and half of it goes at most to 127.
PROTECTIVE_RANGE = 119
#: The first level: one scale per output channel.
EIGHT_BITS = QuantizationScheme(bits=8, symmetric=True, granularity="channel")
#: Significant bits of a float16.
_SIGNIFICANT = 11


@dataclass(frozen=True)
class QuantizationGrid:
    """Quantization levels of a weight [out, in].

    unit: what the weight is divided by before it is rounded: s0, [out, 1], or one.
    levels: scales and zero points of what it is then, s1 and z, in the shape of the scheme's scales; whole for groups.
    scheme: asymmetric, of granularity channel or group.
    intermediate: of groups, what is rounded to Q4.
    limit: of Q8.
    """

    unit: Tensor
    levels: QParams
    scheme: QuantizationScheme
    intermediate: Intermediate = "integers"
    limit: int = PROTECTIVE_RANGE

    @property
    def qparams(self) -> QParams:
        """Scales and zero points of the weight itself, as they are stored."""
        unit = self.unit if self.levels.scale.ndim == 2 else self.unit.unsqueeze(-1)
        return QParams(unit * self.levels.scale, self.levels.zero_point)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """s1 and z; of weights per channel their scale and z."""
        return self.levels.scale, cast(Tensor, self.levels.zero_point)

    def bounded(self, values: Tensor) -> Tensor:
        """Numbers that 4-bit codes are taken from: numbers in units of `unit`, of groups as Q8 or within its range."""
        if self.scheme.granularity != "group":
            return values
        return intermediate_codes(values, self.intermediate, self.limit)

    def codes(self, weight: Tensor) -> Tensor:
        """Q4 of a weight [out, in], uint8, each to the nearest."""
        return quantize(self.bounded(weight / self.unit), self.levels, self.scheme)

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight that its codes stand for, of its type."""
        return dequantize(self.codes(weight), self.qparams, self.scheme, weight.dtype)


def choose_grid(
    weight: Tensor,
    scheme: QuantizationScheme,
    ratio: float | Tensor = 1.0,
    intermediate: Intermediate = "integers",
    limit: int = PROTECTIVE_RANGE,
) -> QuantizationGrid:
    """The grid of a weight [out, in], float32 or float64, each scale's range shrunk to the share `ratio`.

    Args:
        scheme: asymmetric, 4 bits, of granularity channel or group.
        ratio: a number, or in the shape of the scheme's scales.
        intermediate: of groups, what their ranges are taken from and what is rounded.
        limit: of Q8; 127 shows what the protective range is for.
    """
    if scheme.granularity != "group":
        return QuantizationGrid(weight.new_ones(()), choose_qparams(weight, scheme, ratio), scheme)
    unit = channel_scale(weight, limit)
    values = intermediate_codes(weight / unit, intermediate, limit)
    return QuantizationGrid(unit, group_levels(values, scheme, ratio), scheme, intermediate, limit)


def channel_scale(weight: Tensor, limit: int = PROTECTIVE_RANGE) -> Tensor:
    """s0 of Eq. 3, [out, 1]: max|w| / limit with a float16's precision, whose smallest numbers are no bound here."""
    largest = EIGHT_BITS.code_range[1]
    scale = choose_qparams(weight, EIGHT_BITS, largest / limit).scale
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.round(mantissa * 2**_SIGNIFICANT) / 2**_SIGNIFICANT, exponent)


def intermediate_codes(values: Tensor, intermediate: Intermediate, limit: int = PROTECTIVE_RANGE) -> Tensor:
    """Q8 of a weight in units of s0, or the real numbers themselves, within +-limit; of the type of `values`."""
    if intermediate == "integers":
        values = quantize(values, QParams(values.new_ones(())), EIGHT_BITS).to(values.dtype)
    return values.clamp(-limit, limit)  # a rounded s0 may be too small, and GPTQ moves weights beyond their range


def group_levels(values: Tensor, scheme: QuantizationScheme, ratio: float | Tensor = 1.0) -> QParams:
    """s1 >= 1 and z in 0..15 of Eq. 4, whole numbers [out, groups, 1], over ranges that include zero.

    Args:
        values: Q8, [out, in].
        scheme: asymmetric, of granularity group. ratio: share of each range.
    """
    row = EIGHT_BITS.model_copy(update={"granularity": "tensor"})
    one = values.new_ones(())
    scale = quantize(choose_qparams(values, scheme, ratio).scale, QParams(one), row).to(values.dtype).clamp(min=1)
    low = ratio * grouped(values, scheme).amin(-1, keepdim=True).clamp(max=0)
    each = scheme.model_copy(update={"granularity": "channel", "group_size": None})
    return QParams(scale, quantize(-low, QParams(scale, torch.zeros_like(scale)), each).to(values.dtype))


def dequantize_by_levels(codes: Tensor, grid: QuantizationGrid) -> tuple[Tensor, Tensor]:
    """Dequantize 4-bit codes of groups as a kernel does: the intermediate weight (Eq. 4) and the weight (Eq. 3).

    Returns:
        (Q4 - z) s1, whole numbers as int64 [out, in], and that times s0 as floating-point numbers.
    """
    scale, zero_point = grid.pair
    whole = (grouped(codes, grid.scheme).long() - zero_point.long()) * scale.long()
    whole = ungrouped(whole, codes.shape)
    return whole, whole.to(grid.unit.dtype) * grid.unit
