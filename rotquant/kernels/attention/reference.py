"""Reference of the 4-bit KV cache's operators in plain torch, on any device: slow, obvious, the definition.

Quantization is `rotquant.tensors.quantization` (QuaRot Sec. 4, stage 2c: asymmetric, per head or group, clipped; or
symmetric with a static scale per head, PrefixQuant Sec. 6.1), RoPE that of transformers (each product and the sum
rounded to the tensor's dtype). Attention is float64.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from rotquant.kernels.launch.operators import Written
from rotquant.kernels.layouts.cache import byte_offsets, pair_columns, unpack_pages
from rotquant.kernels.rows.elementwise import rotate
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.hadamard import hadamard_transform
from rotquant.tensors.quantization import QParams, choose_qparams, quantize
from rotquant.tensors.quantization import dequantize as dequantize_codes

#: What is added to symmetric codes, so that they are nibbles.
STATIC_ZERO = 8
_STATIC = QuantizationScheme(bits=4, granularity="head", dynamic=False)


def is_static(params: Tensor) -> bool:
    """Whether parameters are static scales, [kv_heads], and not those of each token."""
    return params.dim() == 1


class Append(NamedTuple):
    """Tokens to quantize and to write: what `kv_append` takes.

    k, v: [batch, tokens, kv_heads, D], on a GPU float16 or bfloat16 and contiguous along heads and D, with any strides
    of batch and tokens (views of a merged projection). cos, sin: [1 or batch, tokens, D] of the same dtype, or None for
    no RoPE. Pools and clip ratios: as in `cache.Int4KVCache`, of static scales the codes alone are written. starts:
    int32 [batch]; token i of sequence b goes to position starts[b] + i, and is dropped beyond the capacity. rotate:
    Hadamard transform of the keys.
    """

    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    k_codes: Written
    v_codes: Written
    k_params: Written
    v_params: Written
    starts: Tensor
    block_table: Tensor | None
    rotate: bool
    clip_k: float
    clip_v: float


class Attend(NamedTuple):
    """A query for every sequence, and what it sees: what `kv_attention` takes.

    q: [batch, heads, D], contiguous along heads and D. cos, sin: [1 or batch, 1, D]. Pools: as in `cache.Int4KVCache`.
    k_prefix, v_prefix: [kv_heads, prefix, D] of q's dtype, keys after the Hadamard transform: what stands in the first
    places of every sequence in the place of the pools' codes; always seen. The query of sequence b sees its first
    lengths[b] + new_tokens tokens. counters: int32 [batch * kv_heads], zero before and after. Page numbers of
    block_table outside the pool are taken for the nearest inside.
    """

    q: Tensor
    cos: Tensor | None
    sin: Tensor | None
    k_codes: Tensor
    v_codes: Tensor
    k_params: Tensor
    v_params: Tensor
    k_prefix: Tensor | None
    v_prefix: Tensor | None
    lengths: Tensor
    new_tokens: int
    block_table: Tensor | None
    counters: Tensor | None
    rotate: bool


class Dequantize(NamedTuple):
    """The first `tokens` of `batch` sequences: what `kv_dequantize` takes. Pools and prefix: as of `Attend`."""

    k_codes: Tensor
    v_codes: Tensor
    k_params: Tensor
    v_params: Tensor
    k_prefix: Tensor | None
    v_prefix: Tensor | None
    block_table: Tensor | None
    batch: int
    tokens: int
    dtype: torch.dtype


def rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, hadamard: bool) -> Tensor:
    """RoPE (half rotation) and the online Hadamard transform, each rounded to the dtype of x [batch, tokens, h, D]."""
    if cos is not None and sin is not None:
        x = rotate(x, cos, sin)
    if hadamard:
        x = hadamard_transform(x, compute_dtype=torch.promote_types(x.dtype, torch.float32))
    return x.contiguous()


def append(a: Append) -> None:
    """Quantize and write tokens; those beyond the capacity are dropped."""
    k = rotated(a.k, a.cos, a.sin, a.rotate)
    batch, tokens = k.shape[:2]
    table = page_table(a.block_table, batch, a.k_codes)
    page_size = a.k_codes.shape[2]
    position = a.starts.long()[:, None] + torch.arange(tokens, device=k.device)
    inside = position < table.shape[1] * page_size
    sequence, token = inside.nonzero(as_tuple=True)
    position = position[sequence, token]
    page, slot = table[sequence, position // page_size], position % page_size
    _write(k[sequence, token], a.k_codes, a.k_params, page, slot, a.clip_k, False)
    _write(a.v[sequence, token], a.v_codes, a.v_params, page, slot, a.clip_v, True)


def _write(x: Tensor, codes: Tensor, params: Tensor, page: Tensor, slot: Tensor, clip: float, values: bool) -> None:
    """Quantize x [tokens, kv_heads, D] into (page, slot) of the pools."""
    head_dim, heads = x.shape[-1], torch.arange(x.shape[1], device=x.device)[:, None]
    if is_static(params):
        new = (quantize(x, QParams(params[:, None, None]), _STATIC) + STATIC_ZERO).byte()
    else:
        group = head_dim // params.shape[3]
        scheme = QuantizationScheme(bits=4, symmetric=False, granularity="head", group_size=group, clip_ratio=clip)
        qparams = choose_qparams(x, scheme)
        new = quantize(x, qparams, scheme)
        scale_and_zero = torch.cat([qparams.scale, cast(Tensor, qparams.zero_point)], dim=-1)
        params[page[:, None], heads.T, slot[:, None]] = scale_and_zero.to(params.dtype)
    low, high = pair_columns(head_dim, values, x.device)
    planes = codes.view(*codes.shape[:2], -1)
    planes[page[:, None, None], heads, byte_offsets(slot, head_dim, values)[:, None]] = (
        new[..., low] | new[..., high] << 4
    )


def page_table(block_table: Tensor | None, batch: int, pool: Tensor) -> Tensor:
    """int64 [batch, pages of a sequence]; without a table, sequence b owns the b-th run of pages."""
    if block_table is not None:
        return block_table.long()
    return torch.arange(pool.shape[0], device=pool.device).view(batch, -1)


def values_of(codes: Tensor, params: Tensor, table: Tensor, tokens: int, values: bool, dtype: torch.dtype) -> Tensor:
    """(code - zero) * scale of the first tokens, [batch, kv_heads, tokens, D]; of static scales in their type."""
    integers = unpack_pages(codes[table], values).movedim(1, 2).flatten(2, 3)[:, :, :tokens]
    if is_static(params):
        signed = integers.to(torch.int8) - STATIC_ZERO
        return dequantize_codes(signed, QParams(params[:, None, None, None]), _STATIC, dtype)
    scale, zero = params[table].movedim(1, 2).flatten(2, 3)[:, :, :tokens].to(dtype).unbind(-1)
    grouped = integers.to(dtype).unflatten(-1, (scale.shape[-1], -1))
    return ((grouped - zero[..., None]) * scale[..., None]).flatten(-2)


def with_prefix(prefix: Tensor | None, x: Tensor) -> Tensor:
    """x [batch, kv_heads, tokens, D] with the prefix [kv_heads, prefix, D] in the place of its first tokens."""
    if prefix is None:
        return x
    first = prefix[:, : x.shape[2]].to(x).expand(len(x), -1, -1, -1)
    return torch.cat([first, x[:, :, prefix.shape[1] :]], dim=2)


def attend(a: Attend) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in float64; a sequence without tokens, and without a prefix, gives zeros."""
    batch, _, head_dim = a.q.shape
    x = rotated(a.q[:, None], a.cos, a.sin, False).double()
    x = (hadamard_transform(x) if a.rotate else x).squeeze(1)
    table = page_table(a.block_table, batch, a.k_codes)
    capacity = table.shape[1] * a.k_codes.shape[2]
    prefix = 0 if a.k_prefix is None else a.k_prefix.shape[1]
    longest = min(capacity, max(prefix, int(a.lengths.max()) + a.new_tokens))
    k = with_prefix(a.k_prefix, values_of(a.k_codes, a.k_params, table, longest, False, torch.float64))
    v = with_prefix(a.v_prefix, values_of(a.v_codes, a.v_params, table, longest, True, torch.float64))
    grouped = x.unflatten(1, (k.shape[1], -1))
    seen = (a.lengths.long() + a.new_tokens).clamp(min=prefix)
    present = torch.arange(longest, device=a.q.device) < seen[:, None]
    scores = (grouped @ k.mT * head_dim**-0.5).masked_fill(~present[:, None, None], -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v.masked_fill(~present[:, None, :, None], 0.0)
    return out.flatten(1, 2).to(a.q.dtype)


def dequantize(a: Dequantize) -> tuple[Tensor, Tensor]:
    """(code - zero) * scale in float32 (float64 where that is asked for), rounded to dtype."""
    compute = torch.promote_types(a.dtype, torch.float32)
    table = page_table(a.block_table, a.batch, a.k_codes)
    return (
        with_prefix(a.k_prefix, values_of(a.k_codes, a.k_params, table, a.tokens, False, compute).to(a.dtype)),
        with_prefix(a.v_prefix, values_of(a.v_codes, a.v_params, table, a.tokens, True, compute).to(a.dtype)),
    )
