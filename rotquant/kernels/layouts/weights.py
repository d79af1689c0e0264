"""How integers lie in memory for the kernels: one order of nibbles that every path reads without a shuffle.

A tensor core wants four int8 of one row in a register, eight int4 where it has them. So 32 values along the contraction
axis become 16 bytes, byte b holding value b (low nibble) and value b + 16 (high nibble): one word masked gives values
4t..4t+3, shifted by four and masked gives 16+4t..16+4t+3, each times 16, which are the two registers that
`mma.m16n8k32` and `wgmma.m64nNk32` take from thread t; and the word as it is serves `mma.m16n8k64` on int4.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

#: The contraction axis is padded with zeros to a multiple of this, in weights and in quantized activations.
K_BLOCK = 64
#: Output features come in strips of 16, the rows of one tensor-core instruction.
STRIP = 16


def padded(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def pack_rows(codes: Tensor) -> Tensor:
    """int8 codes -8..7 [..., K], K a multiple of 32 -> uint8 [..., K / 2] in the order described above."""
    low, high = codes.view(torch.uint8).unflatten(-1, (-1, 2, 16)).unbind(-2)
    return (low & 0xF | high << 4).flatten(-2)


def unpack_rows(packed: Tensor) -> Tensor:
    """The inverse of `pack_rows`: uint8 [..., K / 2] -> int8 [..., K]."""
    blocks = packed.unflatten(-1, (-1, 16)).view(torch.int8)
    return torch.stack([(blocks << 4) >> 4, blocks >> 4], dim=-2).flatten(-3)


def pack_weight(codes: Tensor) -> Tensor:
    """int8 weight codes -8..7 [out, in] -> uint8 [strips, k_blocks, 32, 16]: strips of 16 rows, tensor-core order.

    strips = ceil(out / 16) and k_blocks = ceil(in / 64), zeros filling the rest. Lane l = 4g + t of a warp owns the 16
    bytes [strip, k_block, l]: four words, of row g and columns 0..31 of the block, row g + 8 and the same columns,
    row g and columns 32..63, row g + 8 and these; of each 32 columns the word t (bytes 4t..4t+3) of `pack_rows`. A
    warp reads 512 consecutive bytes, and a strip is consecutive along K.
    """
    rows, columns = codes.shape
    codes = pad(codes, (0, padded(columns, K_BLOCK) - columns, 0, padded(rows, STRIP) - rows))
    # [strip, half, g, k_block, k32, t, byte]
    packed = pack_rows(codes).view(-1, 2, 8, codes.shape[1] // K_BLOCK, 2, 4, 4)
    # [strip, k_block, g, t, k32, half, byte]
    return packed.permute(0, 3, 2, 5, 4, 1, 6).reshape(-1, codes.shape[1] // K_BLOCK, 32, 16).contiguous()


def unpack_weight(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of `pack_weight`: int8 [out_features, in_features]."""
    strips, k_blocks = packed.shape[:2]
    rows = packed.view(strips, k_blocks, 8, 4, 2, 2, 4).permute(0, 5, 2, 1, 4, 3, 6)
    return unpack_rows(rows.reshape(strips * STRIP, k_blocks * K_BLOCK // 2))[:out_features, :in_features].contiguous()
