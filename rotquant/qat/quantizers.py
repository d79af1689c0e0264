"""Trainable quantizers of linear layers' weights (RCP, Choi et al. 2025, Sec. 4; BitDistiller, Du et al. 2024).

One for each weight: `forward` is what training runs, differentiable by the weight and by its own parameters, and
`freeze` what is stored, with the same values bit for bit. The mathematics is that of `rotquant.tensors`.
"""

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.kernels.rows.partition import Kind, fake_quantize_groups, has_kernel
from rotquant.qat.start import Clips
from rotquant.tensors.codebook import CodebookWeight, LevelTable
from rotquant.tensors.normal_float import float_centre, float_range, float_table, normal_float_asymmetric
from rotquant.tensors.partition import Spacing, StraightThrough, ldp, ldp_table
from rotquant.tensors.value_range import ValueRange, clipped_range, dynamic_range, uniform, uniform_codes

#: Shares beyond these have logits whose sigmoid hardly moves: a clip of 1.0 starts at the upper one.
SMALLEST_SHARE, LARGEST_SHARE = 0.01, 0.99


class TrainableQuantizer(nn.Module):
    """Fake quantization of one weight [out, in], in groups of input features.

    Parameters of subclasses are float32 [out, groups, 1]. Arithmetic is in float32, or float64 for float64 weights. On
    a GPU the kernels of `kernels.rows.partition` compute the same, of types and group sizes that they have.
    """

    #: Bits of a code that it can give.
    widths: tuple[int, ...]
    kind: Kind
    straight_through: StraightThrough = "step"

    def __init__(self, group_size: int, bits: int) -> None:
        super().__init__()
        if bits not in self.widths:
            known = " or ".join(map(str, self.widths))
            raise RecipeError(f"this quantizer of weights takes {known} bits, not {bits}.")
        self.group_size = group_size
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        """The weight [out, in] as its codes stand for it, of its type; gradients are straight-through."""
        if weight.is_cuda and has_kernel(weight.dtype, self.group_size):
            parameters = (getattr(self, name, None) for name in ("gamma", "beta", "s1", "s2"))
            options = self.group_size, self.bits, self.kind, self.straight_through
            return fake_quantize_groups(weight.contiguous(), *parameters, *options)
        return self.quantized(self.view(weight)).flatten(1)

    @torch.no_grad()
    def freeze(self, weight: Tensor) -> CodebookWeight:
        """Return the quantized weight as codes and levels: `freeze(w).dequantize(w.dtype)` equals `forward(w)` bit for
        bit."""
        codes, levels = self.codes(self.view(weight))
        return CodebookWeight(codes.flatten(1), levels)

    def view(self, weight: Tensor) -> Tensor:
        """The weight [out, in] in groups, [out, groups, size]."""
        return weight.unflatten(1, (-1, self.group_size))

    def quantized(self, view: Tensor) -> Tensor:
        """`forward` on groups."""
        raise NotImplementedError

    def codes(self, view: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 of the view's shape, and levels [out, groups, 2^bits]."""
        raise NotImplementedError


class DynamicRange(TrainableQuantizer):
    """Uniform over the range of the weight as it is (RCP Eq. 1): BitDistiller's for 2 bits. It has no parameters."""

    widths = (2, 3)
    kind = "range"

    def value_range(self, view: Tensor) -> ValueRange:
        """The range of every group."""
        return dynamic_range(view)

    def quantized(self, view: Tensor) -> Tensor:
        return uniform(view, self.value_range(view), self.bits)

    def codes(self, view: Tensor) -> tuple[Tensor, Tensor]:
        return uniform_codes(view, self.value_range(view), self.bits)


class LearnedRange(DynamicRange):
    """Uniform over a learned share of the range, sigma(gamma) of its maximum and sigma(beta) of its minimum (Eq. 5)."""

    kind = "learned_range"

    def __init__(self, group_size: int, bits: int, clips: Clips) -> None:
        super().__init__(group_size, bits)
        self.gamma, self.beta = _parameter(clips.high), _parameter(clips.low)

    def value_range(self, view: Tensor) -> ValueRange:
        return clipped_range(view, self.gamma, self.beta)


class Partitioned(TrainableQuantizer):
    """Learnable direct partitioning of a learned range (Eqs. 5-11), or with uniform levels N2UQ's; starts uniform."""

    widths = (2,)

    def __init__(
        self, group_size: int, bits: int, clips: Clips, straight_through: StraightThrough, spacing: Spacing
    ) -> None:
        super().__init__(group_size, bits)
        self.gamma, self.beta = _parameter(clips.high), _parameter(clips.low)
        self.s1 = _parameter(torch.full_like(clips.low, 1 / 3))
        self.s2 = _parameter(torch.full_like(clips.low, 1 / 2))
        self.straight_through = straight_through
        self.spacing: Spacing = spacing
        self.kind = "ldp" if spacing == "partition" else "n2uq"

    def quantized(self, view: Tensor) -> Tensor:
        return ldp(view, self.gamma, self.beta, self.s1, self.s2, self.straight_through, self.spacing)

    def codes(self, view: Tensor) -> tuple[Tensor, Tensor]:
        return _encoded(ldp_table(clipped_range(view, self.gamma, self.beta), self.s1, self.s2, self.spacing), view)


class DynamicFloat(TrainableQuantizer):
    """NormalFloat with the scales of either side of zero (AFPQ): BitDistiller's for 3 bits. It has no parameters."""

    widths = (3,)
    kind = "nf3"

    def sides(self, view: Tensor) -> tuple[ValueRange, Tensor]:
        """The range of every group, and its centre."""
        value_range = float_range(view)
        return value_range, torch.zeros_like(value_range.low)

    def quantized(self, view: Tensor) -> Tensor:
        return normal_float_asymmetric(view, *self.sides(view), self.bits)

    def codes(self, view: Tensor) -> tuple[Tensor, Tensor]:
        return _encoded(float_table(*self.sides(view), self.bits), view)


class LearnedFloat(DynamicFloat):
    """NormalFloat of a learned range about a learned centre (RCP Sec. 4.3, Eqs. 12-13).

    The paper does not say where the centre starts: here at zero, where AFPQ has it.
    """

    kind = "nf3_ldp"

    def __init__(self, group_size: int, bits: int, weight: Tensor, clips: Clips) -> None:
        super().__init__(group_size, bits)
        self.gamma, self.beta = _parameter(clips.high), _parameter(clips.low)
        with torch.no_grad():
            value_range = clipped_range(self.view(weight), self.gamma, self.beta)
            self.s1 = _parameter(-value_range.low / value_range.span)

    def sides(self, view: Tensor) -> tuple[ValueRange, Tensor]:
        value_range = clipped_range(view, self.gamma, self.beta)
        return value_range, float_centre(value_range, self.s1)


def make_quantizer(
    kind: Kind,
    weight: Tensor,
    group_size: int,
    bits: int,
    clips: Clips | None = None,
    straight_through: StraightThrough = "step",
) -> TrainableQuantizer:
    """The quantizer of a weight, on its device.

    Args:
        kind: `range`, uniform over the dynamic range; `learned_range`, uniform over a learned one (LWC); `ldp`,
            partitioned; `n2uq`, with learned thresholds and uniform levels; `nf3`, NormalFloat over the dynamic range;
            `nf3_ldp`, about a learned centre.
        weight: [out, in]; what is learned starts from it.
        clips: which shares of the range those start with that learn it; None keeps all of it, and the other kinds
            take none: their weights themselves are clipped (`qat.start.clip_weight`).
        straight_through: of `ldp` and `n2uq`, see `tensors.partition.ldp`.

    Raises:
        RecipeError: the group size does not divide the weight's columns, or the kind has no such number of bits.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise RecipeError(f"group size {group_size} does not divide the {columns} columns of a weight.")
    shape = (rows, columns // group_size, 1)
    if clips is None:
        clips = Clips(*(torch.ones(shape, device=weight.device) for _ in range(2)))
    match kind:
        case "range":
            return DynamicRange(group_size, bits)
        case "learned_range":
            return LearnedRange(group_size, bits, clips)
        case "ldp":
            return Partitioned(group_size, bits, clips, straight_through, "partition")
        case "n2uq":
            return Partitioned(group_size, bits, clips, straight_through, "uniform")
        case "nf3":
            return DynamicFloat(group_size, bits)
        case "nf3_ldp":
            return LearnedFloat(group_size, bits, weight, clips)


def _encoded(table: LevelTable, view: Tensor) -> tuple[Tensor, Tensor]:
    return table.encode(view), table.levels


def _parameter(share: Tensor) -> nn.Parameter:
    """The logit of a share, float32."""
    return nn.Parameter(torch.logit(share.float().clamp(SMALLEST_SHARE, LARGEST_SHARE)))
