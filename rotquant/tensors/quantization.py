"""Uniform integer quantization (QuaRot Sec. 4, stage 2) as pure functions: choose, quantize, dequantize, all in one.
Codes may be floats of 8 or 4 bits in place of integers.

Every quantizer of the project, for weights, activations and the KV cache, goes through these; a `QuantizationScheme`
says how. Scales are computed in float32 (float64 for float64 input). Nothing here knows a model or packs integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors import fp4

#: How the outlier columns of an 8-bit `ColumnSplit` are quantized (Atom Sec. 4.1).
OUTLIER_SCHEME = QuantizationScheme(bits=8, symmetric=True, granularity="token")

#: The smallest scale of vLLM's rule.
_VLLM_SMALLEST = 1e-6


@dataclass(frozen=True, eq=False)
class QParams:
    """Scales and zero points of one tensor; see `choose_qparams` for their shapes. Symmetric: zero_point is None.

    Two are equal only if they are one.

    global_scale: of NVFP4, by which `scale` is divided already; a number for the tensor, or one for each row.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None

    def to(self, device: torch.device | str) -> "QParams":
        """Move the parameters to another device."""
        parts = (self.scale, self.zero_point, self.global_scale)
        return QParams(*(part if part is None else part.to(device) for part in parts))  # pyright: ignore[reportArgumentType]

    def of_rows(self, rows: slice) -> "QParams":
        """The parameters of some rows of a matrix: their own, or those of the whole tensor."""
        if not self.scale.ndim:
            return self
        return QParams(self.scale[rows], None if self.zero_point is None else self.zero_point[rows])

    def detach(self) -> "QParams":
        """Detach the parameters from the graph."""
        return QParams(self.scale.detach(), None if self.zero_point is None else self.zero_point.detach())

    @property
    def mT(self) -> "QParams":  # noqa: N802 - torch's name
        """Exchange the parameters' last two axes, for elements that lie so."""
        return QParams(self.scale.mT, None if self.zero_point is None else self.zero_point.mT)


@dataclass(frozen=True)
class ColumnSplit:
    """Input features of one linear layer in two sets: normal ones and outliers kept in higher precision (QUIK, Atom).

    permutation: int64 [features], the normal features first and the outliers last.
    outliers: how many features at the end are outliers.
    outlier_bits: 16 leaves them as floats, 8 quantizes them by `OUTLIER_SCHEME`.
    """

    permutation: Tensor
    outliers: int
    outlier_bits: Literal[8, 16] = 16

    @property
    def normal_columns(self) -> Tensor:
        """int64 [features - outliers], in the order in which groups are formed."""
        return self.permutation[: self.permutation.numel() - self.outliers]

    @property
    def outlier_columns(self) -> Tensor:
        """int64 [outliers]."""
        return self.permutation[self.permutation.numel() - self.outliers :]

    def to(self, device: torch.device | str) -> "ColumnSplit":
        """Move the split's permutation to another device."""
        return ColumnSplit(self.permutation.to(device), self.outliers, self.outlier_bits)


def check_groups(features: int, scheme: QuantizationScheme, where: str = "the last axis") -> None:
    """Raise `RecipeError` when a group of `scheme` has more elements than the rows of `features` elements."""
    size = scheme.group_size
    if size is not None and size > features:
        raise RecipeError(
            f"group size {size} exceeds the {features} features of {where}: choose {features} or fewer, or a whole row."
        )


def grouped(x: Tensor, scheme: QuantizationScheme) -> Tensor:
    """View of `x` [..., features] in which elements that share a scale lie along the last axis.

    `group` and `head`: [..., n_groups, group_size], a `head` without group_size being the whole last axis; others: `x`.
    Where the last group is shorter, the row's last element is repeated to fill it: this changes no range. `ungrouped`
    takes the repeated elements away; sums over a group must leave them out.

    Raises:
        RecipeError: when the group size exceeds the number of features.
    """
    if scheme.granularity not in ("group", "head"):
        return x
    check_groups(x.shape[-1], scheme)
    size = scheme.group_size or x.shape[-1]
    if missing := -x.shape[-1] % size:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1)
    return x.unflatten(-1, (-1, size))


def ungrouped(view: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `grouped`: the elements of a grouped view in the shape [..., features] of what was grouped."""
    if view.numel() == shape.numel():
        return view.reshape(shape)
    return view.flatten(-2)[..., : shape[-1]].contiguous()


def choose_qparams(
    x: Tensor,
    scheme: QuantizationScheme,
    clip_ratio: float | Tensor | None = None,
    global_scale: Tensor | None = None,
) -> QParams:
    """Scales (and zero points) that cover the range of `x`, shrunk by the clip ratio.

    Symmetric: scale = clip * max|x| / (2^(b-1) - 1), or / ((2^b - 1) / 2) where `scheme.scale` is full. Asymmetric: the
    range is widened to include zero, scale = clip * (max - min) / (2^b - 1), zero_point = round(-clip * min / scale).
    With an exact zero point (SpinQuant Eq. 1) the range is not widened, and -clip * min / scale not rounded. By vLLM's
    rule it is not widened either, and the zero point is a code. Scales are differentiable.

    Args:
        x: [..., features], any floating-point type.
        scheme: decides which elements share a scale.
        clip_ratio: overrides `scheme.clip_ratio`; a tensor must broadcast to the scales.
        global_scale: of NVFP4; by default each row has its own.

    Returns:
        Scales of shape [] (tensor), [..., 1] (token, channel) or [..., n_groups, 1] (group, head), float32 or float64;
        zero points, whole numbers unless exact, of the same type and shape. All-zero rows get the smallest positive
        scale.
    """
    clip = scheme.clip_ratio if clip_ratio is None else clip_ratio
    view = grouped(x, scheme)
    dtype = torch.float32 if scheme.rule == "vllm" else _arithmetic_dtype(x)
    if scheme.fp4:
        padded = -x.shape[-1] % view.shape[-1]
        scale, global_scale = fp4.choose_scales(view.to(dtype), scheme, clip, global_scale, padded)
        return QParams(scale, global_scale=global_scale)
    if scheme.granularity == "tensor":
        low, high = view.amin(), view.amax()
    else:
        low, high = view.amin(-1, keepdim=True), view.amax(-1, keepdim=True)
    low, high = low.to(dtype), high.to(dtype)
    tiny = torch.finfo(dtype).tiny
    if scheme.rule == "vllm":
        scale = ((high - low) / scheme.steps).clamp(min=_VLLM_SMALLEST)
        return QParams(scale, _half_away(-low / scale).clamp(*scheme.code_range))
    if scheme.symmetric:
        return QParams((clip * torch.maximum(high, -low) / scheme.steps).clamp(min=tiny))
    if scheme.zero_point == "exact":
        # A range of next to nothing far from zero: its zero point must stay a number that codes can be added to.
        least = torch.finfo(dtype).eps * torch.maximum(high.abs(), low.abs()).detach() + tiny
        scale = torch.maximum(clip * (high - low) / scheme.steps, least)
        return QParams(scale, -clip * low / scale)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (clip * (high - low) / scheme.steps).clamp(min=tiny)
    return QParams(scale, torch.round(-clip * low / scale))


def share_of_all_steps(scheme: QuantizationScheme) -> float:
    """Factor that turns a symmetric scale that covers a range into 2 max|x| / (2^b - 1): 7 / 7.5 for 4 bits.

    The range then takes all steps between the 2^b codes, as PrefixQuant's authors' code has it, and the largest value
    lies on the tie above the largest code. Asymmetric scales and those of `scheme.scale` full take all steps anyway: 1.
    """
    return (2**scheme.bits - 2) / (2**scheme.bits - 1) if scheme.symmetric and scheme.scale == "paper" else 1.0


def quantize(x: Tensor, qparams: QParams, scheme: QuantizationScheme) -> Tensor:
    """Integer codes round(x / scale) + zero_point, clamped to the range of the scheme; halves round to even.

    With an exact zero point they are round(x / scale + zero_point). Floats are the nearest ones to x / scale.

    Returns:
        int8 (symmetric), uint8 (asymmetric, or E2M1 as bits) or float8_e4m3fn, of the shape of `x`.
    """
    codes = ungrouped(_round_and_clamp(grouped(x, scheme), qparams, scheme), x.shape)
    if scheme.fp4:
        return fp4.encode(codes)
    return codes.to(torch.float8_e4m3fn if scheme.type == "float" else torch.int8 if scheme.symmetric else torch.uint8)


def dequantize(codes: Tensor, qparams: QParams, scheme: QuantizationScheme, dtype: torch.dtype) -> Tensor:
    """(codes - zero_point) * scale as `dtype`, of the shape of `codes`."""
    values, exact = grouped(codes, scheme), qparams.scale.dtype
    values = fp4.decode(values, exact) if scheme.fp4 else values.to(exact)
    if qparams.zero_point is not None:
        values = values - qparams.zero_point
    return ungrouped(values * _read_scale(qparams, scheme), codes.shape).to(dtype)


def fake_quantize(
    x: Tensor, scheme: QuantizationScheme, qparams: QParams | None = None, scale_gradients: bool = False
) -> Tensor:
    """`x` rounded to its codes and back: equal to `dequantize(quantize(x))` bit for bit, in one pass and of x's type.

    With gradients enabled, rounding is straight-through: the gradient reaches `x` unchanged inside the clip range, and
    is zero outside. It reaches scales through `qparams` that the caller computed, and with `scale_gradients`.

    Args:
        x: [..., features].
        scheme: bits, symmetry and granularity; its clip ratio counts only when `qparams` is None.
        qparams: parameters to use (static quantization); None chooses them from `x` (dynamic).
        scale_gradients: let the gradient reach `x` through scales chosen here too; otherwise they are constants.
    """
    if qparams is None:
        with torch.set_grad_enabled(scale_gradients and torch.is_grad_enabled()):
            qparams = choose_qparams(x, scheme)
    operands = (x, qparams.scale, qparams.zero_point)
    if scheme.rule == "vllm" and torch.is_grad_enabled() and x.requires_grad:
        return x + (fake_quantize(x.detach(), scheme) - x.detach())
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in operands):
        view = _StraightThrough.apply(grouped(x, scheme), qparams.scale, qparams.zero_point, scheme)
        return ungrouped(view, x.shape)
    with torch.no_grad():
        values = _round_and_clamp(grouped(x, scheme), qparams, scheme)
        if qparams.zero_point is not None:
            values.sub_(qparams.zero_point)
        return ungrouped(values.mul_(_read_scale(qparams, scheme)), x.shape).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Texts:
    """Which text each token belongs to: numbers below `count`, int64 of the tokens' shape.

    Tokens that fill rows up have numbers of their own.
    """

    numbers: Tensor
    count: int

    @classmethod
    def of_rows(cls, shape: Sequence[int], device: torch.device) -> "Texts":
        """Each row of tokens [batch, tokens] is a text."""
        batch, tokens = shape
        return cls(torch.arange(batch, device=device)[:, None].expand(batch, tokens), batch)

    def at(self, tokens: Tensor) -> "Texts":
        """The texts of some tokens, by their places in all rows one after another."""
        return Texts(self.numbers.flatten()[tokens], self.count)


def fake_quantize_texts(
    x: Tensor, scheme: QuantizationScheme, scale_gradients: bool = False, texts: Texts | None = None
) -> Tensor:
    """`fake_quantize` of texts with dynamic scales: of granularity `tensor`, one a text, of all its tokens in `x`.

    So a text's codes do not depend on what else is in its batch, nor on what fills its row up.

    Args:
        x: [batch, tokens, features]; with `texts` any [..., features].
        texts: of the tokens [...]; None where each row of a batch is one.
    """
    if scheme.granularity != "tensor" or (texts is None and x.ndim < 3):
        return fake_quantize(x, scheme, scale_gradients=scale_gradients)
    rows = scheme.model_copy(update={"granularity": "token"})
    if texts is None:
        return fake_quantize(x.flatten(1), rows, scale_gradients=scale_gradients).reshape(x.shape)
    with torch.set_grad_enabled(scale_gradients and torch.is_grad_enabled()):
        qparams = text_qparams(x, scheme, texts)
    return fake_quantize(x, rows, qparams)


def text_qparams(x: Tensor, scheme: QuantizationScheme, texts: Texts) -> QParams:
    """`choose_qparams` of each text's tokens in x [..., features]: [..., 1], equal for all tokens of a text."""
    numbers, ends = texts.numbers.to(x.device).flatten(), []
    for token, reduction, start in ((x.amin(-1), "amin", torch.inf), (x.amax(-1), "amax", -torch.inf)):
        of_texts = token.new_full((texts.count,), start).scatter_reduce(0, numbers, token.flatten(), reduction)
        ends.append(of_texts[numbers].reshape(token.shape))
    return choose_qparams(torch.stack(ends, -1), scheme.model_copy(update={"granularity": "token"}))


def fake_quantize_split(
    x: Tensor,
    scheme: QuantizationScheme,
    split: ColumnSplit,
    qparams: QParams | None = None,
    texts: Texts | None = None,
) -> Tensor:
    """`fake_quantize` of the normal columns of `x` [..., features]; outlier columns stay, or become 8-bit per row.

    Groups are formed among the normal columns in the order of the split. No column moves: the result lines up with `x`.
    texts: of the tokens [...], each with a scale of its own where granularity is `tensor` and no `qparams` are given.
    """
    split = split.to(x.device)
    if texts is not None and qparams is None and scheme.granularity == "tensor":
        qparams = text_qparams(_take_columns(x, split.normal_columns), scheme, texts)
    kept = x.index_select(-1, split.outlier_columns)
    if split.outlier_bits == 8:
        kept = fake_quantize(kept, OUTLIER_SCHEME)
    if scheme.granularity not in ("group", "head") and scheme.zero_point == "whole":
        # Zeros never widen such a range, so without groups the columns need not be gathered (half the time on a CPU).
        quantized = fake_quantize(x.index_fill(-1, split.outlier_columns, 0.0), scheme, qparams)
        return quantized.index_copy_(-1, split.outlier_columns, kept)
    normal = fake_quantize(_take_columns(x, split.normal_columns), scheme, qparams)
    return _take_columns(torch.cat([normal, kept], dim=-1), torch.argsort(split.permutation))


def _take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """x[..., columns]; gather is the fastest of torch's ways to say so on a CPU."""
    return x.gather(-1, columns.expand(*x.shape[:-1], -1))


def _arithmetic_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _round_and_clamp(view: Tensor, qparams: QParams, scheme: QuantizationScheme) -> Tensor:
    """Codes of a grouped view as floating-point numbers, in new memory.

    A division, not a product with the reciprocal: codes of values that lie on the grid are then exact.
    """
    smallest, largest = scheme.code_range
    if scheme.rule == "vllm":
        codes = view.to(qparams.scale.dtype) * (1 / qparams.scale) + cast(Tensor, qparams.zero_point)
        return _half_away(codes).clamp_(smallest, largest)
    codes = torch.div(view.to(qparams.scale.dtype), qparams.scale)
    if scheme.fp4:
        return fp4.round_e2m1(codes.clamp_(smallest, largest))
    if scheme.type == "float":
        return codes.clamp_(smallest, largest).to(torch.float8_e4m3fn).to(codes.dtype)
    if scheme.zero_point == "exact":
        return codes.add_(cast(Tensor, qparams.zero_point)).round_().clamp_(smallest, largest)
    codes.round_()
    if qparams.zero_point is not None:
        codes.add_(qparams.zero_point)
    return codes.clamp_(smallest, largest)


def _half_away(x: Tensor) -> Tensor:
    """The nearest whole numbers, halves away from zero, as x + 0.5 or x - 0.5 without its fraction."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


def _read_scale(qparams: QParams, scheme: QuantizationScheme) -> Tensor:
    """The scale that codes are multiplied by: vLLM's without the last 4 of its 32 bits, where the zero point is."""
    if scheme.rule == "own":
        return qparams.scale
    return (qparams.scale.view(torch.int32) & -16).view(torch.float32)


class _StraightThrough(torch.autograd.Function):
    """Fake quantization of a grouped view, rounding taken to have derivative one.

    A single node, because training spends most of its time here. With v = codes - zero_point and out = v * scale,
    d out/dx is 1 inside the range and 0 outside; d out/d scale = v - x/scale inside and v outside (LSQ, OmniQuant);
    d out/d zero_point = 0 inside and -scale outside.
    """

    @staticmethod
    def forward(
        ctx: Any,
        view: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        scheme: QuantizationScheme,
    ) -> Tensor:
        ratio = torch.div(view.to(scale.dtype), scale)
        learned = any(ctx.needs_input_grad[1:3])
        if scheme.zero_point == "exact":
            codes = torch.add(ratio, cast(Tensor, zero_point)).round_()
        else:
            codes = torch.round(ratio) if learned else ratio.round_()
            if zero_point is not None:
                codes.add_(zero_point)
        values = codes.clamp(*scheme.code_range)
        outside = values != codes
        if zero_point is not None:
            values.sub_(zero_point)
        if learned:
            slope = torch.sub(values, ratio.masked_fill_(outside, 0.0), out=ratio)
            ctx.save_for_backward(outside, slope, scale)
        else:
            ctx.save_for_backward(outside)
        return values.mul_(scale).to(view.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        outside, *learned = ctx.saved_tensors
        to_input = gradient.masked_fill(outside, 0.0)
        if not learned:
            return to_input, None, None, None
        slope, scale = learned
        to_scale = (gradient * slope).sum_to_size(scale.shape)
        to_zero_point = ((to_input - gradient) * scale).sum_to_size(scale.shape) if ctx.needs_input_grad[2] else None
        return to_input, to_scale, to_zero_point, None


def square_sum(x: Tensor) -> Tensor:
    """sum x^2 over all elements, a float64 scalar, added up in at least float32."""
    return euclidean_norm(x).double().square()


def euclidean_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of all elements, a scalar of at least float32."""
    return torch.linalg.vector_norm(x, dtype=_arithmetic_dtype(x))


def decibel(signal: Tensor, noise: Tensor) -> Tensor:
    """10 log10(signal / noise) of sums of squares, float64; inf without noise, nan where one is not a number."""
    return 10 * torch.log10(signal.double() / noise.double())
