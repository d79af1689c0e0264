"""Quantized queries (OmniQuant): what attention gets, under every mask, and a model that is whole afterwards."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from rotquant.foundation.errors import RecipeError
from rotquant.models.simulation.queries import quantized_queries
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.build import build_weights, quantized_forward
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens

SCHEME = QuantizationScheme(bits=4, symmetric=False, granularity="head")


@torch.no_grad()
def logits(model, **inputs):
    return model(**({"input_ids": tiny_tokens(batch=2)} | inputs)).logits


def test_queries_are_rounded_after_rope(monkeypatch):
    model = tiny_model()
    quantizer = quantized_queries(model, SCHEME)
    found = logits(model)
    quantizer.remove()
    turn = modeling_llama.apply_rotary_pos_emb

    def turned(*args, **kwargs):
        query, key = turn(*args, **kwargs)
        return fake_quantize(query, SCHEME), key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turned)
    assert torch.equal(logits(model), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_whole_afterwards_and_refuses_two_at_once(family):
    model = tiny_model(family)
    before = logits(model)
    quantizer = quantized_queries(model, SCHEME)
    assert not torch.equal(logits(model), before)
    with pytest.raises(RecipeError, match="queries are changed in models with sdpa or eager"):
        quantized_queries(model, SCHEME)
    quantizer.remove()
    assert torch.equal(logits(model), before)


def test_padding_is_masked():
    model = tiny_model()
    tokens = tiny_tokens(batch=1)
    quantizer = quantized_queries(model, SCHEME)
    alone = logits(model, input_ids=tokens)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long().unsqueeze(0)
    places = (torch.arange(padded.shape[1]) - 5).clamp(min=0).unsqueeze(0)
    beside = logits(model, input_ids=padded, attention_mask=mask, position_ids=places)[:, 5:]
    quantizer.remove()
    torch.testing.assert_close(beside, alone, rtol=1e-3, atol=1e-3)  # a last bit may move a code


def test_omniquant_quantizes_queries_where_keys_are_and_only_on_request():
    recipe = override(preset("omniquant"), {"methods": {"omniquant": {"steps": 1}}}, "test")
    without = override(recipe, {"methods": {"omniquant": {"queries": False}}}, "test")
    outputs = {}
    for name, chosen in {"with": recipe, "without": without}.items():
        stored = build_weights(tiny_model(), None, chosen, 0, tiny_tokens(batch=2), progress=False)
        with torch.no_grad(), quantized_forward(stored.model, chosen, stored.state):
            outputs[name] = logits(stored.model)
        assert stored.model.config._attn_implementation == "sdpa"
    assert not torch.equal(outputs["with"], outputs["without"])
    assert "queries quantized as keys" in recipe.methods["omniquant"].describe(recipe)
    alone = override(recipe, {"activations": None, "keys": None, "values": None}, "test")
    assert "queries" not in alone.methods["omniquant"].describe(alone)
