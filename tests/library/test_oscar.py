"""OSCAR: rotations of cached keys and values by what attention reads of them; tokens that the cache keeps exact."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.kv_cache import KVQuantizer, QuantizedCache, kept_mask
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.hadamard import hadamard_matrix
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.build import build_weights, check_recipe_for, runtime_quantization
from rotquant.weights.storage import QuantizedState
from tests.helpers.families import SAMPLES, method
from tests.helpers.models import tiny_model, tiny_tokens

TWO_BITS = QuantizationScheme(bits=2, symmetric=False, zero_point="exact", granularity="head")
KEPT = TWO_BITS.model_copy(update={"kept_first": 2, "kept_recent": 3})


def built(hadamard: bool, device_batch: int | None = None) -> QuantizedState:
    recipe = override(method("oscar"), {"methods": {"oscar": {"hadamard": hadamard}}}, "test")
    model = tiny_model(dtype=torch.float64)
    return build_weights(model, None, recipe, 0, SAMPLES, batch_size=device_batch, progress=False).state


def states(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer [samples, heads, tokens, head_dim], from its input by its own matrices."""
    model: Any = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        hidden = model(SAMPLES, output_hidden_states=True, use_cache=False).hidden_states[layer]
        block: Any = decoder_layers(model)[layer]
        x = block.input_layernorm(hidden)
        q, k, v = (
            getattr(block.self_attn, name)(x).unflatten(-1, (-1, 16)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        turns = model.model.rotary_emb(hidden, torch.arange(SAMPLES.shape[1])[None])
        return (*apply_rotary_pos_emb(q, k, *turns), v)


def covariances(layer: int) -> tuple[Tensor, Tensor]:
    """OSCAR's two matrices, one token after another: two query heads read each of two heads of keys."""
    q, k, v = states(layer)
    of_queries, of_values = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 16, dtype=torch.float64)
    for head in range(2):
        read = torch.zeros(16, 16, dtype=torch.float64)
        for text in q:
            for token in range(text.shape[1]):
                for reader in (2 * head, 2 * head + 1):
                    read += torch.outer(text[reader, token], text[reader, token])
        weighted, weights = torch.zeros(16, 16, dtype=torch.float64), 0.0
        for keys, values in zip(k[:, head], v[:, head], strict=True):
            for key, value in zip(keys, values, strict=True):
                weight = (key @ read @ key).item()
                weighted += weight * torch.outer(value, value)
                weights += weight
        of_queries += read / 2
        of_values += weighted / weights / 2
    return of_queries, of_values


@pytest.mark.parametrize("batch", [None, 1])
def test_rotations_are_eigenvectors_of_what_attention_reads(batch: int | None) -> None:
    found = built(hadamard=False, device_batch=batch).tensors["oscar"]
    for layer in range(2):
        for name, expected in zip(("keys", "values"), covariances(layer), strict=True):
            rotation = found[name][layer]
            assert torch.allclose(rotation.mT @ rotation, torch.eye(16, dtype=torch.float64), atol=1e-12)
            turned = rotation.mT @ expected @ rotation
            spread = turned.diagonal()
            # float64 sums of 96 tokens in another order, behind transformers' own float32 norms and rotary tables.
            assert (turned - spread.diag()).abs().max() < 1e-6 * spread.max()
            assert (spread.diff() < 0).all()


def test_a_hadamard_matrix_spreads_them() -> None:
    plain, spread = built(hadamard=False).tensors["oscar"], built(hadamard=True).tensors["oscar"]
    for name in ("keys", "values"):
        assert torch.allclose(spread[name], plain[name] @ hadamard_matrix(16) / 4, atol=1e-12)


def test_the_cache_is_turned_by_each_layers_own_matrix() -> None:
    state = built(hadamard=True)
    recipe, generator = state.recipe, torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 9, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    quantizer = runtime_quantization(recipe, state).cache()
    for layer in range(2):
        for x, read, name in zip((k, v), quantizer.fake(k, v, layer), ("keys", "values"), strict=True):
            matrix = state.tensors["oscar"][name][layer]
            expected = fake_quantize(x @ matrix, getattr(recipe, name)) @ matrix.mT
            assert torch.allclose(read, expected, atol=1e-12)
            assert not torch.allclose(read, fake_quantize(x, getattr(recipe, name)), atol=1e-2)


def test_a_query_sees_kept_tokens_as_they_are_and_the_others_quantized() -> None:
    """Against attention of one query and one key after another."""
    generator, first, recent = torch.Generator().manual_seed(1), *KEPT.kept
    q, k, v = (torch.randn(1, 1, 9, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    keys, values = KVQuantizer(KEPT, KEPT).fake(k, v, 0)
    expected = torch.zeros(9, 16, dtype=torch.float64)
    for i in range(9):
        kept = [j < first or i - j < recent for j in range(i + 1)]
        seen = [(k if kept[j] else keys)[0, 0, j] for j in range(i + 1)]
        shares = torch.softmax(torch.stack([q[0, 0, i] @ key / 4 for key in seen]), 0)
        for j in range(i + 1):
            expected[i] += shares[j] * (v if kept[j] else values)[0, 0, j]
    both = [torch.cat(pair, dim=2) for pair in ((keys, k), (values, v))]
    for mask in (None, torch.full((1, 1, 9, 9), -1e30, dtype=torch.float64).triu(1)):
        wide = kept_mask(mask, 9, 9, KEPT.kept, q.device)
        found = torch.nn.functional.scaled_dot_product_attention(q, *both, attn_mask=wide)
        assert torch.allclose(found[0, 0], expected, atol=1e-12)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_of_decoding_in_pieces_are_those_of_one_pass(attention: str) -> None:
    model, tokens = tiny_model(dtype=torch.float64, attn_implementation=attention), tiny_tokens(batch=2, tokens=12)
    with torch.no_grad():
        exact = model(tokens, use_cache=False).logits
        with wrap(model, RuntimeQuantization((), None, KEPT, KEPT)):
            expected = model(tokens, use_cache=False).logits
            cache, logits = None, []
            for piece in tokens.split([5, 1, 1, 4, 1], dim=1):
                out = model(piece, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
        assert (torch.cat(logits, dim=1) - expected).abs().max() < 1e-5  # transformers' own float32 norms and tables
        assert isinstance(cache, QuantizedCache)
        assert cache.get_seq_length() == 12
        # Up to the fifth token all are kept, and none is quantized.
        assert (expected - exact)[:, :5].abs().max() < 1e-5  # its eager softmax is of float32
        assert (expected - exact)[:, 6:].abs().amax(dim=(0, 2)).min() > 1e-3


def test_padding_is_no_token() -> None:
    """A row that is filled up at its left keeps the first tokens of its text."""
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens(batch=1, tokens=10)
    padded = torch.cat([tokens.new_zeros(1, 4), tokens], dim=1)
    mask = (torch.arange(14) >= 4).long()[None]
    with torch.no_grad(), wrap(model, RuntimeQuantization((), None, KEPT, KEPT)):
        expected = model(tokens, use_cache=False).logits
        found = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False)
    assert (found.logits[:, 4:] - expected).abs().max() < 1e-5  # transformers' own float32 norms and tables


def test_generation_with_a_cache_is_that_without() -> None:
    model: Any = tiny_model(eos_token_id=None)
    tokens = tiny_tokens(2, 6)
    with wrap(model, RuntimeQuantization((), None, KEPT, KEPT)):
        written = [
            model.generate(tokens, max_new_tokens=6, num_beams=2, do_sample=False, use_cache=kept)
            for kept in (True, False)
        ]
    assert torch.equal(*written)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"values": {"kept_first": 1}}, "keys and values keep the same tokens"),
        ({"rotation": {}}, "set rotation.keys to false"),
        ({"keys": None, "values": None}, "it needs these sections"),
        ({"methods": {"oscar": None, "qfep": {}}}, "a prefix stays in full precision by itself"),
        ({"activations": {"bits": 8, "kept_recent": 4}}, "for keys and values alone"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        override(method("oscar"), changes, "test")


def test_models_that_cannot_keep_tokens_or_spread_them_are_refused() -> None:
    model = tiny_model(hidden_size=4 * 37)
    with pytest.raises(RecipeError, match="no Hadamard matrix of 37 features"):
        check_recipe_for(method("oscar"), architecture_of(model), ModelLimits.of(model.config))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(RecipeError, match="sdpa or eager"):
        wrap(model, RuntimeQuantization((), None, KEPT, KEPT))


def test_a_scheme_says_nothing_of_tokens_that_it_does_not_keep() -> None:
    """So the keys of older runs stay as they are."""
    assert not {"kept_first", "kept_recent", "rule"} & TWO_BITS.model_dump().keys()
    with pytest.raises(ValidationError):
        Recipe.model_validate({"weights": {"scheme": {**TWO_BITS.model_dump(), "granularity": "channel"}}})
