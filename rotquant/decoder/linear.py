"""Linear layers of a decoder: floats, 4-bit weights on quantized inputs (QuaRot Sec. 4) or on floats (W4A16), 2-bit
look-up tables (RCP).

A layer is two halves. Its `inputs` turn what arises before it (a residual stream, gate and up projections, attention's
output) into what it multiplies, each in one fused operation; `product` multiplies. Calling the layer on a plain tensor
does both. A tensor is never quantized twice, and no layer keeps a second copy of its weight.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rotquant.decoder.config import SITE_OF, DecoderConfig, InputScheme, Precision
from rotquant.foundation.errors import KernelError
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.products.linear import GROUP_SIZE, PackedWeight, codes_shape, quantized_linear
from rotquant.kernels.products.lut import LutWeight, lut_linear, packed_shapes, spread, spread_features
from rotquant.kernels.products.w4a16 import HalfWeight, half_linear, half_shapes
from rotquant.kernels.rows.activations import NO_TRANSFORM, hadamard_quantize, quantize_rows, rms_norm_quantize
from rotquant.kernels.rows.elementwise import add_rms_norm, swiglu
from rotquant.recipes.transforms import at_site

if TYPE_CHECKING:

    class Inputs(Protocol):
        """The first half of a linear layer; what it gives, the second half takes."""

        def after_norm(
            self, hidden: Tensor, update: Tensor | None, gain: Tensor | None, eps: float
        ) -> tuple[Tensor, Any]: ...

        def after_sum(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Any]: ...

        def after_gate(self, gate_up: Tensor) -> Any: ...

        def __call__(self, x: Tensor, /) -> Any: ...

    class Linear(Protocol):
        """A linear layer as `DecoderLayer` runs it."""

        @property
        def inputs(self) -> Inputs: ...

        def product(self, x: Any) -> Tensor: ...

        def __call__(self, x: Tensor, /) -> Tensor: ...


#: Value of `transform` in addition to NO_TRANSFORM and a number of heads.
WHOLE_AXIS = 0


@dataclass(frozen=True)
class Quantized:
    """Integers and their scales: codes int8 [rows, K] or packed uint8 [rows, K / 2]; scale float32 [rows] or [1]."""

    codes: Tensor
    scale: Tensor


class FloatInputs(nn.Module):
    """Inputs that stay floating-point numbers.

    transform: the online Hadamard transform before the layer: NO_TRANSFORM, WHOLE_AXIS, or a number of heads.
    half: its arithmetic is float16.
    matrix: [features, features] in place of that transform, a buffer, or None.
    """

    matrix: Tensor | None

    def __init__(self, transform: int = NO_TRANSFORM, half: bool = False, matrix: Tensor | None = None) -> None:
        super().__init__()
        self.transform, self.half = transform, half  # pyright: ignore[reportAttributeAccessIssue]  # hides nn.Module.half()
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, features], transformed."""
        x = x if self.matrix is None else x @ self.matrix
        return x if self.transform == NO_TRANSFORM else hadamard(x, self.transform, False, self.half)

    def after_sum(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden + update [rows, hidden], and the same transformed."""
        total = hidden if update is None else hidden + update
        return total, self(total)

    def after_norm(
        self, hidden: Tensor, update: Tensor | None, gain: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """hidden + update [rows, hidden], and its RMS norm."""
        normed, total = add_rms_norm(hidden, update, gain, eps)
        return hidden if update is None else total, self(normed)

    def after_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [rows, 2 * features]."""
        return self(swiglu(gate_up))


class QuantizedInputs(nn.Module):
    """Inputs that become integers, after an online Hadamard transform if there is one.

    transform, half, matrix: as in `FloatInputs`.
    static_scale: float32 [1], a buffer, where the scheme is static.
    """

    matrix: Tensor | None
    static_scale: Tensor | None

    def __init__(
        self,
        scheme: InputScheme,
        transform: int = NO_TRANSFORM,
        half: bool = False,
        matrix: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.scheme, self.transform, self.half = scheme, transform, half  # pyright: ignore[reportAttributeAccessIssue]  # hides nn.Module.half()
        self.register_buffer("static_scale", torch.ones(1, device=device) if scheme.static else None)

    @property
    def _how(self) -> tuple[float, int, bool, Tensor | None]:
        return self.scheme.clip_ratio, self.scheme.bits, self.scheme.packed, self.static_scale

    def forward(self, x: Tensor) -> Quantized:
        """x [rows, features], transformed and quantized."""
        x = x if self.matrix is None else x @ self.matrix
        if self.transform == NO_TRANSFORM:
            return Quantized(*quantize_rows(x, *self._how))
        return Quantized(*hadamard_quantize(x, self.transform, self.half, False, *self._how))

    def after_norm(
        self, hidden: Tensor, update: Tensor | None, gain: Tensor | None, eps: float
    ) -> tuple[Tensor, Quantized]:
        """hidden + update [rows, hidden], and its RMS norm, transformed and quantized.

        No kernel has norm and transform together: with a transform the normed row is written once, in the type of x.
        """
        if self.transform != NO_TRANSFORM or self.matrix is not None:
            normed, total = add_rms_norm(hidden, update, gain, eps)
            return hidden if update is None else total, self(normed)
        codes, scale, total = rms_norm_quantize(hidden, update, gain, eps, *self._how)
        return hidden if update is None else total, Quantized(codes, scale)

    def after_sum(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Quantized]:
        """hidden + update [rows, hidden], and the same transformed and quantized."""
        total = hidden if update is None else hidden + update
        return total, self(total)

    def after_gate(self, gate_up: Tensor) -> Quantized:
        """silu(gate) * up of [rows, 2 * features], transformed and quantized."""
        return Quantized(*hadamard_quantize(gate_up, self.transform, self.half, True, *self._how))


class FloatLinear(nn.Module):
    """A linear layer as it is: weight [out, in] of the decoder's type."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        inputs: FloatInputs,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed input."""
        return self.product(self.inputs(x))


class QuantizedLinear(nn.Module):
    """A linear layer of 4-bit weights and quantized inputs: exact integer sums, scaled once.

    Buffers: codes and scale as in `PackedWeight`, bias [out] of `dtype` or None.

    Raises:
        KernelError: groups that do not divide the input features.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        inputs: QuantizedInputs,
        *,
        bias: bool,
        dtype: torch.dtype,
        grouped: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        codes = codes_shape(out_features, in_features, grouped)
        self.inputs, self.shape, self.dtype = inputs, (out_features, in_features), dtype
        groups = (in_features // GROUP_SIZE,) if grouped else ()
        self.register_buffer("codes", torch.empty(codes, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.empty(out_features, *groups, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @property
    def weight(self) -> PackedWeight:
        """The weight as the kernels read it."""
        return PackedWeight(self.codes, self.scale, self.shape)

    def product(self, x: Quantized) -> Tensor:
        """Quantized [rows, in] -> [rows, out] of `dtype`."""
        return quantized_linear(x.codes, x.scale, self.weight, self.bias, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed and quantized input [rows, in]."""
        return self.product(self.inputs(x))


class HalfLinear(nn.Module):
    """A linear layer of 4-bit weights and inputs that stay floats (W4A16).

    grouped: scales for groups of 128 input features; otherwise one for each output feature.

    Buffers: codes and scale as in `HalfWeight`, bias [out] of `dtype` or None.

    Raises:
        KernelError: groups that do not divide the input features.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        inputs: FloatInputs,
        *,
        bias: bool,
        dtype: torch.dtype,
        grouped: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.inputs, self.shape = inputs, (out_features, in_features)
        codes, scale = half_shapes(out_features, in_features, grouped)
        self.register_buffer("codes", torch.empty(codes, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.empty(scale, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @property
    def weight(self) -> HalfWeight:
        """The weight as the kernel reads it."""
        return HalfWeight(self.codes, self.scale, self.shape)

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return half_linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed input."""
        return self.product(self.inputs(x))


class LutLinear(nn.Module):
    """A linear layer of 2-bit codes into tables of four levels (RCP Sec. 4.4), inputs quantized or not.

    Few rows read the packed weight, many the weight written out in 16 bits (`lut_linear`).

    group_size: input features that share a table; where it is no multiple of the kernel's 128, weight and inputs are
        spread (`lut.spread`).

    Buffers: codes and table as in `LutWeight`, bias [out] of `dtype` or None.

    Raises:
        KernelError: groups that do not divide the input features.
    """

    codes: Tensor
    table: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        inputs: FloatInputs | QuantizedInputs,
        *,
        bias: bool,
        dtype: torch.dtype,
        group_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if in_features % group_size:
            raise KernelError(f"look-up tables of {group_size} weights do not divide {in_features} input features.")
        self.inputs, self.dtype, self.in_features, self.group_size = inputs, dtype, in_features, group_size
        self.shape = (out_features, spread_features(in_features, group_size))
        codes, table = packed_shapes(*self.shape)
        self.register_buffer("codes", torch.empty(codes, dtype=torch.uint8, device=device))
        self.register_buffer("table", torch.empty(table, dtype=torch.float16, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @property
    def weight(self) -> LutWeight:
        """The weight as the kernel reads it, spread."""
        return LutWeight(self.codes, self.table, self.shape)

    def product(self, x: Tensor | Quantized) -> Tensor:
        """[rows, in], quantized or not -> [rows, out] of `dtype`."""
        values, scale = (x.codes, x.scale) if isinstance(x, Quantized) else (x, None)
        # Codes are padded to whole blocks of the 4-bit kernels.
        values = spread(values[:, : self.in_features], self.group_size)
        return lut_linear(values, self.weight, scale, self.bias, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed (and quantized) input [rows, in]."""
        return self.product(self.inputs(x))


def make_linear(config: DecoderConfig, precision: Precision, name: str, device: torch.device | str) -> "Linear":
    """The empty linear layer called `name` in `config.LINEARS`, with its inputs."""
    dtype, features = getattr(torch, precision.dtype), config.features(name)
    transform, half, matrix = NO_TRANSFORM, False, None
    for one in at_site(precision.transforms, SITE_OF[name]):
        if one.tensors:
            matrix = torch.empty(features[0], features[0], dtype=dtype, device=device)
        else:
            transform = config.heads if one.location == "across_heads" else WHOLE_AXIS
        half = one.dtype == "float16"
    inputs: FloatInputs | QuantizedInputs
    if precision.inputs is not None:
        inputs = QuantizedInputs(precision.inputs, transform, half, matrix, device)
    else:
        inputs = FloatInputs(transform, half, matrix)
    common = {
        "inputs": inputs,
        "bias": name in config.biases,
        "dtype": dtype,
        "device": device,
    }
    if precision.weights == "float":
        return FloatLinear(*features, **common)
    if precision.weights == "lut2":
        inputs_of_table = precision.table_group or features[0]
        return LutLinear(*features, group_size=inputs_of_table, **common)
    kind = HalfLinear if precision.inputs is None else QuantizedLinear
    return kind(*features, grouped=precision.weights == "int4-grouped", **common)
