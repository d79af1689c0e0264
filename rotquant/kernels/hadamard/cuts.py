"""How the tensor-core Hadamard kernels cut a row into tiles, and the signs of the left factor as they read them.

A row of n values is a matrix [order, columns] in row-major order, and H_n = H_order (x) H_columns. `Strips` is
kernels/hadamard_strips.cu, for small orders; `Dense` is kernels/hadamard_dense.cu, for large ones; `Across` is
kernels/hadamard_across.cu, for both where Hopper's warpgroup products are. Knows no tensors but its tables.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rotquant.kernels.arguments import TYPES
from rotquant.tensors.hadamard.constructions import decompose, hadamard_matrix

#: Columns of one tile of a row, and rows of it.
CHUNK, TILE = 64, 16


@dataclass(frozen=True, kw_only=True)
class LaunchGrid:
    """Blocks of a kernel's grid and how rows are shared among them (kernels/include/pipeline/row_share.cuh).

    blocks: per multiprocessor, what registers are limited for.
    dealt: the part of all rows that is dealt out in runs to whichever multiprocessor is free; the rest is shared evenly
        by as many blocks as the GPU holds.
    run: rows in a run, times the rows that a block works on at once.
    """

    blocks: int = 1
    dealt: float = 0.0
    run: int = 4

    def share(self, units: int, resident: int) -> tuple[int, dict[str, int]]:
        """Blocks for `units` rows, or groups of rows, where the GPU holds `resident`, and the kernels' `Share`."""
        if units <= resident:
            return units, {"blocks": units, "even": units, "run": 1}
        even = int(units * (1 - self.dealt)) // resident * resident
        blocks = resident if even else 0
        return blocks + -(-(units - even) // self.run), {"blocks": blocks, "even": even, "run": self.run}


@dataclass(frozen=True)
class Strips(LaunchGrid):
    """A row for `warps` warps that own `strips` strips of 64 columns each.

    order: rows of the matrix. slots: rows of the ring in shared memory. passes: 2 halves the shared memory in which
        warps exchange rows for columns.
    columns: apply H_columns as well; without it heads are mixed.
    blocks_of: order of one transform, where the left factor is several of them side by side; 0: one of `order`.
    """

    order: int
    warps: int
    strips: int = 1
    slots: int = 2
    passes: int = 1
    columns: bool = True
    blocks_of: int = 0

    file = "hadamard_strips.cu"

    @property
    def elements(self) -> int:
        """Values in a row of the matrix kernel, which are several short rows with `blocks_of`."""
        return self.order * self.warps * self.strips * CHUNK

    @property
    def sign_rows(self) -> int:
        """Rows of the left factor's table: whole tiles."""
        return -(-self.order // TILE) * TILE

    @property
    def rows_per_block(self) -> int:
        """Rows that a thread block works on at once."""
        return 4 if self.warps == 1 else 1

    def instance(self, dtype: torch.dtype, output: str, kind: str, half: bool) -> str:
        """The kernel's C++ name; `output` of `OUTPUTS`; `kind` of `KINDS`; `half`: float16 arithmetic."""
        flags = f"{str(self.columns).lower()},{output},{kind},{str(half).lower()}"
        shape = f"{self.order},{self.warps},{self.strips},{self.slots},{self.passes}"
        return f"hadamard_strips<{TYPES[dtype]},{shape},{flags},{self.blocks}>"

    def shared_bytes(self, output: str, kind: str, half: bool) -> int:
        """Dynamic shared memory of a block: rings, and the row as summed if warps exchange rows for columns."""
        rings = self.rows_per_block * _ring_bytes(self.slots, 2 * self.elements * (2 if kind == "kGated" else 1))
        if self.warps == 1 or not self.columns:
            return rings
        exchanged = -(-self.order // 8) * 8 * self.warps * self.strips * CHUNK
        return rings + (2 if half else 4) * exchanged // (1 if half else self.passes)

    def smaller(self, output: str, half: bool) -> "Strips | None":
        """Smaller variant of this cut: with a shorter ring, then with half the exchange, which packed codes and
        float16 do not take."""
        if self.slots > 1:
            return replace(self, slots=1)
        return None if half or output == "kInt4" or self.passes == 2 else replace(self, passes=2)


@dataclass(frozen=True)
class _Whole(LaunchGrid):
    """A row as [order, 64 * chunks] in shared memory, for all warps of a block."""

    order: int
    chunks: int

    rows_per_block = 1
    blocks_of = 0

    @property
    def elements(self) -> int:
        """Values in a row."""
        return self.order * self.chunks * CHUNK

    def smaller(self, output: str, half: bool) -> None:
        """Smaller variant of this cut: none exists."""
        return


@dataclass(frozen=True)
class Dense(_Whole):
    """A row for warps each of which makes `tiles` tiles of 16 rows from all of it.

    columns: as in `Strips`.
    """

    tiles: int = 1
    columns: bool = True

    file = "hadamard_dense.cu"

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.order // (TILE * self.tiles))

    @property
    def sign_rows(self) -> int:
        """Rows of the left factor's table: those of all warps."""
        return self.warps * self.tiles * TILE

    def instance(self, dtype: torch.dtype, output: str, kind: str, half: bool) -> str:
        """The kernel's C++ name; `output` of `OUTPUTS`; `kind` of `KINDS`; `half`: float16 arithmetic."""
        flags = f"{str(self.columns).lower()},{output},{kind},{str(half).lower()}"
        return f"hadamard_dense<{TYPES[dtype]},{self.order},{self.chunks},{self.tiles},{flags},{self.blocks}>"

    def shared_bytes(self, output: str, kind: str, half: bool) -> int:
        """Dynamic shared memory of a block: the row that arrives, and the operands of two."""
        operands = 2 * -(-self.order // TILE) * TILE * self.chunks * CHUNK
        return _ring_bytes(1, 2 * self.elements * (2 if kind == "kGated" else 1)) + 2 * operands


@dataclass(frozen=True)
class Across(_Whole):
    """A row in the swizzle of Hopper's tensor cores, 64 rows of the left factor to a warpgroup.

    order: at most 256. slots: rows of the ring in shared memory.
    """

    slots: int = 3

    file = "hadamard_across.cu"
    columns = True

    @property
    def warps(self) -> int:
        """Warps of a block: whole warpgroups."""
        return -(-self.order // (4 * TILE)) * 4

    @property
    def sign_rows(self) -> int:
        """Rows of the left factor's table: those of all warps."""
        return self.warps * TILE

    def instance(self, dtype: torch.dtype, output: str, kind: str, half: bool) -> str:
        """The kernel's C++ name; it takes neither gated rows nor float16 arithmetic."""
        return f"hadamard_across<{TYPES[dtype]},{self.order},{self.chunks},{self.slots},{output},{kind},{self.blocks}>"

    def shared_bytes(self, output: str, kind: str, half: bool) -> int:
        """Dynamic shared memory of a block: the ring at a multiple of 1024 bytes, and each warp's way out."""
        ring = self.slots * -(-self.order // TILE) * TILE * self.chunks * 2 * CHUNK
        return 1024 + ring + (2048, 1024, 512)[OUTPUTS[output]] * self.warps


def _ring_bytes(slots: int, slot_bytes: int) -> int:
    """Size of kernels/include/pipeline/row_ring.cuh's ring: slots and a barrier for each, in whole 16 bytes."""
    return -(-slots * (slot_bytes + 8) // 16) * 16


Cut = Strips | Dense | Across


def threads(cut: Cut) -> int:
    """Threads of a block."""
    return 32 * cut.warps * cut.rows_per_block


@cache
def signs(order: int, blocks_of: int, inverse: bool, rows: int, device: torch.device) -> Tensor:
    """Where the left factor is -1, a bit for each entry in the kernels' order: int32 [rows / 16, words, 32 lanes].

    The factor is I (x) H, H of order `blocks_of`, padded with copies of its first row to `rows` so that padding never
    holds the largest magnitude of a transform; with `inverse` its transpose. Kept for as long as the process lives,
    since captured graphs hold its address.
    """
    block = hadamard_matrix(blocks_of, torch.int8).numpy()
    left = np.kron(np.eye(order // blocks_of, dtype=np.int8), block if inverse else block.T)
    tiles, words = rows // TILE, -(-order // (4 * TILE))
    padded = np.zeros((rows, words * 4 * TILE), dtype=bool)
    padded[:order, :order] = left < 0
    padded[order:] = padded[0]
    # [tile, half of rows, g, word, k_tile, half of columns, t, low or high]
    parts = padded.reshape(tiles, 2, 8, words, 4, 2, 4, 2).transpose(0, 3, 2, 6, 7, 4, 5, 1)
    # [tile, word, lane = 4g + t, low or high, position]: position = 4 k_tile + 2 (half of columns) + half of rows
    positions = parts.reshape(tiles, words, 32, 2, 16).astype(np.uint32)
    shifts = (15 - np.arange(16) + np.array([0, 16])[:, None]).astype(np.uint32)
    table = (positions << shifts).sum((-1, -2), dtype=np.uint32)
    return torch.from_numpy(table.view(np.int32)).to(device)


#: What kernels write, and the columns of the tables below: values as they come, a byte for each, half a byte.
OUTPUTS = {"kSame": 0, "kInt8": 1, "kFp8": 1, "kInt4": 2, "kMxfp4": 2, "kNvfp4": 2}
#: How rows arise: as they are, by SwiGLU, by RMSNorm (kernels/include/pipeline/row_kind.cuh).
KINDS = ("kPlain", "kGated", "kNorm")

# Measured on an H200 (kernels/notes/hadamard.md); other sizes follow `_default_cut`.
_CUTS: dict[int, tuple[Cut, ...]] = {
    1024: (Strips(16, 1, blocks=6),) * 3,
    2048: (Strips(32, 1, blocks=3, dealt=0.2, run=1), Strips(32, 1, blocks=3), Strips(32, 1, blocks=3)),
    3072: (Strips(24, 2, blocks=6, dealt=0.2), *(Strips(48, 1, blocks=2, dealt=0.1, run=2),) * 2),
    4096: (Strips(32, 2, blocks=6, dealt=1.0, run=5), Strips(16, 4, blocks=6), Strips(16, 4, blocks=5)),
    5120: (Strips(40, 2, blocks=4, dealt=0.2),) * 3,
    8192: (Strips(32, 4, blocks=3, dealt=1.0, run=5), *(Strips(32, 4, blocks=3, dealt=0.2),) * 2),
    11008: (Dense(172, 1, 3, blocks=3),) * 3,
    12288: (Strips(48, 4, slots=1, blocks=2, dealt=0.1),) * 3,
    13824: (Dense(108, 2, 2, blocks=2),) * 3,
    14336: (Strips(56, 4, blocks=2), *(Strips(28, 8, slots=1, blocks=2),) * 2),
    28672: (Strips(28, 8, 2, slots=1),) * 3,
}
# What warpgroup products do better; None where they do not.
_ACROSS: dict[int, tuple[Across | None, ...]] = {
    4096: (Across(64, 1, 4, blocks=4, dealt=0.2, run=2), *(Across(64, 1, 4, blocks=4, dealt=0.1),) * 2),
    8192: (Across(128, 1, blocks=2, dealt=0.2), *(Across(64, 2, 2, blocks=3, dealt=0.2),) * 2),
    11008: (Across(172, 1, 4), Across(172, 1, 4), Across(172, 1)),
    13824: (Across(108, 2), Across(108, 2, 4), Across(108, 2, 4)),
    14336: (Across(112, 2), *(Across(112, 2, blocks=2, dealt=0.1),) * 2),
    28672: (Across(112, 4, 2),) * 3,
}


def cut_of(n: int, inner: int, dtype: torch.dtype, output: str, *, across: bool = False) -> Cut | None:
    """How the middle axis of [rows, n, inner] is transformed on tensor cores; None where it is not.

    output: of `OUTPUTS`; codes and scales belong to rows, which therefore may not share a tile.
    across: `Across` may be taken, on Hopper and for rows that no gate makes.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    if inner > 1:
        return _heads_cut(n, inner)
    column = OUTPUTS[output]
    if across and n in _ACROSS and (cut := _ACROSS[n][column]) is not None:
        return cut
    if n in _CUTS:
        return _CUTS[n][column]
    core, doublings = decompose(n)
    if doublings < 6:
        return None
    if core == 1 and n < TILE * CHUNK and output == "kSame":
        return Strips(TILE, 1, blocks=5, dealt=1.0, run=2, blocks_of=n // CHUNK)
    return _default_cut(n, core)


def _default_cut(n: int, core: int) -> Cut | None:
    """A single warp for short rows, the dense kernel for others, its order as small as its registers allow."""
    if n <= 48 * CHUNK:
        return Strips(n // CHUNK, 1, blocks=2)
    chunks = next((c for c in (1, 2, 4) if n % (c * CHUNK) == 0 and n // (c * CHUNK) <= 160), None)
    if chunks is None or n // (chunks * CHUNK) % core:
        return None
    return Dense(n // (chunks * CHUNK), chunks)


def _heads_cut(heads: int, head_dim: int) -> Cut | None:
    if head_dim not in (CHUNK, 2 * CHUNK):
        return None
    if heads <= 48:
        return Strips(heads, head_dim // CHUNK, blocks=3, columns=False)
    return Dense(heads, head_dim // CHUNK, blocks=3 if heads == 64 else 1, columns=False)
