"""The 4-bit KV cache: its layout, its references against the simulated cache, its kernels against the references."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rotquant.foundation.errors import KernelError
from rotquant.kernels.attention.cache import Int4KVCache
from rotquant.kernels.launch.operators import references
from rotquant.kernels.layouts.cache import byte_offsets, unpack_pages
from rotquant.models.simulation.kv_cache import KVQuantizer, QuantizedCacheLayer
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.hadamard import hadamard_transform
from rotquant.tensors.quantization import QParams, fake_quantize

POOLS = ("k_codes", "v_codes", "k_params", "v_params")

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")


def filled_cache(
    batch: int, tokens: int, kv_heads: int, head_dim: int, **options: object
) -> tuple[Int4KVCache, Tensor, Tensor]:
    """A float32 cache on the CPU with random tokens in it, and these tokens [batch, tokens, kv_heads, head_dim]."""
    prefix = 0 if options.get("prefix") is None else options["prefix"][0].shape[1]
    cache = Int4KVCache.allocate(batch, prefix + tokens + 3, kv_heads, head_dim, device="cpu", **options)
    k, v = (torch.randn(batch, tokens, kv_heads, head_dim) for _ in range(2))
    cache.append(k, v)
    cache.lengths.add_(tokens)
    return cache, k, v


def simulated(k: Tensor, v: Tensor, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values as the simulated cache returns them (keys rotated back), [batch, kv_heads, tokens, head_dim]."""
    scheme = QuantizationScheme(bits=4, symmetric=False, granularity="head", group_size=group_size, clip_ratio=0.95)
    layer = QuantizedCacheLayer(KVQuantizer(scheme, scheme, RotationScheme().transforms))
    return layer.update(k.transpose(1, 2), v.transpose(1, 2))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 96, 128])
def test_a_page_holds_every_pair_once(head_dim: int, values: bool) -> None:
    offsets = byte_offsets(torch.arange(64), head_dim, values)
    assert torch.equal(offsets.flatten().sort().values, torch.arange(64 * head_dim // 2))


def test_a_lane_owns_what_the_layout_says() -> None:
    pages = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    keys, values = unpack_pages(pages, False), unpack_pages(pages, True)
    for g, t, block in ((0, 0, 0), (5, 2, 1), (7, 3, 3)):
        row = pages[16 * block + g].view(4, 4, 4)[t]
        for word in range(4):
            elements = keys[16 * block + g, 32 * word + 8 * t :][:8]
            assert torch.equal(row[word] & 15, elements[0::2])
            assert torch.equal(row[word] >> 4, elements[1::2])
        words = pages[16 * block : 16 * block + 16].reshape(2, 32, 4, 4)[:, 4 * g + t]
        for tile in range(8):
            for byte, token in enumerate((2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9)):
                low, high = values[16 * block + token, 16 * tile + g], values[16 * block + token, 16 * tile + g + 8]
                assert words[tile // 4, tile % 4, byte] == low | high << 4


@pytest.mark.parametrize(("head_dim", "group_size"), [(16, None), (48, None), (64, 32), (128, None), (128, 32)])
def test_the_cache_holds_what_the_simulation_holds(head_dim: int, group_size: int | None) -> None:
    cache, k, v = filled_cache(2, 21, 3, head_dim, group_size=group_size)
    rotated, values = cache.dequantize(21, torch.float32)
    keys = hadamard_transform(rotated, inverse=True)
    expected_keys, expected_values = simulated(k, v, group_size)
    # Same codes; scales rounded to float16 (2^-12) on values of at most about six.
    torch.testing.assert_close(values, expected_values, rtol=2**-11, atol=1e-6)
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=6 * 2**-11)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128), (3, 1, 32)])
def test_attention_is_that_of_the_simulated_cache(heads: int, kv_heads: int, head_dim: int) -> None:
    cache, k, v = filled_cache(2, 40, kv_heads, head_dim)
    q = torch.randn(2, heads, head_dim)
    expected = scaled_dot_product_attention(q[:, :, None], *simulated(k, v, None), enable_gqa=True)[:, :, 0]
    torch.testing.assert_close(cache.attend(q), expected, rtol=0, atol=2e-3)  # float16 scales move scores by 2^-12


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128), (3, 1, 32)])
def test_a_prefix_is_seen_as_it_is(heads: int, kv_heads: int, head_dim: int) -> None:
    prefix = torch.randn(2, kv_heads, 5, head_dim)
    cache, k, v = filled_cache(2, 40, kv_heads, head_dim, prefix=tuple(prefix), params_dtype=torch.float32)
    q, texts = torch.randn(2, heads, head_dim), simulated(k, v, None)
    keys, values = (torch.cat([a.expand(2, -1, -1, -1), b], dim=2) for a, b in zip(prefix, texts, strict=True))
    rotated, found = cache.dequantize(45, torch.float32)
    torch.testing.assert_close(found, values, rtol=0, atol=1e-5)
    torch.testing.assert_close(hadamard_transform(rotated, inverse=True), keys, rtol=0, atol=1e-5)
    for length in (45, 12, 5):  # all of the text, a part, none
        cache.lengths.fill_(length)
        expected = scaled_dot_product_attention(
            q[:, :, None], keys[:, :, :length], values[:, :, :length], enable_gqa=True
        )
        torch.testing.assert_close(cache.attend(q), expected[:, :, 0], rtol=0, atol=1e-5)


STATIC = QuantizationScheme(bits=4, granularity="head", dynamic=False)


def static_scales(kv_heads: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Scales of keys and values, all different, by which normal numbers reach every code and some are clipped."""
    scale = torch.linspace(0.2, 0.5, 2 * kv_heads, device=device)
    return scale[:kv_heads].clone(), scale[kv_heads:].clone()


def statically_rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x [batch, tokens, kv_heads, head_dim] by `rotquant.tensors`, its static parameters as the simulation has them."""
    return fake_quantize(x.transpose(1, 2), STATIC, QParams(scale.view(-1, 1, 1, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128), (3, 1, 32), (4, 2, 48)])
def test_static_scales_round_as_those_of_tensors(
    heads: int, kv_heads: int, head_dim: int, prefix: int, dtype: torch.dtype
) -> None:
    scales = static_scales(kv_heads)
    before = torch.randn(2, kv_heads, prefix, head_dim)
    options = {"scales": scales, "prefix": tuple(before) if prefix else None}
    cache = Int4KVCache.allocate(2, prefix + 43, kv_heads, head_dim, device="cpu", **options)
    q = torch.randn(2, heads, head_dim, dtype=dtype)
    k, v = torch.randn(2, 2, 40, kv_heads, head_dim, dtype=dtype)
    cache.append(k[:, :17], v[:, :17])
    cache.lengths.add_(17)
    cache.append(k[:, 17:], v[:, 17:])
    cache.lengths.add_(23)
    rounded = statically_rounded(hadamard_transform(k), scales[0]), statically_rounded(v, scales[1])
    rotated, values = (
        torch.cat([a.to(dtype).expand(2, -1, -1, -1), b], dim=2)
        for a, b in zip((hadamard_transform(before[0]), before[1]), rounded, strict=True)
    )
    found = cache.dequantize(prefix + 40, dtype)
    assert torch.equal(found[1], values)
    torch.testing.assert_close(found[0], rotated, rtol=0, atol=1e-6)  # the prefix's transform, in float32
    keys = hadamard_transform(rotated, inverse=True)
    expected = scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
    torch.testing.assert_close(cache.attend(q), expected, rtol=0, atol=1e-5)
    assert torch.equal(torch.stack([cache.k_params, cache.v_params]), torch.stack(static_scales(kv_heads)))


def test_static_scales_of_another_shape_are_refused() -> None:
    scale = torch.ones(2)
    for other in (torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float16)):
        with pytest.raises(KernelError, match="takes one float32 number for each of 2 heads"):
            Int4KVCache.allocate(1, 64, 2, 64, device="cpu", scales=(scale, other))


def test_a_prefix_of_another_shape_is_refused() -> None:
    with pytest.raises(
        KernelError, match=r"the prefix has values of shape \(2, 4, 64\), and the cache takes \(2, 3, 64\)"
    ):
        Int4KVCache.allocate(1, 64, 2, 64, device="cpu", prefix=(torch.randn(2, 3, 64), torch.randn(2, 4, 64)))


def test_rope_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 5, 4, 64).half(), torch.randn(2, 5, 2, 64).half()
    angle = torch.randn(1, 5, 32).repeat(1, 1, 2)
    cos, sin = angle.cos().half(), angle.sin().half()
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    rotated = torch.ops.rotquant.kv_rotate(q, cos, sin, False, 0)
    assert torch.equal(rotated, expected_q.transpose(1, 2))
    behind = torch.ops.rotquant.kv_rotate(q, cos, sin, False, 3)
    assert behind[:, :3].count_nonzero() == 0
    assert torch.equal(behind[:, 3:], rotated)
    caches = [Int4KVCache.allocate(2, 64, 2, 64, device="cpu") for _ in range(2)]
    caches[0].append(k, k, cos, sin)
    caches[1].append(expected_k.transpose(1, 2), k)
    assert torch.equal(caches[0].k_codes, caches[1].k_codes)


def test_tokens_one_by_one_are_tokens_at_once() -> None:
    cache, k, v = filled_cache(2, 19, 2, 64)
    other = Int4KVCache.allocate(2, 22, 2, 64, device="cpu")
    for token in range(19):
        other.append(k[:, token : token + 1], v[:, token : token + 1])
        other.lengths.add_(1)
    for name in ("k_codes", "v_codes", "k_params", "v_params", "lengths"):
        assert torch.equal(getattr(cache, name), getattr(other, name))


def test_tokens_beyond_the_capacity_are_dropped() -> None:
    cache, *_ = filled_cache(1, 60, 1, 32)
    before = cache.k_codes.clone()
    cache.append(*(torch.randn(1, 9, 1, 32) for _ in range(2)))
    assert torch.equal(cache.k_codes[:, :, :60], before[:, :, :60])
    assert cache.capacity == 64


def test_a_head_size_without_a_layout_is_refused() -> None:
    with pytest.raises(KernelError, match="head_dim 72 has no 4-bit KV layout"):
        Int4KVCache.allocate(1, 64, 1, 72, device="cpu")
    with pytest.raises(KernelError, match="KV group size 36 does not divide head_dim 96"):
        Int4KVCache.allocate(1, 64, 1, 96, group_size=36, device="cpu")


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_the_operators_have_shape_rules(tokens: int, static: bool) -> None:
    before = tuple(torch.randn(2, 2, tokens, 64)) if tokens else None
    cache, k, v = filled_cache(2, 20, 2, 64, prefix=before, scales=static_scales(2) if static else None)
    pools = cache.k_codes, cache.v_codes, cache.k_params, cache.v_params
    prefix = cache.k_prefix, cache.v_prefix
    ops = torch.ops.rotquant
    for op, arguments in (
        (ops.kv_append, (k, v, None, None, *pools, cache.lengths, None, True, 0.95, 0.95)),
        (
            ops.kv_attention,
            (torch.randn(2, 4, 64), None, None, *pools, *prefix, cache.lengths, 0, None, cache.counters, True),
        ),
        (ops.kv_dequantize, (*pools, *prefix, None, 2, 20, torch.float16)),
        (ops.kv_rotate, (k, None, None, True, tokens)),
    ):
        torch.library.opcheck(op.default, arguments)


def gpu_cache(
    batch: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    *,
    group_size: int | str | None = None,
    page_size: int | None = None,
    **options: object,
) -> Int4KVCache:
    """A cache on the GPU whose memory is poison: codes of 0x7f, scales that are not numbers. Paged: shuffled pages."""
    static = group_size == "static"
    scales = static_scales(kv_heads, "cuda") if static else None
    group_size = None if static else group_size
    cache = Int4KVCache.allocate(batch, capacity, kv_heads, head_dim, group_size=group_size, scales=scales, **options)
    if page_size is not None:
        pages = -(-capacity // page_size)
        table = torch.randperm(batch * pages + 2, device="cuda")[: batch * pages].view(batch, pages).int()
        shape = (batch * pages + 2, kv_heads, page_size)
        codes = [torch.empty(*shape, head_dim // 2, dtype=torch.uint8, device="cuda") for _ in range(2)]
        params = [x if static else x.new_empty(*shape, *x.shape[3:]) for x in (cache.k_params, cache.v_params)]
        cache = dataclasses.replace(
            cache,
            **dict(zip(POOLS, codes + params, strict=True)),
            block_table=table.contiguous(),
        )
    for codes in (cache.k_codes, cache.v_codes):
        codes.fill_(0x7F)
    for params in () if static else (cache.k_params, cache.v_params):
        params.fill_(torch.nan)
    return cache


def on_cpu(cache: Int4KVCache) -> Int4KVCache:
    """A copy on the CPU, where the references run."""
    fields = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    return Int4KVCache(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in fields.items()})


def projection(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v of one merged projection; keys with a mean, as real ones have."""
    merged = torch.randn(batch, tokens, (heads + 2 * kv_heads) * head_dim, device="cuda")
    q, k, v = merged.to(dtype).unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=2)
    k += 2 * torch.randn(kv_heads, head_dim, device="cuda").to(dtype)
    return q, k, v


def angles(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.rand(1, tokens, head_dim // 2, device="cuda").mul(6).repeat(1, 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected.double()).norm() / expected.double().norm())


#: Tokens of a prefix: fewer than a kernel loads at once, more, a whole tile and a part of the next.
PREFIXES = (1, 4, 10, 41)

GPU_CASES = [
    # batch, tokens, heads, kv_heads, head_dim, group_size or static scales, page_size
    (1, 1, 1, 1, 128, None, None),
    (2, 17, 4, 4, 128, None, None),
    (3, 129, 8, 1, 128, None, None),
    (1, 2048, 32, 8, 128, None, None),
    (2, 333, 12, 1, 64, None, None),
    (2, 700, 16, 1, 128, 32, None),
    (3, 100, 9, 3, 128, 64, 64),
    (3, 700, 8, 2, 64, 32, 128),
    (1, 5000, 4, 4, 64, None, 64),
    (1, 1, 1, 1, 128, "static", None),
    (3, 129, 8, 1, 128, "static", None),
    (2, 333, 12, 1, 64, "static", None),
    (3, 700, 8, 2, 128, "static", 64),
    (1, 5000, 4, 4, 64, "static", 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_append_kernel_writes_what_the_reference_writes(case: tuple, dtype: torch.dtype) -> None:
    batch, tokens, heads, kv_heads, head_dim, group_size, page_size = case
    _, k, v = projection(batch, tokens, heads, kv_heads, head_dim, dtype)
    rope = angles(tokens, head_dim, dtype)
    cache = gpu_cache(batch, tokens + 3, kv_heads, head_dim, group_size=group_size, page_size=page_size)
    expected = on_cpu(cache)
    for part in (slice(0, 5), slice(5, None)):  # the second part starts inside a block of 16 positions
        if k[:, part].numel():
            angle = [x[:, part].contiguous() for x in rope]
            cache.append(k[:, part], v[:, part], *angle)
            expected.append(k[:, part].cpu(), v[:, part].cpu(), *(x.cpu() for x in angle))
        cache.lengths.fill_(5)
        expected.lengths.fill_(5)
    written = on_cpu(cache)
    assert torch.equal(written.v_codes, expected.v_codes)
    assert torch.equal(written.v_params.view(torch.uint8), expected.v_params.view(torch.uint8))
    # Sums of the Hadamard transform in another order: a last bit now and then, and a code at the edge of its interval.
    assert (written.k_codes != expected.k_codes).sum() <= 1e-3 * k.numel() + 1
    assert torch.equal(written.k_params.isnan(), expected.k_params.isnan())
    torch.testing.assert_close(
        written.k_params.nan_to_num(), expected.k_params.nan_to_num(), rtol=2**-9, atol=1.0
    )  # a zero point may move by one


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_attention_kernel_agrees_with_float64(case: tuple, dtype: torch.dtype) -> None:
    batch, tokens, heads, kv_heads, head_dim, group_size, page_size = case
    q, k, v = projection(batch, tokens, heads, kv_heads, head_dim, dtype)
    cache = gpu_cache(batch, tokens + 3, kv_heads, head_dim, group_size=group_size, page_size=page_size)
    cache.append(k, v)
    cache.lengths.copy_(torch.linspace(max(1, tokens // 3), tokens, batch) - 1)
    rope = angles(1, head_dim, dtype)
    out = cache.attend(q[:, -1], *rope, new_tokens=1)
    with references():
        expected = cache.attend(q[:, -1], *rope, new_tokens=1)
    # Rotated queries and weights are rounded to float16 (2^-12 each), the output to its type (2^-12 or 2^-9).
    assert relative_error(out, expected) < (1e-3 if dtype == torch.float16 else 4e-3)
    assert not cache.counters.any()


def prefix_before(k: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a prefix, [kv_heads, tokens, head_dim]; keys as large as those of an outlier token."""
    prefix = torch.randn(2, k.shape[2], tokens, k.shape[3], device=k.device)
    return (3 * prefix[0]).to(k.dtype), prefix[1].to(k.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_attention_kernel_sees_a_prefix(case: tuple, dtype: torch.dtype, prefix: int) -> None:
    batch, tokens, heads, kv_heads, head_dim, group_size, page_size = case
    q, k, v = projection(batch, tokens, heads, kv_heads, head_dim, dtype)
    options = {"group_size": group_size, "page_size": page_size, "prefix": prefix_before(k, prefix)}
    cache = gpu_cache(batch, prefix + tokens + 3, kv_heads, head_dim, **options)  # poison in the prefix's places too
    cache.append(k, v)
    rope = angles(1, head_dim, dtype)
    for present in (tokens // 3, tokens):
        cache.lengths.copy_(prefix + torch.linspace(present, tokens, batch) - 1)
        out = cache.attend(q[:, -1], *rope, new_tokens=1)
        with references():
            expected = cache.attend(q[:, -1], *rope, new_tokens=1)
        assert relative_error(out, expected) < (1e-3 if dtype == torch.float16 else 4e-3)
        assert not cache.counters.any()
    read = cache.dequantize(prefix + tokens, dtype)
    with references():
        for x, wanted in zip(read, cache.dequantize(prefix + tokens, dtype), strict=True):
            assert torch.equal(x, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [None, "static"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_small_and_large_values_lose_no_precision(scale: float, group_size: str | None) -> None:
    q, k, v = projection(2, 400, 8, 2, 128, torch.float16)
    cache = gpu_cache(2, 400, 2, 128, group_size=group_size)
    if group_size == "static":
        cache.v_params.mul_(scale)
    cache.append(k, v * scale)
    cache.lengths.fill_(400)
    with references():
        expected = cache.attend(q[:, -1])
    assert relative_error(cache.attend(q[:, -1]), expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_prefill_reads_the_same_numbers(case: tuple) -> None:
    batch, tokens, heads, kv_heads, head_dim, group_size, page_size = case
    q, k, v = projection(batch, tokens, heads, kv_heads, head_dim, torch.float16)
    cache = gpu_cache(batch, tokens + 3, kv_heads, head_dim, group_size=group_size, page_size=page_size)
    cache.append(k, v)
    rope = angles(tokens, head_dim, torch.float16)
    rotated = cache.rotate_queries(q, *rope, gap=2)
    with references():
        expected, expected_queries = cache.dequantize(tokens), cache.rotate_queries(q, *rope, gap=2)
    for x, wanted in zip(cache.dequantize(tokens), expected, strict=True):
        assert torch.equal(x, wanted)
    assert relative_error(rotated, expected_queries) < 1e-4  # last bits, from the order of sums


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [None, "static"])
@pytest.mark.parametrize("prefix", [0, 4])
@pytest.mark.captures
def test_a_captured_step_serves_every_length(prefix: int, group_size: str | None) -> None:
    q, k, v = projection(2, 1, 8, 2, 128, torch.float16)
    before = prefix_before(k, prefix) if prefix else None
    cache = gpu_cache(2, prefix + 300, 2, 128, prefix=before, group_size=group_size)
    out = torch.empty(2, 8, 128, dtype=torch.float16, device="cuda")

    def step() -> None:
        cache.append(k, v)
        out.copy_(cache.attend(q[:, -1], new_tokens=1))
        cache.lengths.add_(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in range(2, 300):
        for new in (q, k, v):
            new.copy_(torch.randn_like(new))
        graph.replay()
        if length % 37 == 0:
            with references():
                assert relative_error(out, cache.attend(q[:, -1])) < 1e-3


@pytest.mark.gpu
def test_what_the_kernels_cannot_do_is_refused() -> None:
    q, k, v = projection(2, 5, 4, 2, 128, torch.float16)
    cache = gpu_cache(2, 64, 2, 128)
    with pytest.raises(KernelError, match="keys are on cpu"):
        cache.append(k.cpu(), v.cpu())
    with pytest.raises(KernelError, match="float32, and the kernel takes float16 or bfloat16"):
        cache.append(k.float(), v.float())
    with pytest.raises(KernelError, match="not contiguous along heads"):
        cache.append(k.transpose(1, 2).contiguous().transpose(1, 2), v)
    with pytest.raises(KernelError, match="3 axes, the last of 64 or 128"):
        cache.attend(torch.randn(2, 4, 96, device="cuda").half())
    with pytest.raises(KernelError, match="1 to 16 query heads"):
        cache.attend(torch.randn(2, 34, 128, device="cuda").half())
    with pytest.raises(KernelError, match="RoPE needs both"):
        cache.attend(q[:, -1], q[:, :1, 0].contiguous(), None)
    with pytest.raises(KernelError, match="has room for 64"):
        cache.dequantize(65)
    with pytest.raises(KernelError, match="key scales"):
        dataclasses.replace(cache, k_params=cache.k_params.float()).attend(q[:, -1])
    for params in (cache.k_params[0, :, 0, 0, 0].clone(), torch.ones(3, device="cuda")):  # float16; of another head
        with pytest.raises(KernelError, match="key scales"):
            dataclasses.replace(cache, k_params=params, v_params=torch.ones(2, device="cuda")).attend(q[:, -1])
    with pytest.raises(KernelError, match="a prefix has both keys and values"):
        dataclasses.replace(cache, k_prefix=k[0].transpose(0, 1).contiguous()).attend(q[:, -1])
    fixed = k[0].transpose(0, 1).contiguous()
    with pytest.raises(KernelError, match="prefix values"):
        dataclasses.replace(cache, k_prefix=fixed, v_prefix=fixed[:, :3].contiguous()).attend(q[:, -1])
