"""Time of one decoding step of attention: the new token enters the cache, then its queries attend to all of it.

QuaRot Table 15 (append and decode of the 2048th token, App. A.10). Neither side applies RoPE, as in the paper. The
16-bit baseline keeps keys and values in one static tensor and takes torch's fastest attention for the shape.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reproduction.benchmarks.arguments import DecodeAttentionArguments, PrefixedAttentionArguments
from reproduction.benchmarks.timing import Case, Measurements, fastest, gpu, measure
from rotquant.kernels.attention.cache import Int4KVCache
from rotquant.kernels.attention.operator import kv_append, kv_attention
from rotquant.kernels.hadamard.operator import hadamard

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def decode_attention(arguments: DecodeAttentionArguments) -> Measurements:
    """Seconds of append and attention for one token of every sequence."""
    build = int4_case if arguments.implementation.startswith("int4") else float_case
    return measure(build(arguments, gpu()))


def prefixed_attention(arguments: PrefixedAttentionArguments) -> Measurements:
    """Seconds of append and attention for one token of every sequence after a prefix."""
    return measure(int4_case(arguments, gpu(), arguments.prefix))


def float_case(a: DecodeAttentionArguments, device: torch.device) -> Case:
    """Append by one copy of key and value, attention by torch."""
    q = torch.randn(a.batch, a.heads, 1, a.head_dim, dtype=torch.float16, device=device)
    new = torch.randn(2, a.batch, a.kv_heads, 1, a.head_dim, dtype=torch.float16, device=device)
    cache = torch.randn(2, a.batch, a.kv_heads, a.cache, a.head_dim, dtype=torch.float16, device=device)
    attend = _flex if a.implementation == "flex" else fastest_attention(q, cache[0], cache[1])

    def run(q: Tensor, new: Tensor, cache: Tensor) -> Tensor:
        cache[:, :, :, -1:].copy_(new)
        return attend(q, cache[0], cache[1])

    return Case(run, (q, new, cache), _operations(a))


def int4_case(a: DecodeAttentionArguments, device: torch.device, prefix: int = 0) -> Case:
    """Our kernels on a cache of random codes, after `prefix` tokens of 16 bits.

    A transform in float16 takes kernels of its own, as in the paper.
    """
    rotate, half = a.hadamard == "float32", a.hadamard == "float16"
    q = torch.randn(a.batch, a.heads, a.head_dim, dtype=torch.float16, device=device)
    k, v = torch.randn(2, a.batch, 1, a.kv_heads, a.head_dim, dtype=torch.float16, device=device)
    cache = random_cache(a, device, prefix)
    lengths, counters, clip = cache.lengths, cache.counters, (cache.clip_k, cache.clip_v)

    def run(q: Tensor, k: Tensor, v: Tensor, *cached: Tensor) -> Any:
        if half:
            q, k = _transformed(q), _transformed(k)
        pools, before = cached[:4], cached[4:] or (None, None)
        kv_append(k, v, None, None, *pools, lengths, None, rotate, *clip)
        return kv_attention(q, None, None, *pools, *before, lengths, 1, None, counters, rotate)

    pools = (cache.k_codes, cache.v_codes, cache.k_params, cache.v_params)
    before = () if cache.k_prefix is None or cache.v_prefix is None else (cache.k_prefix, cache.v_prefix)
    return Case(run, (q, k, v, *pools, *before), _operations(a))


def random_cache(a: DecodeAttentionArguments, device: torch.device, prefix: int = 0) -> Int4KVCache:
    """A cache of random codes with one token less than `a.cache` after the prefix, and with room for it."""
    size = (2, a.kv_heads, prefix, a.head_dim)
    keys, values = torch.randn(size, dtype=torch.float16, device=device)
    scale = torch.full((a.kv_heads,), 0.015, device=device)
    cache = Int4KVCache.allocate(
        *(a.batch, prefix + a.cache, a.kv_heads, a.head_dim),
        device=device,
        prefix=(keys, values) if prefix else None,
        scales=(scale, scale.clone()) if a.implementation == "int4-static" else None,
    )
    cache.lengths.fill_(prefix + a.cache - 1)
    for codes in (cache.k_codes, cache.v_codes):
        codes.random_(0, 256)
    if a.implementation != "int4-static":
        for params in (cache.k_params, cache.v_params):
            params[..., 0].uniform_(0.01, 0.02)
            params[..., 1].fill_(7)
    return cache


def _transformed(x: Tensor) -> Tensor:
    """The Hadamard transform of every head, computed in float16."""
    return hadamard(x.view(-1, x.shape[-1]), 0, False, True).view_as(x)


def _operations(a: DecodeAttentionArguments) -> float:
    return 4.0 * a.batch * a.heads * a.cache * a.head_dim


def decode_attentions() -> dict[str, Attention]:
    """Ways to attend with one query token: q [batch, heads, 1, d], k and v [batch, kv_heads, cache, d].

    Query heads that share a key head can be left to torch (enable_gqa) or be given to it as rows of one query. The
    memory-efficient backend is left out: it does not split the sequence over multiprocessors, and took 1.7 to 5 times
    as long on an H200.
    """

    def form(backend: SDPBackend, as_rows: bool) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = q.view(q.shape[0], k.shape[1], -1, q.shape[3]) if as_rows else q
            with sdpa_kernel(backend):
                y = scaled_dot_product_attention(queries, k, v, enable_gqa=queries.shape[1] != k.shape[1])
            return y.reshape(q.shape)

        return attend

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    forms = {"grouped": False, "rows": True}
    return {
        f"{backend.name.lower()}, {name}": form(backend, as_rows)
        for name, as_rows in forms.items()
        for backend in backends
    }


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's flex_attention, which for one query token splits the cache over multiprocessors; it is compiled once."""
    return _compiled_flex()(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def fastest_attention(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """The fastest of `decode_attentions` on these tensors, found by timing each.

    Raises:
        KernelError: none of them runs.
    """
    same = q.shape[1] == k.shape[1]  # every head has its own keys: both forms are one call
    return fastest(
        Case(attend, (q, k, v)) for name, attend in decode_attentions().items() if not (same and name.endswith("rows"))
    ).run
