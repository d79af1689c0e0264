"""Where the nibbles of a 4-bit KV cache lie: pages of tokens, in the order in which tensor cores take them.

Made for `kv_attention` (QuaRot Sec. 4, stage 2c), in which keys and values are the 16 x 16 left operand of
`mma.m16n8k16` and a lane's loads are whole operands. Every byte belongs to one token, so appending never reads.

A page of one head is `page_size` tokens of head_dim / 2 bytes. Keys: token after token; the byte of elements d (low
nibble) and d + 1 lies at byte (d % 8) / 2 of word [(d % 32) / 8, d / 32], so lane t of four finds one word of each 32
elements in a row (two lanes and 16 elements for a head_dim that is no multiple of 32). Values: block after block of 16
tokens; the byte of token s, elements d (low) and d + 8, for d = 16 m + g, lies in the word of lane 4 g + (s % 8) / 2
and tile m, at byte 2 (s % 2) + s / 8; the words of four tiles m (two where their number is not a multiple of four, one
where it is odd) lie together for each lane.
"""

import math

import torch
from torch import Tensor

#: Tokens of a block of values, the contraction length of one tensor-core instruction.
BLOCK = 16


def pair_columns(head_dim: int, values: bool, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The elements that share a byte, low nibble and high nibble: int64 [head_dim / 2] each."""
    d = torch.arange(head_dim, device=device)
    return (d[d % 16 < 8], d[d % 16 >= 8]) if values else (d[0::2], d[1::2])


def byte_offsets(slots: Tensor, head_dim: int, values: bool) -> Tensor:
    """Offsets of the bytes of `pair_columns` inside a page of one head.

    Args:
        slots: int64 [tokens], positions inside the page.
        head_dim: a multiple of 16.

    Returns:
        int64 [tokens, head_dim / 2].
    """
    low, _ = pair_columns(head_dim, values, slots.device)
    slots = slots[:, None]
    if not values:
        width = 16 if head_dim % 32 else 32
        return slots * (head_dim // 2) + low % width // 8 * (4 * head_dim // width) + low // width * 4 + low % 8 // 2
    tiles = math.gcd(4, head_dim // 16)
    tile, g, s = low // 16, low % 8, slots % BLOCK
    lane = 4 * g + s % 8 // 2
    word = (tile // tiles * 32 + lane) * tiles + tile % tiles
    return slots // BLOCK * (BLOCK * head_dim // 2) + 4 * word + 2 * (s % 2) + s // 8


def unpack_pages(pages: Tensor, values: bool) -> Tensor:
    """Bytes of whole pages, uint8 [..., page_size, head_dim / 2] -> codes uint8 [..., page_size, head_dim]."""
    page_size, head_dim = pages.shape[-2], 2 * pages.shape[-1]
    offsets = byte_offsets(torch.arange(page_size, device=pages.device), head_dim, values)
    pairs = pages.flatten(-2)[..., offsets.flatten()].unflatten(-1, offsets.shape)
    low, high = pair_columns(head_dim, values, pages.device)
    codes = pages.new_empty(*pages.shape[:-1], head_dim)
    codes[..., low], codes[..., high] = pairs & 0xF, pairs >> 4
    return codes
