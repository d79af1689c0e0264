"""Equivalent scalings: no scale changes the function of any family, whatever takes it."""

import pytest
import torch
from torch import nn

from rotquant.models.architectures import architecture_of, decoder_layers, norm_of
from rotquant.models.equivalent import (
    InPlace,
    divide_norm,
    divide_rows,
    divide_values,
    held_scale,
    key_scales,
    producers,
    rotary_pairs,
    scale_keys,
    scaled_gain,
)
from rotquant.models.stream import capture_layer_inputs
from tests.helpers.bounds import FLOAT64_BOUND
from tests.helpers.invariance import norms_in_model_dtype
from tests.helpers.models import AWKWARD, FURTHER, tiny_model, tiny_tokens

SHAPES = AWKWARD | FURTHER


@torch.no_grad()
def scale_everything(model: nn.Module) -> set[str]:
    """Scale whatever can be scaled in every layer by random factors from 1/e to e and beyond; what was."""
    architecture, generator, scaled = architecture_of(model), torch.Generator().manual_seed(0), {"keys", "values"}
    rotary = capture_layer_inputs(model, tiny_tokens()).kwargs[0]["position_embeddings"][0].shape[-1]

    def factors(*shape: int) -> torch.Tensor:
        return torch.exp(torch.randn(*shape, generator=generator, dtype=torch.float64))

    for layer in decoder_layers(model):
        parameters, pairs = InPlace(layer), rotary_pairs(architecture.head_dim, rotary)
        for site in architecture.sites:
            if site.norm is not None:
                divide_norm(parameters, architecture, site, factors(site.features))
                scaled.add(site.name)
            for name, before in (producers(architecture, site) or {}).items():
                divide_rows(parameters, before, [name], factors(site.features))
                scaled.add(site.name)
        divide_values(parameters, architecture, factors(architecture.num_kv_heads, architecture.head_dim))
        scale_keys(parameters, architecture, factors(key_scales(architecture), int(pairs.max()) + 1)[:, pairs])
    return scaled


@pytest.mark.parametrize("shape", SHAPES)
def test_scaling_everything_that_can_be_scaled_does_not_change_the_logits(shape: str) -> None:
    """Gains of 1 + w, norms of heads, routers, experts, fused rows, biases, RoPE of a part of each head."""
    model = tiny_model(**SHAPES[shape], dtype=torch.float64)
    architecture = architecture_of(model)
    with norms_in_model_dtype(model), torch.no_grad():
        expected = model(tiny_tokens(), use_cache=False).logits
        scaled = scale_everything(model)
        found = model(tiny_tokens(), use_cache=False).logits
    inputs = set() if "bare_inputs" in architecture.traits else {"attention_input", "mlp_input"}
    assert {"mlp_output", "keys", "values"} | inputs <= scaled
    assert (found - expected).abs().max() <= FLOAT64_BOUND


@pytest.mark.parametrize("shape", ["gemma3", "llama-3"])
def test_what_reads_a_norm_of_16_bits_makes_up_for_the_rounding_of_its_gain(shape: str) -> None:
    """Next to -1 a bfloat16 has steps of 1/256: a gain of 1 + w that is divided by 40 is off by up to 8 percent."""
    model = tiny_model(**SHAPES[shape]).bfloat16()
    architecture, layer = architecture_of(model), decoder_layers(model)[0]
    site, generator = architecture.site("mlp_input"), torch.Generator().manual_seed(1)
    scale = 40 * torch.exp(torch.randn(site.features, generator=generator, dtype=torch.float64))
    weight, offset = norm_of(layer, site).weight.double(), architecture.norm_offset
    held = held_scale(layer, architecture, site, scale)
    stored = scaled_gain(weight, 1 / held, offset).bfloat16().double()
    torch.testing.assert_close((stored + offset) * held, weight + offset, rtol=1e-12, atol=0)
    rounded = scaled_gain(weight, 1 / scale, offset).bfloat16().double()
    asked = ((rounded + offset) * scale / (weight + offset) - 1).abs().max()
    assert asked > (0.05 if offset else 1e-4)
    double = tiny_model(**SHAPES[shape], dtype=torch.float64)
    assert torch.equal(held_scale(decoder_layers(double)[0], architecture, site, scale), scale)
