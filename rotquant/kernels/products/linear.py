"""Linear layers on 4-bit weights: integers in, exact int32 sums, scales applied once, 16-bit floats out.

y[m, n] = (sum_k a[m, k] w[n, k]) * row_scale[m] * column_scale[n] + bias[n], QuaRot Sec. 4 (stage 2a), App. A.10. Few
rows go to the kernel that streams weights (`gemv`), many to the tensor-core product (`gemm`); both read one layout, so
a layer keeps a single copy of its weight for prefill and decode.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch.loading import architecture_of_device
from rotquant.kernels.launch.operators import check_same_device, check_tensor, operator
from rotquant.kernels.layouts.weights import K_BLOCK, STRIP, pack_weight, padded, unpack_rows, unpack_weight
from rotquant.kernels.products import gemm, gemv
from rotquant.kernels.products.output import check_output

#: Scales per group of this many input features, where they are not per output feature alone.
GROUP_SIZE = 128


def packed_shapes(out_features: int, in_features: int, grouped: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scale of a `PackedWeight`.

    Raises:
        KernelError: groups that do not divide the input features.
    """
    if grouped and in_features % GROUP_SIZE:
        raise KernelError(f"groups of {GROUP_SIZE} weights do not divide {in_features} input features.")
    codes = padded(out_features, STRIP) // STRIP, padded(in_features, K_BLOCK) // K_BLOCK, 32, 16
    return codes, (out_features, in_features // GROUP_SIZE) if grouped else (out_features,)


@dataclass(frozen=True)
class PackedWeight:
    """A 4-bit weight as the kernels read it.

    codes: uint8 [strips, k_blocks, 32, 16], see `layouts.pack_weight`.
    scale: float32 [out], or [out, in / 128] with groups.
    shape: (out, in).
    """

    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor) -> "PackedWeight":
        """Pack int8 codes -8..7 [out, in] and scales [out], [out, 1] or [out, in / 128].

        Raises:
            KernelError: scales of another shape, or codes that are not int8.
        """
        rows, columns = codes.shape
        if codes.dtype != torch.int8:
            raise KernelError(f"weight codes are {codes.dtype}, and packing takes int8.")
        if scale.numel() == rows:
            scale = scale.reshape(rows)
        elif columns % GROUP_SIZE or scale.shape != (rows, columns // GROUP_SIZE):
            raise KernelError(
                f"weight scales have shape {tuple(scale.shape)}; codes of shape {(rows, columns)} take ({rows},)"
                f" or one scale for each {GROUP_SIZE} inputs."
            )
        return cls(pack_weight(codes), scale.float().contiguous(), (rows, columns))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] as floating-point numbers."""
        codes = unpack_weight(self.codes, *self.shape).float()
        if self.scale.dim() == 1:
            return (codes * self.scale[:, None]).to(dtype)
        return (codes.unflatten(1, (-1, GROUP_SIZE)) * self.scale[..., None]).flatten(1).to(dtype)


def quantized_linear(
    codes: Tensor,
    row_scale: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Multiply quantized activations with a 4-bit weight.

    Args:
        codes: [rows, K] int8 (4-bit or 8-bit values), or [rows, K / 2] uint8 (4-bit, in the order of
            `layouts.pack_rows`); K is the input features padded with zeros to a multiple of 64.
        row_scale: float32 [rows], or [1] for a static scale.
        bias: [out] of `dtype`.

    Returns:
        [rows, out] of `dtype` (float16, bfloat16 or float32).

    Raises:
        KernelError: a tensor of another dtype, shape or device, or not contiguous.
    """
    return w4_linear(codes, row_scale, weight.codes, weight.scale, bias, weight.shape[0], dtype)


class W4Linear(NamedTuple):
    """Arguments of `w4_linear`: see `quantized_linear`; weight and column_scale are those of a `PackedWeight`."""

    codes: Tensor
    row_scale: Tensor
    weight: Tensor
    column_scale: Tensor
    bias: Tensor | None
    out_features: int
    dtype: torch.dtype


def _reference(a: W4Linear) -> Tensor:
    """The definition. Sums are exact in float64; scaling is float32, row scale first, each product rounded.

    Scaling follows the row scale's type: float64 scales, which only this reference takes, show what a decoder computes
    when nothing is rounded.
    """
    codes = unpack_rows(a.codes) if a.codes.dtype == torch.uint8 else a.codes
    integers = unpack_weight(a.weight, a.out_features, codes.shape[1]).double()
    if a.column_scale.dim() == 1:
        y = (codes.double() @ integers.T).to(a.row_scale.dtype) * a.row_scale[:, None] * a.column_scale
    else:
        groups = a.column_scale.shape[1]
        x = codes[:, : groups * GROUP_SIZE].double().unflatten(1, (groups, GROUP_SIZE))
        w = integers[:, : groups * GROUP_SIZE].unflatten(1, (groups, GROUP_SIZE))
        sums = torch.einsum("mgk,ngk->gmn", x, w)
        y = (sums * a.column_scale.double().T[:, None]).sum(0).to(a.row_scale.dtype) * a.row_scale[:, None]
    return (y if a.bias is None else y + a.bias.to(y.dtype)).to(a.dtype)


def _cuda(a: W4Linear) -> Tensor:
    rows = a.codes.shape[0]
    check_tensor(a.codes, "activation codes", dtypes=(torch.int8, torch.uint8), shape=(None, None))
    inner = a.codes.shape[1] * (2 if a.codes.dtype == torch.uint8 else 1)
    if inner % K_BLOCK:
        raise KernelError(f"activation codes have {inner} columns; pad them with zeros to a multiple of {K_BLOCK}.")
    strips = padded(a.out_features, STRIP) // STRIP
    check_tensor(a.weight, "packed weight", dtypes=(torch.uint8,), shape=(strips, inner // K_BLOCK, 32, 16))
    groups = (None,) if a.column_scale.dim() == 2 else ()
    check_tensor(a.column_scale, "column scale", dtypes=(torch.float32,), shape=(a.out_features, *groups))
    if a.column_scale.dim() == 2 and padded(a.column_scale.shape[1] * GROUP_SIZE, K_BLOCK) != inner:
        raise KernelError(
            f"column scale has {a.column_scale.shape[1]} groups of {GROUP_SIZE} for {inner} input features."
        )
    check_output(rows, a.out_features, a.dtype, a.row_scale, a.bias)
    check_same_device(a.codes, weight=a.weight, row_scale=a.row_scale, column_scale=a.column_scale, bias=a.bias)
    y = torch.empty(rows, a.out_features, dtype=a.dtype, device=a.codes.device)
    if y.numel():
        few = gemv.is_preferred(rows, strips, architecture_of_device(y.device))
        run = gemv.launch_gemv if few else gemm.launch_gemm
        run(a.codes, a.row_scale, a.weight, a.column_scale, a.bias, y)
    return y


w4_linear = operator(
    "w4_linear",
    reference=_reference,
    cuda=_cuda,
    fake=lambda a: a.codes.new_empty(a.codes.shape[0], a.out_features, dtype=a.dtype),
)
