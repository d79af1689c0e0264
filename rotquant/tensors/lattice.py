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
_AT_ONCE = {"cpu": 2**11, "cuda": 2**17}


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
    table = absolute_values().to(codes.device)
    index = codes >> 8
    signs = (codes.unsqueeze(-1) >> torch.arange(1, WIDTH, device=codes.device, dtype=torch.int32)) & 1
    last = (signs.sum(-1) + _parity(table)[index]) % 2
    negative = torch.cat([signs, last.unsqueeze(-1)], dim=-1)
    move = (codes & 1).unsqueeze(-1) / 2 - 0.25
    return (table[index] * (1 - 2 * negative) + move).to(dtype)


def encode(vectors: Tensor) -> Tensor:
    """The codes of the nearest vectors: [..., 8] of float32 or float64 to int16 [...]."""
    flat = vectors.reshape(-1, WIDTH)
    limit = of_device(_AT_ONCE, vectors.device)
    return torch.cat([_encode(part) for part in flat.split(limit)]).view(vectors.shape[:-1])


def _parity(table: Tensor) -> Tensor:
    """Whether an odd number of negative signs makes the sum of a vector even, int64 of 0 or 1."""
    return table.sum(-1).long() % 2


def _encode(vectors: Tensor) -> Tensor:
    codes, distances = zip(*(_encode_moved(vectors, move) for move in (0, 1)), strict=True)
    return torch.where(distances[0] <= distances[1], *codes).to(torch.int16)


def _encode_moved(vectors: Tensor, move: int) -> tuple[Tensor, Tensor]:
    """The best code of each vector [n, 8] with one of the two moves, int32 [n], and its squared distance [n].

    Signs are those of the vector. Where they make the sum odd, the one that costs least, min |x_i| s_i, is turned.
    """
    table = absolute_values().to(vectors)
    centred = vectors - (move / 2 - 0.25)
    size, negative = centred.abs(), centred < 0
    odd = (negative.sum(-1, keepdim=True) % 2) != _parity(table)  # [n, 256]
    price, turned = (size.unsqueeze(1) * table).min(-1)
    gain = 2 * size @ table.T - table.square().sum(-1) - 4 * price * odd
    best, index = gain.max(-1, keepdim=True)
    turned = torch.zeros_like(negative).scatter_(1, turned.gather(1, index), odd.gather(1, index))
    signs = (negative ^ turned)[:, : WIDTH - 1].int()
    powers = 2 ** torch.arange(1, WIDTH, device=vectors.device, dtype=torch.int32)
    codes = (index.squeeze(1).int() << 8) | (signs * powers).sum(-1, dtype=torch.int32) | move
    return codes, centred.square().sum(-1) - best.squeeze(1)


def refine(vectors: Tensor, stages: int) -> tuple[Tensor, Tensor]:
    """Round vectors [..., 8] by one codebook, and what is left by a finer one, `stages` times in all.

    Returns:
        Codes, int16 [stages, ...], and their values [..., 8].
    """
    codes, values, step = [], torch.zeros_like(vectors), 1.0
    for _ in range(stages):
        codes.append(encode((vectors - values) / step))
        values = values + step * decode(codes[-1], vectors.dtype)
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
