"""The linear layer of a decoder: floats, 4-bit weights on quantized inputs (QuaRot Sec. 4) or on floats (W4A16), 2-bit
look-up tables (RCP).

A layer is two halves. Its `inputs` turn what arises before it (a residual stream, gate and up projections, attention's
output) into what it multiplies, each in one fused operation; `product` multiplies. Calling the layer on a plain tensor
does both. A tensor is never quantized twice, and no layer keeps a second copy of its weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rotquant.decoder.config import SITE_OF, DecoderConfig, InputScheme, Precision
from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.layouts.weights import padded
from rotquant.kernels.products.linear import GROUP_SIZE, PackedWeight, packed_shapes, quantized_linear
from rotquant.kernels.products.lut import LutWeight, lut_linear, spread, spread_features, table_shapes
from rotquant.kernels.products.w4a16 import HalfWeight, half_linear, half_shapes
from rotquant.kernels.rows.activations import NO_TRANSFORM, hadamard_quantize, quantize_rows, rms_norm_quantize
from rotquant.kernels.rows.elementwise import add_rms_norm, swiglu
from rotquant.recipes.transforms import at_site

#: Value of `transform` in addition to NO_TRANSFORM and a number of heads.
WHOLE_AXIS = 0


@dataclass(frozen=True)
class Quantized:
    """Integers and their scales: codes int8 [rows, K] or packed uint8 [rows, K / 2]; scale float32 [rows] or [1]."""

    codes: Tensor
    scale: Tensor


class LinearInputs(nn.Module):
    """The first half of a linear layer: its inputs after an online transform, as integers or as floats.

    scheme: how they become integers; None leaves them floats.
    transform: the online Hadamard transform before the layer: NO_TRANSFORM, WHOLE_AXIS, or a number of heads.
    half: its arithmetic is float16.
    matrix: [features, features] in place of that transform, a buffer, or None.
    static_scale: float32 [1], a buffer, where the scheme is static.
    """

    matrix: Tensor | None
    static_scale: Tensor | None

    def __init__(
        self,
        scheme: InputScheme | None = None,
        transform: int = NO_TRANSFORM,
        half: bool = False,
        matrix: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.scheme, self.transform, self.half = scheme, transform, half  # pyright: ignore[reportAttributeAccessIssue]  # hides nn.Module.half()
        self.register_buffer("matrix", matrix)
        static = scheme is not None and scheme.static
        self.register_buffer("static_scale", torch.ones(1, device=device) if static else None)

    def forward(self, x: Tensor) -> Tensor | Quantized:
        """x [rows, features], transformed and quantized."""
        x = x if self.matrix is None else x @ self.matrix
        if self.scheme is None:
            return x if self.transform == NO_TRANSFORM else hadamard(x, self.transform, False, self.half)
        if self.transform == NO_TRANSFORM:
            return Quantized(*quantize_rows(x, *self._rounding(self.scheme)))
        return Quantized(*hadamard_quantize(x, self.transform, self.half, False, *self._rounding(self.scheme)))

    def after_norm(
        self, hidden: Tensor, update: Tensor | None, gain: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor | Quantized]:
        """hidden + update [rows, hidden], and its RMS norm, transformed and quantized.

        No kernel has sum, norm and transform together: with a transform the normed row is written once, in x's type.
        """
        if self.scheme is None or self.transform != NO_TRANSFORM or self.matrix is not None:
            normed, total = add_rms_norm(hidden, update, gain, eps)
            return hidden if update is None else total, self(normed)
        codes, scale, total = rms_norm_quantize(hidden, update, gain, eps, *self._rounding(self.scheme))
        return hidden if update is None else total, Quantized(codes, scale)

    def after_sum(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | Quantized]:
        """hidden + update [rows, hidden], and the same transformed and quantized."""
        total = hidden if update is None else hidden + update
        return total, self(total)

    def after_gate(self, gate_up: Tensor) -> Tensor | Quantized:
        """silu(gate) * up of [rows, 2 * features], transformed and quantized."""
        if self.scheme is None:
            return self(swiglu(gate_up))
        return Quantized(*hadamard_quantize(gate_up, self.transform, self.half, True, *self._rounding(self.scheme)))

    def _rounding(self, scheme: InputScheme) -> tuple[float, int, bool, Tensor | None]:
        return scheme.clip_ratio, scheme.bits, scheme.packed, self.static_scale


class PackedLinear(nn.Module):
    """Inputs and a weight as its kernel reads it.

    weight: [out, in] of the decoder's type; 4 bits, for quantized inputs or for floats; or 2 bits with tables, for
        either. Few rows read tables packed, many the weight written out in 16 bits (`lut_linear`).
    bias: [out] of `dtype`, or None.
    dtype: of the outputs.
    table_group: input features that share a table. Where it is no multiple of the kernel's 128, the weight and what it
        reads are spread (`lut.spread`).

    Buffers: the weight's tensors by their names (`weight`, or `codes` and `scale` or `table`), and `bias`.
    """

    bias: Tensor | None

    def __init__(
        self,
        inputs: LinearInputs,
        weight: Tensor | PackedWeight | HalfWeight | LutWeight,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float16,
        table_group: int = GROUP_SIZE,
    ) -> None:
        super().__init__()
        self.inputs, self.dtype, self.table_group = inputs, dtype, table_group
        self.shape = tuple(weight.shape)
        self._kind: Callable[..., Any] = type(weight)
        tensors = {"weight": weight} if isinstance(weight, Tensor) else vars(weight)
        self._names = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor)]
        for name in self._names:
            self.register_buffer(name, tensors[name])
        self.register_buffer("bias", bias)

    @property
    def packed(self) -> Tensor | PackedWeight | HalfWeight | LutWeight:
        """The weight as the kernels read it."""
        tensors: list[Any] = [getattr(self, name) for name in self._names]
        return self._kind(*tensors, self.shape) if len(tensors) > 1 else tensors[0]

    def product(self, x: Tensor | Quantized) -> Tensor:
        """[rows, in], quantized or not -> [rows, out] of `dtype`."""
        weight, scale = self.packed, None
        if isinstance(x, Quantized):
            x, scale = x.codes, x.scale
        if isinstance(weight, Tensor):
            return linear(x, weight, self.bias)
        if isinstance(weight, HalfWeight):
            return half_linear(x, weight, self.bias)
        if isinstance(weight, LutWeight):  # codes are padded to whole blocks of the 4-bit kernels
            features = self.shape[1] * self.table_group // padded(self.table_group, GROUP_SIZE)
            x = spread(x[:, :features], self.table_group)
            return lut_linear(x, weight, scale, self.bias, self.dtype)
        return quantized_linear(x, cast(Tensor, scale), weight, self.bias, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed (and quantized) input [rows, in]."""
        return self.product(self.inputs(x))


def make_linear(config: DecoderConfig, precision: Precision, name: str, device: torch.device | str) -> PackedLinear:
    """The empty linear layer called `name` in `config.LINEARS`, with its inputs.

    Raises:
        KernelError: groups that do not divide the input features.
    """
    dtype, (in_features, out_features) = getattr(torch, precision.dtype), config.features(name)
    transform, half, matrix = NO_TRANSFORM, False, None
    for one in at_site(precision.transforms, SITE_OF[name]):
        if one.tensors:
            matrix = torch.empty(in_features, in_features, dtype=dtype, device=device)
        else:
            transform = config.heads if one.location == "across_heads" else WHOLE_AXIS
        half = one.dtype == "float16"
    inputs = LinearInputs(precision.inputs, transform, half, matrix, device)
    bias = torch.empty(out_features, dtype=dtype, device=device) if name in config.biases else None
    table_group = precision.table_group or in_features
    weight = empty_weight(precision, in_features, out_features, device)
    return PackedLinear(inputs, weight, bias, dtype, table_group)


def empty_weight(
    precision: Precision, in_features: int, out_features: int, device: torch.device | str = "cpu"
) -> Tensor | PackedWeight | HalfWeight | LutWeight:
    """Room for a weight [out, in] in a precision.

    Raises:
        KernelError: groups that do not divide the input features.
    """
    shape, grouped = (out_features, in_features), precision.weights == "int4-grouped"
    if precision.weights == "float":
        return torch.empty(shape, dtype=getattr(torch, precision.dtype), device=device)
    if precision.weights == "lut2":
        group = precision.table_group or in_features
        if in_features % group:
            raise KernelError(f"look-up tables of {group} weights do not divide {in_features} input features.")
        shape = (out_features, spread_features(in_features, group))
        kind, dtype, (codes, scales) = LutWeight, torch.float16, table_shapes(*shape)
    elif precision.inputs is None:
        kind, dtype, (codes, scales) = HalfWeight, torch.float32, half_shapes(*shape, grouped)
    else:
        kind, dtype, (codes, scales) = PackedWeight, torch.float32, packed_shapes(*shape, grouped)
    return kind(
        torch.empty(codes, dtype=torch.uint8, device=device), torch.empty(scales, dtype=dtype, device=device), shape
    )
