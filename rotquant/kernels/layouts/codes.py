"""Quantized rows as kernels write them: room for codes and scales, and the structure that describes them to a kernel.

Symmetric codes by the rules of `rotquant.tensors.quantization` and `fp4`; rows are padded with zero codes to a multiple
of 64.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.arguments import FLOAT, INT, POINTER, Structure
from rotquant.kernels.launch.operators import check_same_device
from rotquant.kernels.layouts.weights import K_BLOCK, padded
from rotquant.recipes.schemes import LARGEST_E2M1, LARGEST_E4M3, QuantizationScheme

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


class FloatRounding(NamedTuple):
    """How rows become floats of 8 or 4 bits.

    format: FP8, numbers of E4M3 with a float32 scale for each row; MXFP4, numbers of E2M1 in groups of 32 whose scales
    are powers of two; NVFP4, the same in groups of 16 with scales of E4M3. clip_ratio is a factor of every scale.
    global_scale: of NVFP4 alone, g as `fp4.global_scale` finds it, float32 of one element.
    """

    clip_ratio: float
    format: Literal["FP8", "MXFP4", "NVFP4"]
    global_scale: Tensor | None

    @property
    def scheme(self) -> QuantizationScheme:
        """The library's scheme, a whole row or a group to a scale."""
        if self.format == "FP8":
            return QuantizationScheme(bits=8, type="float", granularity="token", clip_ratio=self.clip_ratio)
        size = _GROUPS[self.format]
        return QuantizationScheme(
            bits=4, type="float", granularity="group", group_size=size, clip_ratio=self.clip_ratio
        )

    def check(self, x: Tensor) -> None:
        """Raise one sentence unless rows x [rows, n] can become such floats.

        Raises:
            KernelError: not two axes, an unknown format, or a scale of all values where there is none, or none where
                there is one.
        """
        if x.dim() != 2:
            raise KernelError(f"activations come as [rows, n], not in shape {tuple(x.shape)}.")
        if self.format not in _OUTPUTS:
            raise KernelError(f"floats of low bits are {', '.join(_OUTPUTS)}, not {self.format!r}.")
        scale = self.global_scale
        if (scale is not None) != (self.format == "NVFP4"):
            raise KernelError("NVFP4 takes a scale of the whole tensor, and no other format does.")
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise KernelError(f"a global scale is one float32 number, not {scale.dtype} of shape {tuple(scale.shape)}.")
        check_same_device(x, **{"global scale": scale})


def pack_pairs(codes: Tensor) -> Tensor:
    """uint8 codes of 4 bits [..., K], K even -> uint8 [..., K / 2], the earlier of two in the low half of a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_pairs(packed: Tensor) -> Tensor:
    """The inverse of `pack_pairs`: uint8 [..., K / 2] -> uint8 [..., K]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


#: Values that share a scale within a row; and the kernels' names for what they write.
_GROUPS = {"MXFP4": 32, "NVFP4": 16}
_OUTPUTS = {"FP8": "kFp8", "MXFP4": "kMxfp4", "NVFP4": "kNvfp4"}


@dataclass(frozen=True)
class RowFloats:
    """Where a kernel writes rows of floats, and how it quantizes them.

    codes: float8_e4m3fn [rows, Kp], or of 4 bits uint8 [rows, Kp / 2], two to a byte, the earlier in the low half.
    scale: float32 [rows]; of MXFP4 exponents + 127, uint8 [rows, Kp / 32]; of NVFP4 float8_e4m3fn [rows, Kp / 16], by
    which, divided by g, codes are multiplied. Groups of a row follow one another, and those of padding are there.
    """

    codes: Tensor
    scale: Tensor
    rounding: FloatRounding

    @classmethod
    def empty(cls, x: Tensor, rounding: FloatRounding, *, gated: bool = False) -> "RowFloats":
        """Room for the codes of rows x, as `RowCodes.empty`.

        Raises:
            KernelError: as `FloatRounding.check`.
        """
        rounding.check(x)
        rows, columns = x.shape[0], padded(x.shape[1] // (2 if gated else 1), K_BLOCK)
        if rounding.format == "FP8":
            codes = x.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
            return cls(codes, x.new_empty(rows, dtype=torch.float32), rounding)
        dtype = torch.uint8 if rounding.format == "MXFP4" else torch.float8_e4m3fn
        scale = x.new_empty((rows, columns // _GROUPS[rounding.format]), dtype=dtype)
        return cls(x.new_empty((rows, columns // 2), dtype=torch.uint8), scale, rounding)

    @property
    def columns(self) -> int:
        """Codes in a row, padding included."""
        return self.codes.shape[1] * (1 if self.rounding.format == "FP8" else 2)

    @property
    def output(self) -> str:
        """The kernels' name for what they write."""
        return _OUTPUTS[self.rounding.format]

    @property
    def fields(self) -> dict[str, Tensor | float | None]:
        """Values of the fields of `CODES`."""
        return {
            "codes": self.codes,
            "scale": self.scale,
            "static_scale": self.rounding.global_scale,
            "clip_ratio": self.rounding.clip_ratio,
            "largest": LARGEST_E4M3 if self.rounding.format == "FP8" else LARGEST_E2M1,
        }
