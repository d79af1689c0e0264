"""The E8P codebook of QuIP# (Tseng et al. 2024, Sec. 4.2): eight weights in a code of 16 bits, and weights made of it.

E8P is a part of the lattice E8 moved by a quarter: vectors of half-integers with an even sum, up to norm sqrt(12), plus
or minus 1/4 everywhere. A code is 8 bits for the absolute values, 7 for signs (the sum gives the eighth), 1 for the
move. Nothing here looks at inputs or chooses what to round.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import cast

import torch
from torch import Tensor

from rotquant.tensors.devices import of_device
from rotquant.tensors.hadamard import hadamard_transform

#: Weights of one code.
WIDTH = 8
#: How much finer a second codebook is, which rounds what the first leaves (QuIP#'s 4 bits).
REFINEMENT = 3.8
#: Standard deviation, by the number of codebooks, of the Gaussian numbers that they round best: of least mean squared
#: error relative to their variance, 0.0917 and 0.0085, for `REFINEMENT` too.
DEVIATION = {1: 1.03, 2: 0.9}
#: Codes that are searched for side by side on a CPU, and elsewhere.
_AT_ONCE = {"cpu": 2**10, "cuda": 2**16}


@lru_cache(maxsize=1)
def absolute_values() -> Tensor:
    """The 256 vectors of absolute values, float64 [256, 8]: all 227 of squared norm up to 10, and 29 of 12.

    Which 29 is of no weight; here the first in lexicographic order.
    """
    halves = product((0.5, 1.5, 2.5), repeat=WIDTH)
    ordered = sorted((sum(x * x for x in vector), vector) for vector in halves)
    return torch.tensor([vector for _, vector in ordered[:256]], dtype=torch.float64)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The vectors of some codes, int16 [...]: [..., 8], multiples of 1/4 and hence exact in every type."""
    codes = codes.to(torch.int32) & 0xFFFF
    table = _Table.of(torch.float64, codes.device)
    index = codes >> 8
    signs = (codes.unsqueeze(-1) >> table.shifts) & 1
    last = (signs.sum(-1) + table.parity[index]) % 2
    negative = torch.cat([signs, last.unsqueeze(-1)], dim=-1)
    return _vectors(table.values[index], negative, codes & 1).to(dtype)


def _vectors(absolute: Tensor, negative: Tensor, moved: Tensor) -> Tensor:
    """Vectors [..., 8] of absolute values, of which of them are negative, and of the move [...]."""
    return absolute * (1 - 2 * negative) + (moved.unsqueeze(-1) / 2 - 0.25)


@dataclass(frozen=True)
class _Table:
    """The codebook on a device as a search reads it; made once, for a GPU waits for each copy from the host.

    values: absolute values [256, 8]; norms: their squared norms [256].
    parity: whether an odd number of negative signs makes the sum of a vector even, int64 [256] of 0 or 1.
    moves: what is added to the two kinds of vectors, [2, 1, 1].
    shifts: bits of the signs in a code, int32 [7].
    """

    values: Tensor
    norms: Tensor
    parity: Tensor
    moves: Tensor
    shifts: Tensor

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, dtype: torch.dtype, device: torch.device) -> "_Table":
        """The table in a floating-point type on a device."""
        values = absolute_values().to(device, dtype)
        moves = torch.tensor([-0.25, 0.25], dtype=dtype, device=device).view(2, 1, 1)
        shifts = torch.arange(1, WIDTH, device=device, dtype=torch.int32)
        return cls(values, values.square().sum(-1), values.sum(-1).long() % 2, moves, shifts)


def encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest vectors of the codebook to some, [..., 8] of float32 or float64: codes, int16 [...], and values."""
    parts = [_encode(part) for part in vectors.reshape(-1, WIDTH).split(of_device(_AT_ONCE, vectors.device))]
    codes, values = map(torch.cat, zip(*parts, strict=True))
    return codes.view(vectors.shape[:-1]), values.view(vectors.shape)


def _encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """`encode` of [n, 8]: of each move the best vector, then the better of the two.

    Signs are those of the vector. Where they make the sum odd, the one that costs least, min |x_i| s_i, is turned.
    """
    table = _Table.of(vectors.dtype, vectors.device)
    centred = vectors - table.moves  # [2, n, 8]
    size, negative = centred.abs(), centred < 0
    odd = (negative.sum(-1, keepdim=True) % 2) != table.parity  # [2, n, 256]
    columns = size.permute(2, 0, 1).unsqueeze(-1)
    price = (columns * table.values.T[:, None, None]).amin(0)
    gain = 2 * size @ table.values.T - table.norms - 4 * price * odd
    best, index = gain.max(-1)
    distances = centred.square().sum(-1) - best
    moved = ~(distances[0] <= distances[1])
    size, negative = (torch.where(moved[:, None], x[1], x[0]) for x in (size, negative))
    index = torch.where(moved, index[1], index[0])
    absolute = table.values[index]
    odd = (negative.sum(-1) % 2) != table.parity[index]
    cheapest = (size * absolute).argmin(-1, keepdim=True)
    negative = negative.scatter(-1, cheapest, negative.gather(-1, cheapest) ^ odd.unsqueeze(-1)).int()
    signs = (negative[:, : WIDTH - 1] << table.shifts).sum(-1, dtype=torch.int32)
    codes = (index.int() << 8) | signs | moved.int()
    return codes.to(torch.int16), _vectors(absolute, negative, moved)


def refine(vectors: Tensor, stages: int) -> tuple[Tensor, Tensor]:
    """Round vectors [..., 8] by one codebook, and what is left by a finer one, `stages` times in all.

    Returns:
        Codes, int16 [stages, ...], and their values [..., 8].
    """
    codes, values, step = [], torch.zeros_like(vectors), 1.0
    for _ in range(stages):
        found, nearest = encode((vectors - values) / step)
        codes.append(found)
        values = values + step * nearest
        step /= REFINEMENT
    return torch.stack(codes), values


def refined(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., 8] of codes [stages, ...] that `refine` found."""
    steps = REFINEMENT ** -torch.arange(len(codes), dtype=dtype, device=codes.device)
    return cast(Tensor, sum(step * decode(stage, dtype) for step, stage in zip(steps, codes, strict=True)))


def incoherent(matrix: Tensor, rows: Tensor | None, columns: Tensor | None, inverse: bool = False) -> Tensor:
    """Randomized Hadamard transforms of the rows and columns of a matrix [m, n] (QuIP# Sec. 3), or their inverse.

    Args:
        rows, columns: signs [m] and [n]; None leaves that side as it is.
    """

    def transform(x: Tensor, signs: Tensor) -> Tensor:
        signs = signs.to(x)
        if inverse:
            return hadamard_transform(x, inverse=True) * signs
        return hadamard_transform(x * signs)

    if columns is not None:
        matrix = transform(matrix, columns)
    return matrix if rows is None else transform(matrix.T, rows).T


@dataclass(frozen=True)
class LatticeWeight:
    """A weight matrix [out, in] as codes of eight, in the basis of randomized Hadamard transforms of both sides.

    codes: int16 [stages, out, in / 8]: two bits a weight for each stage.
    scale: of the codebook, [] float32.
    rows, columns: signs of the transforms, int8 [out] and [in].
    """

    codes: Tensor
    scale: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        return len(self.rows), len(self.columns)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in its own basis, computed in float64.

        A runtime with kernels for the codes would transform its activations instead; the function is the same.
        """
        values = refined(self.codes, torch.float64).flatten(-2)
        return incoherent(self.scale.double() * values, self.rows, self.columns, inverse=True).to(dtype)

    def to(self, device: torch.device | str) -> "LatticeWeight":
        """Move the weight to another device."""
        return LatticeWeight(*(part.to(device) for part in (self.codes, self.scale, self.rows, self.columns)))
