"""The 4-bit KV cache: its layout, its references against the simulated cache, its kernels against the references."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rotquant.errors import KernelError
from rotquant.hadamard import hadamard_transform
from rotquant.kernels.kv import Int4KVCache
from rotquant.kernels.kv_layout import byte_offsets, unpack_pages
from rotquant.kv_cache import KVQuantizer, QuantizedCacheLayer
from rotquant.schemes import QuantizationScheme, RotationScheme

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.operators.SlowKernelWarning")


def filled_cache(
    batch: int, tokens: int, kv_heads: int, head_dim: int, **options: object
) -> tuple[Int4KVCache, Tensor, Tensor]:
    """A float32 cache on the CPU with random tokens in it, and these tokens [batch, tokens, kv_heads, head_dim]."""
    cache = Int4KVCache.allocate(batch, tokens + 3, kv_heads, head_dim, device="cpu", **options)
    k, v = (torch.randn(batch, tokens, kv_heads, head_dim) for _ in range(2))
    cache.append(k, v)
    cache.lengths.fill_(tokens)
    return cache, k, v


def simulated(k: Tensor, v: Tensor, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values as the simulated cache returns them (keys rotated back), [batch, kv_heads, tokens, head_dim]."""
    scheme = QuantizationScheme(bits=4, symmetric=False, granularity="head", group_size=group_size, clip_ratio=0.95)
    layer = QuantizedCacheLayer(KVQuantizer(scheme, scheme, RotationScheme()))
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


def test_rope_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 5, 4, 64).half(), torch.randn(2, 5, 2, 64).half()
    angle = torch.randn(1, 5, 32).repeat(1, 1, 2)
    cos, sin = angle.cos().half(), angle.sin().half()
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    rotated = torch.ops.rotquant.kv_rotate(q, cos, sin, False)
    assert torch.equal(rotated, expected_q.transpose(1, 2))
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


def test_the_operators_have_shape_rules() -> None:
    cache, k, v = filled_cache(2, 20, 2, 64)
    pools = cache.k_codes, cache.v_codes, cache.k_params, cache.v_params
    ops = torch.ops.rotquant
    for op, arguments in (
        (ops.kv_append, (k, v, None, None, *pools, cache.lengths, None, True, 0.95, 0.95)),
        (
            ops.kv_attention,
            (torch.randn(2, 4, 64), None, None, *pools, cache.lengths, 0, None, cache.counters, True),
        ),
        (ops.kv_dequantize, (*pools, None, 2, 20, torch.float16)),
        (ops.kv_rotate, (k, None, None, True)),
    ):
        torch.library.opcheck(op.default, arguments)
