"""Weights whose codes index a codebook of values (RCP, Choi et al. 2025, Eq. 14); the packing of 2- and 3-bit codes.

Every group of input features of every output row has a codebook of its own, so its values may lie at any distances.
Nothing here chooses levels or codes (`tensors.partition`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rotquant.tensors.devices import row_blocks

#: How many codes of some bits fill how many whole bytes.
_PERIODS = {2: (4, 1), 3: (8, 3)}
#: Bits of a code that can be packed.
INDEX_BITS = tuple(_PERIODS)


@dataclass(frozen=True)
class CodebookWeight:
    """A weight matrix [out, in] as indices into codebooks.

    codes: uint8 [out, in], of 0 to 2^bits - 1.
    levels: float32 or float64 [out, groups, 2^bits]; each codebook serves in / groups neighbouring input features.
    """

    codes: Tensor
    levels: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.levels.shape[-1].bit_length() - 1

    @property
    def group_size(self) -> int:
        """Input features that share a codebook."""
        return self.codes.shape[1] // self.levels.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] as floating-point numbers of `dtype`."""
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for rows in row_blocks(self.codes):
            groups = self.codes[rows].unflatten(1, (-1, self.group_size))
            values[rows] = look_up(groups, self.levels[rows]).flatten(1)
        return values

    def to(self, device: torch.device | str) -> "CodebookWeight":
        """Move the weight to another device."""
        return CodebookWeight(self.codes.to(device), self.levels.to(device))


class LevelTable(NamedTuple):
    """A quantizer of groups: an element gets as code the number of its group's edges that it exceeds.

    edges: ascending, [rows, groups, 2^bits - 1].
    levels: what the codes stand for, ascending, [rows, groups, 2^bits].
    """

    edges: Tensor
    levels: Tensor

    def encode(self, view: Tensor) -> Tensor:
        """Codes of a view [rows, groups, size], uint8; an element that equals an edge lies below it."""
        x = view.to(self.edges.dtype)
        codes = torch.zeros_like(x, dtype=torch.uint8)
        for edge in self.edges.unbind(-1):
            codes += (x > edge.unsqueeze(-1)).view(torch.uint8)
        return codes

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes [rows, groups, size]."""
        return look_up(codes, self.levels).to(dtype)


def look_up(codes: Tensor, levels: Tensor) -> Tensor:
    """The level that each code stands for: codes [..., size] and levels [..., 2^bits] give [..., size]."""
    return levels.gather(-1, codes.long())


def packed_length(length: int, bits: int) -> int:
    """Bytes of `length` codes of 2 or 3 bits."""
    codes, size = _PERIODS[bits]
    return -(-length // codes) * size


def pack_indices(codes: Tensor, bits: int) -> Tensor:
    """Codes of 2 bits four to a byte, of 3 bits eight to three bytes, the first in the lowest bits.

    Args:
        codes: uint8 [..., n], below 2^bits; zeros fill what is left of the last byte or three.

    Returns:
        uint8 [..., `packed_length(n, bits)`].
    """
    count, size = _PERIODS[bits]
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    places = bits * torch.arange(count, dtype=torch.int32, device=codes.device)
    words = (padded.to(torch.int32) << places).sum(-1, keepdim=True, dtype=torch.int32)
    bytes_ = words >> 8 * torch.arange(size, dtype=torch.int32, device=codes.device)
    return (bytes_ & 0xFF).to(torch.uint8).flatten(-2)


def unpack_indices(packed: Tensor, bits: int, length: int) -> Tensor:
    """The inverse of `pack_indices`: uint8 codes [..., length]."""
    count, size = _PERIODS[bits]
    places = 8 * torch.arange(size, dtype=torch.int32, device=packed.device)
    ends = bits * torch.arange(count, dtype=torch.int32, device=packed.device)
    flat = packed.reshape(-1, packed.shape[-1])
    codes = torch.empty(len(flat), flat.shape[1] // size * count, dtype=torch.uint8, device=packed.device)
    for rows in row_blocks(flat):
        words = (flat[rows].unflatten(-1, (-1, size)).to(torch.int32) << places).sum(-1, True, dtype=torch.int32)
        codes[rows] = (words >> ends & (1 << bits) - 1).flatten(-2)
    return codes[:, :length].contiguous().reshape(*packed.shape[:-1], length)
