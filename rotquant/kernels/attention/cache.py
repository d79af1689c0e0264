"""4-bit KV cache of one layer: pages of codes and scales, and the operators on them as methods.

Keys are stored after RoPE and after an online Hadamard transform over head_dim, values as they leave v_proj, each token
quantized once when it enters (QuaRot Sec. 4, stages 1d and 2c; `rotquant.models.simulation` has the same).
Nothing here grows: pages are allocated once, and lengths live on the device, so every step fits in a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.attention import operator as attention
from rotquant.kernels.layouts.weights import padded

#: A page holds a multiple of so many tokens.
PAGE_MULTIPLE = 64


@dataclass(frozen=True)
class Int4KVCache:
    """Keys and values of one layer.

    k_codes, v_codes: uint8 [pages, kv_heads, page_size, head_dim / 2], in the order of `kv_layout`.
    k_params, v_params: float16 [pages, kv_heads, page_size, groups, 2], scale and zero point; zero points are whole
        numbers 0..15. Codes are chosen with the float32 scale, as in the simulation, and the scale is then rounded to
        float16: a relative error of at most 2^-12 common to a group, that of rounding one dequantized value to float16.
        Or float32 [kv_heads]: static scales, one for all tokens of a head; codes are symmetric ones plus 8 then.
    lengths: int32 [batch], tokens present, a prefix among them; usually shared by all layers, and advanced once a step
        by who owns it.
    block_table: int32 [batch, pages of a sequence], or None: sequence b owns pages b * n to (b + 1) * n - 1.
    counters: int32 [batch * kv_heads], zero between calls: scratch of `attend`.
    rotate: keys (and queries) pass the online Hadamard transform.
    clip_k, clip_v: clip ratios, 0.95 in QuaRot; of no meaning for static scales.
    k_prefix, v_prefix: [kv_heads, tokens, head_dim] of the queries' type, keys rotated as those of the pools: what is
        in the first places of every sequence (PrefixQuant Sec. 5.1), whose codes nobody reads.
    """

    k_codes: Tensor
    v_codes: Tensor
    k_params: Tensor
    v_params: Tensor
    lengths: Tensor
    block_table: Tensor | None
    counters: Tensor
    rotate: bool = True
    clip_k: float = 0.95
    clip_v: float = 0.95
    k_prefix: Tensor | None = None
    v_prefix: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        group_size: int | None = None,
        rotate: bool = True,
        clip_k: float = 0.95,
        clip_v: float = 0.95,
        device: torch.device | str = "cuda",
        lengths: Tensor | None = None,
        params_dtype: torch.dtype = torch.float16,
        prefix: tuple[Tensor, Tensor] | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> "Int4KVCache":
        """An empty contiguous cache: one page a sequence, `capacity` rounded up to a multiple of 64 tokens.

        Args:
            capacity: tokens of a sequence, the prefix among them.
            group_size: elements of a head that share a scale; the whole head by default.
            lengths: the tensor to share between layers; a new one, of the prefix's tokens, by default.
            prefix: keys, after RoPE and not rotated, and values [kv_heads, tokens, head_dim] before every sequence.
            scales: static ones of keys and values, float32 [kv_heads]; by default each token's are found for itself.
            params_dtype: float32 for a cache equal to the simulation; the CUDA kernels take float16.

        Raises:
            KernelError: a head size or group size that the layout does not know; a prefix or scales that do not fit.
        """
        group_size = group_size or head_dim
        if head_dim % 16:
            raise KernelError(f"head_dim {head_dim} has no 4-bit KV layout: it must be a multiple of 16.")
        if head_dim % group_size:
            raise KernelError(f"KV group size {group_size} does not divide head_dim {head_dim}.")
        page = padded(capacity, PAGE_MULTIPLE)
        shape = (batch, kv_heads, page)
        codes = [torch.zeros(*shape, head_dim // 2, dtype=torch.uint8, device=device) for _ in range(2)]
        if scales is None:
            size = (*shape, head_dim // group_size, 2)
            params = [torch.zeros(size, dtype=params_dtype, device=device) for _ in range(2)]
        else:
            params = [_static(scale, kv_heads) for scale in scales]
        before = 0 if prefix is None else prefix[0].shape[1]
        if lengths is None:
            lengths = torch.full((batch,), before, dtype=torch.int32, device=device)
        counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
        k_prefix, v_prefix = (None, None) if prefix is None else _placed(prefix, (kv_heads, before, head_dim), rotate)
        return cls(*codes, *params, lengths, None, counters, rotate, clip_k, clip_v, k_prefix, v_prefix)  # pyright: ignore[reportCallIssue]  # 2 + 2

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        pages = self.k_codes.shape[0] // self.batch if self.block_table is None else self.block_table.shape[1]
        return pages * self.k_codes.shape[2]

    def append(self, k: Tensor, v: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> None:
        """Write new tokens at positions `lengths`..; `lengths` stays. See `attention.kv_append`."""
        attention.kv_append(
            k, v, cos, sin, *self._pools, self.lengths, self.block_table, self.rotate, self.clip_k, self.clip_v
        )

    def attend(self, q: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, new_tokens: int = 0) -> Tensor:
        """Attend with one query per sequence over its first `lengths + new_tokens` tokens. See
        `attention.kv_attention`."""
        return attention.kv_attention(
            *(q, cos, sin, *self._pools, self.k_prefix, self.v_prefix),
            *(self.lengths, new_tokens, self.block_table, self.counters, self.rotate),
        )

    def dequantize(self, tokens: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
        """The first `tokens` keys (still rotated) and values, [batch, kv_heads, tokens, head_dim]."""
        pools = (*self._pools, self.k_prefix, self.v_prefix)
        return attention.kv_dequantize(*pools, self.block_table, self.batch, tokens, dtype)

    def rotate_queries(self, q: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, gap: int = 0) -> Tensor:
        """RoPE and the online Hadamard transform: [batch, tokens, heads, head_dim] queries for dequantized keys.

        gap: how many queries of zeros stand before them in the result.
        """
        return attention.kv_rotate(q, cos, sin, self.rotate, gap)

    @property
    def _pools(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_codes, self.v_codes, self.k_params, self.v_params


def _static(scale: Tensor, kv_heads: int) -> Tensor:
    """The scale itself, if it is what kernels take."""
    if scale.dtype != torch.float32 or tuple(scale.shape) != (kv_heads,):
        kind = str(scale.dtype).removeprefix("torch.")
        raise KernelError(
            f"static scales are {kind} {tuple(scale.shape)}, and the cache takes one float32 number for each of"
            f" {kv_heads} heads."
        )
    return scale


def _placed(prefix: tuple[Tensor, Tensor], shape: tuple[int, ...], rotate: bool) -> tuple[Tensor, Tensor]:
    """A prefix as attention reads it, its keys rotated where those of the cache are.

    Raises:
        KernelError: it is not of this shape.
    """
    for part, name in zip(prefix, ("keys", "values"), strict=True):
        if tuple(part.shape) != shape:
            raise KernelError(f"the prefix has {name} of shape {tuple(part.shape)}, and the cache takes {shape}.")
    keys, values = prefix
    by_token = keys.transpose(0, 1)[None].contiguous()
    return attention.kv_rotate(by_token, None, None, rotate, 0)[0].transpose(0, 1).contiguous(), values.contiguous()
