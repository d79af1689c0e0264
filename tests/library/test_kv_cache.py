"""The quantized KV cache: every token quantized once, by itself, at prefill and at decode, in any batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.models.architectures import decoder_layers, rotary
from rotquant.models.simulation.kv_cache import KVQuantizer, QuantizedCache
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors import hadamard
from rotquant.tensors.quantization import QParams, fake_quantize
from rotquant.weights.bits import bits_per_cached
from tests.helpers.models import checkpointed_loss, tiny_model, tiny_tokens

PER_HEAD = QuantizationScheme(bits=4, symmetric=False, granularity="head", clip_ratio=0.95)
GROUPED = QuantizationScheme(bits=3, granularity="group", group_size=8)
STATIC_HEADS = QuantizationScheme(bits=4, granularity="head", dynamic=False)
STATIC_TENSOR = QuantizationScheme(bits=8, granularity="tensor", dynamic=False)
SCHEMES = [
    (PER_HEAD, PER_HEAD),
    (GROUPED, PER_HEAD),
    (None, PER_HEAD),
    (GROUPED, None),
    (STATIC_HEADS, STATIC_TENSOR),
    (STATIC_TENSOR, STATIC_HEADS),
    (None, STATIC_HEADS),
]
#: Scales of two layers, of two heads or of a tensor.
OF_HEADS = {
    (layer, what): QParams(torch.tensor([0.3, 0.5]).view(2, 1, 1, 1)) for layer in (0, 1) for what in ("keys", "values")
}
OF_TENSOR = {
    (layer, what): QParams(torch.tensor(0.02 * (1 + layer))) for layer in (0, 1) for what in ("keys", "values")
}


def static(keys: QuantizationScheme | None, values: QuantizationScheme | None) -> dict[tuple[int, str], QParams]:
    """Static scales for schemes that need some."""
    schemes = {"keys": keys, "values": values}
    return {
        (layer, what): (OF_TENSOR if scheme.granularity == "tensor" else OF_HEADS)[layer, what]
        for what, scheme in schemes.items()
        for layer in (0, 1)
        if scheme is not None and not scheme.dynamic
    }


def states(tokens: int, seed: int, dtype: torch.dtype = torch.float32, head_dim: int = 16) -> tuple[Tensor, Tensor]:
    """Keys and values [2, 2 heads, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 2, tokens, head_dim, generator=generator).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("keys", "values"), SCHEMES)
def test_a_token_is_the_same_however_it_entered(
    keys: QuantizationScheme | None, values: QuantizationScheme | None, dtype: torch.dtype
) -> None:
    quantizer = KVQuantizer(keys, values, RotationScheme().transforms, static=static(keys, values))
    k, v = states(7, 0, dtype)
    at_once = QuantizedCache(quantizer).update(k, v, 0)
    piecewise = QuantizedCache(quantizer)
    for piece in (slice(0, 3), slice(3, 4), slice(4, 7)):
        out = piecewise.update(k[:, :, piece], v[:, :, piece], 0)
    # The Hadamard product's rounding may depend on how many rows it has: an error of one unit in the last place.
    unit = torch.finfo(dtype).eps * 8
    for one, other, without_storing in zip(at_once, out, quantizer.fake(k, v, 0), strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one, other, atol=unit)
        assert torch.allclose(one, without_storing, atol=unit)


def test_static_scales_are_each_layer_s_and_nothing_of_them_is_stored_by_token() -> None:
    quantizer = KVQuantizer(None, STATIC_HEADS, static=OF_HEADS | {(1, "values"): QParams(torch.ones(2, 1, 1, 1))})
    k, v = states(5, 0)
    cache = QuantizedCache(quantizer)
    for layer, scales in ((0, torch.tensor([0.3, 0.5])), (1, torch.ones(2))):
        _, read = cache.update(k, v, layer)
        for head, scale in enumerate(scales):
            codes = (v[:, head] / scale).round().clamp(-8, 7)
            assert torch.equal(cache.layers[layer].values[:, head], codes.to(torch.int8))
            assert torch.equal(read[:, head], codes * scale)
        assert cache.layers[layer].value_qparams == ()


def test_static_scales_of_a_layer_that_are_missing_are_one_clear_error() -> None:
    with pytest.raises(RecipeError, match="static scales are missing for layer 0, keys: calibrate them"):
        wrap(tiny_model(), RuntimeQuantization(keys=STATIC_HEADS))


def test_the_cache_stores_integers() -> None:
    cache = QuantizedCache(KVQuantizer(GROUPED, PER_HEAD))
    cache.update(*states(5, 0), 0)
    layer = cache.layers[0]
    assert (layer.keys.dtype, layer.values.dtype) == (torch.int8, torch.uint8)
    assert (layer.keys.unique().numel(), layer.values.max().item()) <= (8, 15)
    assert [part.shape for part in layer.key_qparams] == [(2, 2, 5, 2, 1)]
    assert [part.shape for part in layer.value_qparams] == [(2, 2, 5, 1, 1)] * 2


@pytest.mark.parametrize("head_dim", [12, 16])  # H_12 is not symmetric: its inverse is another matrix
def test_scores_are_those_of_rotated_queries_and_rotated_quantized_keys(head_dim: int) -> None:
    """QuaRot's stage 1d: softmax sees (q H)(Q(k H))^T, which this cache reaches without touching queries."""
    k, v = states(9, 0, torch.float64, head_dim)
    q, _ = states(4, 1, torch.float64, head_dim)
    cached, _ = QuantizedCache(KVQuantizer(PER_HEAD, PER_HEAD, RotationScheme().transforms)).update(k, v, 0)
    rotated_q, rotated_k = hadamard.hadamard_transform(q), hadamard.hadamard_transform(k)
    expected = rotated_q @ fake_quantize(rotated_k, PER_HEAD).mT
    assert torch.allclose(q @ cached.mT, expected, atol=1e-12)
    # and R3 matters: without it the quantized keys are others
    plain, _ = QuantizedCache(KVQuantizer(PER_HEAD, PER_HEAD, RotationScheme(keys=False).transforms)).update(k, v, 0)
    assert torch.equal(plain, fake_quantize(k, PER_HEAD))
    assert not torch.allclose(plain, cached, atol=1e-2)


def test_rotating_keys_there_and_back_is_the_identity() -> None:
    for head_dim in (12, 16, 64, 96, 128):
        quantizer = KVQuantizer(PER_HEAD, None, RotationScheme().transforms)
        k = torch.randn(3, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        chain = quantizer.chain(0, "keys")
        back = chain.inverse(chain(k))
        assert torch.allclose(back, k, atol=1e-12)


def test_logits_of_decoding_in_pieces_are_those_of_one_pass() -> None:
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens(batch=2, tokens=10)
    with (
        torch.no_grad(),
        wrap(model, RuntimeQuantization(RotationScheme(heads=False, mlp=False).transforms, None, PER_HEAD, PER_HEAD)),
    ):
        expected = model(tokens, use_cache=False).logits
        cache, logits = None, []
        for piece in tokens.split([4, 1, 1, 3, 1], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
    # float64: what remains is the rounding of transformers' float32 norms and rotary tables.
    assert (torch.cat(logits, dim=1) - expected).abs().max() < 1e-5


def test_beam_search_reorders_codes_and_scales() -> None:
    model, tokens = tiny_model(eos_token_id=None), tiny_tokens(2, 6)
    with wrap(model, RuntimeQuantization((), None, PER_HEAD, GROUPED)):
        with_cache = model.generate(tokens, max_new_tokens=5, num_beams=3, do_sample=False)
        without = model.generate(tokens, max_new_tokens=5, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("use_cache", [True, False])
def test_prefill_attends_to_quantized_keys_and_values(use_cache: bool) -> None:
    """transformers' own quantized cache returns exact states at prefill, which would hide the loss."""
    model, tokens = tiny_model(), tiny_tokens()
    expected = model(tokens).logits
    with wrap(model, RuntimeQuantization((), None, PER_HEAD, PER_HEAD)):
        assert (model(tokens, use_cache=use_cache).logits - expected).abs().max() > 0.01


def test_a_decoder_layer_called_by_itself_sees_quantized_states_too() -> None:
    """Layer-by-layer calibration calls decoder layers, not the model."""
    model = tiny_model()
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    positions = rotary(model)(x, torch.arange(6)[None])
    layer = decoder_layers(model)[0]
    expected = layer(x, position_embeddings=positions)
    with wrap(model, RuntimeQuantization((), None, PER_HEAD, PER_HEAD)):
        assert not torch.allclose(layer(x, position_embeddings=positions), expected, atol=1e-3)
    assert torch.equal(layer(x, position_embeddings=positions), expected)


def test_gradient_checkpointing_does_not_lose_the_quantization() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    with wrap(model, RuntimeQuantization((), None, PER_HEAD, PER_HEAD)):
        expected = model(tokens, labels=tokens, use_cache=False).loss
        loss = checkpointed_loss(model, tokens)
    assert torch.equal(loss, expected)


def test_an_empty_foreign_cache_is_replaced_and_a_filled_one_refused() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    filled = model(tokens, use_cache=True).past_key_values
    with wrap(model, RuntimeQuantization((), None, PER_HEAD, PER_HEAD)):
        out = model(tokens, past_key_values=DynamicCache(config=model.config), use_cache=True)
        assert isinstance(out.past_key_values, QuantizedCache)
        with pytest.raises(RotquantError, match="given a DynamicCache filled by something else"):
            model(tokens, past_key_values=filled, use_cache=True)
    with (
        wrap(model, RuntimeQuantization((), None, PER_HEAD, GROUPED)),
        pytest.raises(RotquantError, match="given a QuantizedCache filled by something else"),
    ):
        model(tokens, past_key_values=out.past_key_values, use_cache=True)


def test_cropping_and_selecting_act_on_every_stored_tensor() -> None:
    quantizer = KVQuantizer(PER_HEAD, GROUPED)
    (k, v), (next_k, next_v) = states(6, 0), states(1, 1)
    cache = QuantizedCache(quantizer)
    cache.update(k, v, 0)
    cache.crop(-2)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 4
    rows = torch.tensor([1, 1])
    text = torch.cat([k[rows, :, :4], next_k], dim=2), torch.cat([v[rows, :, :4], next_v], dim=2)
    expected = quantizer.fake(*text, 0)
    assert all(map(torch.equal, cache.update(next_k, next_v, 0), expected))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert all(map(torch.equal, cache.update(next_k, next_v, 0), quantizer.fake(next_k, next_v, 0)))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (QuantizationScheme(bits=4, granularity="tensor"), r"keys: granularity 'tensor' has no meaning"),
        (QuantizationScheme(bits=4, granularity="token"), r"keys: granularity 'token' has no meaning"),
        (
            QuantizationScheme(bits=4, granularity="group", group_size=17),
            r"group size 17 exceeds the 16 features",
        ),
        (
            QuantizationScheme(bits=4, granularity="group", group_size=8, dynamic=False),
            r"keys: static scales .* symmetric",
        ),
        (QuantizationScheme(bits=4, granularity="head", symmetric=False, dynamic=False), r"keys: static .* symmetric"),
    ],
)
def test_schemes_without_meaning_in_a_cache_are_refused(scheme: QuantizationScheme, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        wrap(tiny_model(), RuntimeQuantization(keys=scheme))


def test_a_cached_number_has_its_share_of_scales_and_zero_points() -> None:
    quarot, vllm = preset("quarot-rtn"), preset("int4-per-token-head")
    assert bits_per_cached(quarot, head_dim=64, kv_heads=3) == bits_per_cached(vllm, 64, 3) == 4 + 32 / 64
    changes: dict[str, Any] = {"keys": {"symmetric": True}, "values": None}
    assert bits_per_cached(override(quarot, changes, "test"), 64, 3) == (4 + 16 / 64 + 16) / 2
    grouped = {"keys": {"granularity": "group", "group_size": 32}, "values": {"granularity": "token"}}
    assert bits_per_cached(override(quarot, grouped, "test"), 64, 3) == pytest.approx(4 + (32 / 32 + 32 / 192) / 2)
    static = preset("prefixquant")
    assert bits_per_cached(static, 64, 3) == 4
