"""Quantized rows as kernels write them: room for codes and scales, and the structure that describes them to a kernel.

Symmetric codes by the rules of `rotquant.tensors.quantization`; rows are padded with zero codes to a multiple of 64.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, POINTER, Structure
from rotquant.kernels.launch.operators import check_same_device
from rotquant.kernels.layouts.weights import K_BLOCK, padded

#: `Codes` of kernels/include/epilogue/codes.cuh; and what kernels get that write no codes.
CODES = Structure("Codes", codes=POINTER, scale=POINTER, static_scale=POINTER, clip_ratio=FLOAT, largest=INT)
NO_CODES = CODES.read({"codes": None, "scale": None, "static_scale": None, "clip_ratio": 0.0, "largest": 0})


class Rounding(NamedTuple):
    """How rows are quantized.

    bits: 2 to 8. packed: two codes to a byte, of at most 4 bits. static_scale: float32 of one element, for all rows;
    None for a scale per row, of which `clip_ratio` is a factor.
    """

    clip_ratio: float
    bits: int
    packed: bool
    static_scale: Tensor | None

    def check(self, x: Tensor) -> None:
        """Raise one sentence unless rows x [rows, n] can be quantized so.

        Raises:
            KernelError: not two axes, bits outside 2..8 (4 for packed), or a static scale that is not one float32.
        """
        if x.dim() != 2:
            raise KernelError(f"activations come as [rows, n], not in shape {tuple(x.shape)}.")
        if not 2 <= self.bits <= 8 or (self.packed and self.bits > 4):
            raise KernelError(f"{self.bits}-bit codes cannot be {'packed as int4' if self.packed else 'held in int8'}.")
        scale = self.static_scale
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise KernelError(f"a static scale is one float32 number, not {scale.dtype} of shape {tuple(scale.shape)}.")
        check_same_device(x, **{"static scale": scale})


@dataclass(frozen=True)
class RowCodes:
    """Where a kernel writes quantized rows, and how it quantizes them.

    codes: int8 [rows, Kp], or uint8 [rows, Kp / 2] where packed; scale: float32 [rows], or [1] where static.
    """

    codes: Tensor
    scale: Tensor
    rounding: Rounding

    @classmethod
    def empty(cls, x: Tensor, rounding: Rounding, *, gated: bool = False) -> "RowCodes":
        """Room for the codes of rows x [rows, n], or (gate | up) [rows, 2 n] with `gated`, on the device of x.

        Raises:
            KernelError: as `Rounding.check`.
        """
        rounding.check(x)
        columns = padded(x.shape[1] // (2 if gated else 1), K_BLOCK)
        size, dtype = (columns // 2, torch.uint8) if rounding.packed else (columns, torch.int8)
        codes = x.new_empty((x.shape[0], size), dtype=dtype)
        scale = x.new_empty(x.shape[0] if rounding.static_scale is None else 1, dtype=torch.float32)
        return cls(codes, scale, rounding)

    @property
    def columns(self) -> int:
        """Codes in a row, padding included."""
        return self.codes.shape[1] * (2 if self.rounding.packed else 1)

    @property
    def output(self) -> str:
        """The kernels' name for what they write."""
        return "kInt4" if self.rounding.packed else "kInt8"

    @property
    def fields(self) -> dict[str, Tensor | float | None]:
        """Values of the fields of `CODES`."""
        return {
            "codes": self.codes,
            "scale": self.scale,
            "static_scale": self.rounding.static_scale,
            "clip_ratio": self.rounding.clip_ratio,
            "largest": 2 ** (self.rounding.bits - 1) - 1,
        }
