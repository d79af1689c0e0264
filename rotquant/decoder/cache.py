"""Keys and values of a decoder's past: 16-bit as they are, or 4-bit (QuaRot Sec. 4, stage 2c).

Each kind appends the new tokens of a pass and attends over all; prefill and decode see the same stored numbers, as in
`rotquant.models.simulation.kv_cache`. Texts of a batch have equal lengths, which the GPU counts by itself: decoding is
one CUDA graph. A prefix of full-precision keys and values (PrefixQuant Sec. 5.1) has the first places of every text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from rotquant.decoder.config import CacheScheme, DecoderConfig, Precision
from rotquant.foundation.errors import KernelError
from rotquant.kernels.attention.cache import Int4KVCache
from rotquant.kernels.attention.operator import HEAD_DIMS
from rotquant.kernels.rows.elementwise import rope_append, rotate
from rotquant.models.transforms import Chain
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import at
from rotquant.tensors.quantization import QParams, fake_quantize

#: A past this many times shorter than the tokens that follow it is a prefix, not a conversation.
_SHORT_PAST = 8


@dataclass(frozen=True)
class CacheInit:
    """Initial content of a layer's cache, before any text.

    prefix: keys, after RoPE at the positions from 0 and without R3, and values, [kv_heads, tokens, head_dim].
    scales: static ones of keys, after R3, and values, float32 [kv_heads].
    """

    prefix: tuple[Tensor, Tensor] | None = None
    scales: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Step:
    """Where the tokens of one pass stand; its rows are the batch's texts, each text's tokens one after another.

    cos, sin: of the rotary embedding, [1 or batch, tokens, head_dim].
    lengths: int32 [batch], tokens before this pass, a prefix among them.
    start: the same number where the host knows it, else None: then one token of each text is decoded.
    mask: [batch, 1, 1, capacity], 0 for what a text's token sees and -inf for the rest, where `start` is None.
    local: the same with the rotary embedding of `DecoderConfig.local_layers`, where there are any.
    """

    batch: int
    tokens: int
    cos: Tensor
    sin: Tensor
    lengths: Tensor
    start: int | None = None
    mask: Tensor | None = None
    local: "Step | None" = None

    @property
    def gap(self) -> int:
        """How many queries of zeros stand before those of the tokens, their answers dropped: as many as there are
        tokens before, where these are few, since square attention has the faster kernels."""
        start = self.start or 0
        return start if _SHORT_PAST * start <= self.tokens else 0


class Cache:
    """The caches of all layers for `batch` texts of at most `capacity` tokens, which stand after the prefix.

    capacity, length: tokens there is room for and tokens present, on the host, those of the prefix among them.
    lengths: int32 [batch], the tokens present, on the device.

    Args:
        cache_init: of each layer.
    """

    def __init__(
        self,
        config: DecoderConfig,
        precision: Precision,
        batch: int,
        capacity: int,
        device: torch.device | str,
        cache_init: Iterable[CacheInit],
    ) -> None:
        self.config, self.precision, self.device = config, precision, device
        self.batch, self.prefix = batch, config.prefix
        self.capacity, self.length = self.prefix + capacity, self.prefix
        self.lengths = torch.full((batch,), self.length, dtype=torch.int32, device=device)
        dtype, every = getattr(torch, precision.dtype), (config.inverse_frequencies, config.local_frequencies)
        self.turns = [rotary_table(one, config.rope_scale, self.capacity, dtype, device) for one in every if one]
        self.layers = [make_layer_cache(self, given) for given in cache_init]
        self._masked = isinstance(self.layers[0], FloatCache)

    def prefill_step(self, tokens: int) -> Step:
        """The step of a pass over `tokens` more tokens of each text.

        Raises:
            KernelError: they do not fit.
        """
        self.check_room(tokens)
        here = slice(self.length, self.length + tokens)
        return self._step((None, here), tokens, start=self.length)

    def decode_step(self, fixed: bool = False) -> Step:
        """The step of one more token of each text, its place read on the device: one graph serves every length.

        Args:
            fixed: let a graph be for the present length alone, where that is faster: 16-bit attention then reads the
                tokens there are, instead of all the capacity under a mask (5 us a layer on an H200).
        """
        if fixed and self._masked:
            return self.prefill_step(1)
        return self._step((self.lengths.long(), None), 1, mask=self._mask() if self._masked else None)

    def _step(self, places: tuple[Any, Any], tokens: int, **where: Any) -> Step:
        """A step whose tokens have the rotary embeddings at some places of the tables."""
        first, *others = [(cos[places], sin[places]) for cos, sin in self.turns]
        local = [Step(self.batch, tokens, *one, self.lengths, **where) for one in others]
        return Step(self.batch, tokens, *first, self.lengths, **where, local=local[0] if local else None)

    def _mask(self) -> Tensor:
        """Attention mask of each text's next token over a 16-bit cache, the same for all layers."""
        hidden = torch.arange(self.capacity, device=self.lengths.device) > self.lengths[:, None]
        mask = torch.zeros(self.batch, 1, 1, self.capacity, dtype=self.turns[0][0].dtype, device=self.lengths.device)
        return mask.masked_fill_(hidden[:, None, None], -torch.inf)

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has appended."""
        self.lengths.add_(tokens)
        self.length += tokens

    def check_room(self, tokens: int) -> None:
        """Raise `KernelError` unless `tokens` more fit into each text."""
        if self.length + tokens > self.capacity:
            room, taken = self.capacity - self.prefix, self.length - self.prefix
            raise KernelError(f"the cache holds {room} tokens, {taken} of them taken: {tokens} more do not fit.")

    def reset(self) -> None:
        """Forget all tokens but the prefix."""
        self.length = self.prefix
        self.lengths.fill_(self.prefix)


def rotary_table(
    inverse_frequencies: Sequence[float], scale: float, positions: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim] of a rotary embedding, computed in float32, the two halves equal."""
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(positions, device=device).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def make_layer_cache(cache: Cache, cache_init: CacheInit) -> "FloatCache | Int4Cache":
    """Make one layer's cache: 4-bit where the kernels have the head size, otherwise floats (rounded, where it should
    be)."""
    if cache.precision.cache is None:
        return FloatCache(cache, cache_init)
    return (Int4Cache if cache.config.head_dim in HEAD_DIMS else RoundedCache)(cache, cache_init)


class FloatCache:
    """KV cache of one layer in the decoder's type: keys and values [batch, capacity, kv_heads, head_dim]."""

    def __init__(self, cache: Cache, cache_init: CacheInit) -> None:
        config, dtype = cache.config, getattr(torch, cache.precision.dtype)
        self.heads, self.kv_heads = config.heads, config.kv_heads
        size = (cache.batch, cache.capacity, config.kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(size, dtype=dtype, device=cache.device) for _ in range(2))
        for all_tokens, first in zip((self.keys, self.values), cache_init.prefix or (), strict=False):
            all_tokens[:, : cache.prefix] = first.transpose(0, 1)

    def attend(self, qkv: Tensor, step: Step) -> Tensor:
        """Projections [rows, (heads + 2 kv_heads) * head_dim] -> attention's output [rows, heads * head_dim]."""
        queries, keys, values = self.append(qkv, step), self.keys, self.values
        if step.start is not None:
            end = step.start + step.tokens
            keys, values = keys[:, :end], values[:, :end]
        return attend(queries, keys, values, step.mask)[:, step.gap :].reshape(len(qkv), -1)

    def append(self, qkv: Tensor, step: Step) -> Tensor:
        """Store new keys and values; returns the queries after RoPE, [batch, gap + tokens, heads, head_dim]."""
        return rope_append(qkv, step.cos, step.sin, step.lengths, self.keys, self.values, self.heads, step.gap)


class RoundedCache(FloatCache):
    """Keys and values rounded to 4 bits and kept as floats: the same numbers without the saving.

    For head sizes that no kernel has, those of small models.
    """

    def __init__(self, cache: Cache, cache_init: CacheInit) -> None:
        super().__init__(cache, cache_init)
        scheme = cast(CacheScheme, cache.precision.cache)
        self.transform = Chain(at(cache.precision.transforms, "queries_keys"))
        common = {"bits": 4, "granularity": "head", "symmetric": scheme.static, "dynamic": not scheme.static}
        self.schemes = [
            QuantizationScheme(**common, group_size=scheme.group_size, clip_ratio=clip)
            for clip in (scheme.key_clip, scheme.value_clip)
        ]
        # By token, as keys and values are here: [kv_heads, groups of a head, 1].
        self.static = [QParams(scale[:, None, None]) for scale in cache_init.scales or ()] or [None, None]

    def append(self, qkv: Tensor, step: Step) -> Tensor:
        """Append tokens as `FloatCache` does, but round keys and values as the simulation does, keys within R3's
        basis."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        queries, keys, values = qkv.view(step.batch, step.tokens, sum(heads), -1).split(heads, dim=2)
        keys = self.transform(rotate(keys, step.cos, step.sin))
        keys, values = map(fake_quantize, (keys, values), self.schemes, self.static)
        keys = self.transform.inverse(keys)
        positions = step.lengths.long()[:, None] + torch.arange(step.tokens, device=qkv.device)
        texts = torch.arange(step.batch, device=qkv.device)[:, None]
        self.keys[texts, positions], self.values[texts, positions] = keys, values
        return pad(rotate(queries, step.cos, step.sin), (0, 0, 0, 0, step.gap, 0))


class Int4Cache:
    """4-bit KV cache of one layer, keys stored after R3; decoding multiplies the integers as they are."""

    def __init__(self, cache: Cache, cache_init: CacheInit) -> None:
        config, precision = cache.config, cache.precision
        scheme, dtype = cast(CacheScheme, precision.cache), getattr(torch, precision.dtype)
        self.heads = (config.heads, config.kv_heads, config.kv_heads)
        self.store = Int4KVCache.allocate(
            cache.batch,
            cache.capacity,
            config.kv_heads,
            config.head_dim,
            group_size=scheme.group_size,
            rotate=bool(at(precision.transforms, "queries_keys")),
            clip_k=scheme.key_clip,
            clip_v=scheme.value_clip,
            # A scale rounded to 16 bits is as exact as the 16-bit numbers it gives; wider numbers keep wider scales.
            params_dtype=dtype if dtype.itemsize > 2 else torch.float16,
            device=cache.device,
            lengths=cache.lengths,
            prefix=cache_init.prefix,
            scales=cache_init.scales,
        )

    def attend(self, qkv: Tensor, step: Step) -> Tensor:
        """Attend as `FloatCache` does; a prefill attends to the dequantized cache, the numbers that decoding will
        see."""
        qkv = qkv.view(step.batch, step.tokens, sum(self.heads), -1)
        queries, keys, values = qkv.split(self.heads, dim=2)
        turn = (step.cos, step.sin)
        self.store.append(keys, values, *turn)
        if step.start is None:
            return self.store.attend(queries[:, 0], *turn, new_tokens=1).flatten(1)
        keys, values = self.store.dequantize(step.start + step.tokens, qkv.dtype)
        queries = self.store.rotate_queries(queries, *turn, gap=step.gap)
        attended = attend(queries, keys.transpose(1, 2), values.transpose(1, 2))
        return attended[:, step.gap :].reshape(step.batch * step.tokens, -1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The library's attention of the last tokens over all, causal where no mask says otherwise.

    queries: [batch, tokens, heads, head_dim]. keys, values: [batch, all tokens, kv_heads, head_dim].
    """
    tokens, total = queries.shape[1], keys.shape[1]
    before = total - tokens if mask is None and tokens > 1 else 0
    output = scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=causal_lower_right(tokens, total) if before else mask,
        is_causal=mask is None and tokens > 1 and not before,
        enable_gqa=queries.shape[2] != keys.shape[2],
    )
    return output.transpose(1, 2)
