"""Quantized rows as kernels write them: room for codes and scales, and the structure that tells a kernel about them.

Symmetric codes by the rules of `rotquant.tensors.quantization`; rows are padded with zero codes to a multiple of 64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, POINTER, Structure
from rotquant.kernels.launch.operators import check_same_device
from rotquant.kernels.layouts.weights import K_BLOCK, padded

#: `Codes` of kernels/include/quantize.cuh; and what kernels get that write no codes.
CODES = Structure("Codes", codes=POINTER, scale=POINTER, static_scale=POINTER, clip_ratio=FLOAT, largest=INT)
NO_CODES = CODES.read({"codes": None, "scale": None, "static_scale": None, "clip_ratio": 0.0, "largest": 0})


@dataclass(frozen=True)
class RowCodes:
    """Where a kernel writes quantized rows, and how it quantizes them.

    codes: int8 [rows, Kp], or uint8 [rows, Kp / 2] with `packed`; scale: float32 [rows], or [1] where static.
    """

    codes: Tensor
    scale: Tensor
    clip_ratio: float
    bits: int
    packed: bool
    static_scale: Tensor | None

    @classmethod
    def empty(
        cls, x: Tensor, n: int, clip_ratio: float, bits: int, packed: bool, static_scale: Tensor | None
    ) -> "RowCodes":
        """Room for the codes of x's rows of n values, on the device of x."""
        columns, dtype = padded(n, K_BLOCK), torch.uint8 if packed else torch.int8
        codes = x.new_empty((x.shape[0], columns // 2 if packed else columns), dtype=dtype)
        scale = x.new_empty(x.shape[0] if static_scale is None else 1, dtype=torch.float32)
        return cls(codes, scale, clip_ratio, bits, packed, static_scale)

    @property
    def columns(self) -> int:
        """Codes in a row, padding included."""
        return self.codes.shape[1] * (2 if self.packed else 1)

    @property
    def output(self) -> str:
        """The kernels' name for what they write."""
        return "kInt4" if self.packed else "kInt8"

    @property
    def fields(self) -> dict[str, Tensor | float | None]:
        """Those of `CODES`."""
        return {
            "codes": self.codes,
            "scale": self.scale,
            "static_scale": self.static_scale,
            "clip_ratio": self.clip_ratio,
            "largest": 2 ** (self.bits - 1) - 1,
        }


def check_codes(x: Tensor, bits: int, packed: bool, static_scale: Tensor | None) -> None:
    """Raise one sentence unless rows x [rows, n] can be quantized so.

    Raises:
        KernelError: not two axes, bits outside 2..8 (4 for packed), or a static scale that is not one float32.
    """
    if x.dim() != 2:
        raise KernelError(f"activations come as [rows, n], not in shape {tuple(x.shape)}.")
    if not 2 <= bits <= 8 or (packed and bits > 4):
        raise KernelError(f"{bits}-bit codes cannot be {'packed as int4' if packed else 'held in int8'}.")
    if static_scale is not None and (static_scale.numel() != 1 or static_scale.dtype != torch.float32):
        raise KernelError(
            f"a static scale is one float32 number, not {static_scale.dtype} of shape {tuple(static_scale.shape)}."
        )
    check_same_device(x, **{"static scale": static_scale})
