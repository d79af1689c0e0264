"""Where 4-bit weights lie for the products of decoding.cpp: two codes to a byte, in the order in which they are read.

Four rows of a weight make a strip, 128 of a row's codes a block of 64 bytes. A strip is stored block by block, its four
rows in turn, so that a core reads one stream of memory.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

STRIP, BLOCK = 4, 128
_HALF = BLOCK // 2
#: Codes -8 to 7 are stored as 0 to 15.
_MIDDLE = 8


@dataclass(frozen=True)
class DotWeight:
    """A weight [out, in] of signed 4-bit integers, one scale for each output feature.

    codes: uint8 [strips, blocks, 4, 64], see `pack_codes`. scale: float32 [out]. sums: int32 [out], of each row's
    integers, which an asymmetric input needs.
    """

    codes: Tensor
    scale: Tensor
    sums: Tensor
    shape: tuple[int, int]

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor) -> "DotWeight":
        """Pack int8 codes [out, in] between -8 and 7, with one scale for each row."""
        out, _ = shape = tuple(codes.shape)
        return cls(
            pack_codes(codes),
            scale.reshape(out).float(),
            codes.sum(1, dtype=torch.int32),
            cast("tuple[int, int]", shape),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.codes.nbytes + self.scale.nbytes + self.sums.nbytes


def pack_codes(codes: Tensor) -> Tensor:
    """int8 [out, in] -> uint8 [strips, blocks, 4, 64]; what is missing to whole strips and blocks is zeros.

    Byte j of a block holds code j in its low half and code j + 64 in its high half.
    """
    out, features = codes.shape
    codes = pad(codes, (0, -features % BLOCK, 0, -out % STRIP)) + _MIDDLE
    halves = codes.to(torch.uint8).view(-1, STRIP, (features + BLOCK - 1) // BLOCK, 2, _HALF)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).contiguous()


def unpack(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of `pack_codes`: int8 [out, in]."""
    rows = packed.transpose(1, 2)  # [strips, 4, blocks, 64]
    codes = torch.stack([rows & 15, rows >> 4], dim=-2).to(torch.int8) - _MIDDLE
    return codes.reshape(packed.shape[0] * STRIP, -1)[: shape[0], : shape[1]].contiguous()
