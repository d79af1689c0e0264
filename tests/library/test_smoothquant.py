"""SmoothQuant: its Eq. 4, and that smoothing never changes what a model computes."""

import pytest
import torch

from rotquant.methods.smoothquant import SmoothQuant
from rotquant.methods.smoothquant.scaling import smooth
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.equivalent import SMALLEST, InPlace, divide_norm, smoothing_scale, weight_maxima
from rotquant.models.rotation.fusing import rotate
from rotquant.models.statistics import collect_statistics
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.quantization import fake_quantize
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens


def site_maxima(model, tokens):
    """max |x| of every site of every layer."""
    return collect_statistics(capture_layer_inputs(model, tokens), "max")


def plant_outliers(model, channels=(3, 17), factor=40.0):
    """Make some channels of every norm's output far larger than the others."""
    with torch.no_grad():
        for layer in decoder_layers(model):
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[list(channels)] *= factor
    return model


def test_scale_is_equation_4():
    # By hand: 16^0.5 / 0.25^0.5 = 4 / 0.5 = 8; 1^0.5 / 4^0.5 = 1/2; 9^0.5 / 9^0.5 = 1.
    scale = smoothing_scale(torch.tensor([16.0, 1.0, 9.0]), torch.tensor([0.25, 4.0, 9.0]), alpha=0.5)
    torch.testing.assert_close(scale, torch.tensor([8.0, 0.5, 1.0]))


def test_alpha_moves_all_or_nothing_of_the_range():
    activations, weights = torch.tensor([8.0, 2.0]), torch.tensor([0.5, 4.0])
    torch.testing.assert_close(smoothing_scale(activations, weights, alpha=1.0), activations)
    torch.testing.assert_close(smoothing_scale(activations, weights, alpha=0.0), 1 / weights)


def test_after_smoothing_with_half_alpha_activation_and_weight_ranges_are_equal():
    activations, weights = torch.tensor([16.0, 3.0, 0.1]), torch.tensor([0.25, 4.0, 2.0])
    scale = smoothing_scale(activations, weights, alpha=0.5)
    torch.testing.assert_close(activations / scale, weights * scale)


def test_dead_channels_get_a_finite_positive_scale():
    scale = smoothing_scale(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), alpha=0.5)
    assert scale[0] == SMALLEST
    assert torch.isfinite(scale).all()


def test_weight_maxima_are_per_input_feature_over_all_readers():
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, -2.0], [-3.0, 0.5]]))
        second.weight.copy_(torch.tensor([[0.1, 7.0]]))
    assert weight_maxima([first, second]).tolist() == [3.0, 7.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_does_not_change_the_logits(family):
    model = plant_outliers(tiny_model(family, dtype=torch.float64))
    tokens = tiny_tokens()
    with torch.no_grad():
        before = model(tokens).logits
        smooth(model, SmoothQuant(), site_maxima(model, tokens))
        after = model(tokens).logits
    # Exact in real numbers; float64 rounding through two layers of logits of size ~10 leaves about 1e-13.
    assert (after - before).abs().max() < 1e-10


def test_a_rotated_model_can_be_smoothed_too():
    model = tiny_model(dtype=torch.float64)
    rotate(model, RotationScheme(heads=False, mlp=False, keys=False, values="none"), seed=0)
    tokens = tiny_tokens()
    with torch.no_grad():
        before = model(tokens).logits
        smooth(model, SmoothQuant(), site_maxima(model, tokens))
        assert (model(tokens).logits - before).abs().max() < 1e-10


def test_smoothing_shrinks_planted_outliers_and_touches_only_sites_behind_a_norm():
    model, tokens = plant_outliers(tiny_model()), tiny_tokens()
    down = decoder_layers(model)[0].mlp.down_proj.weight.clone()
    before = site_maxima(model, tokens)
    smooth(model, SmoothQuant(), before)
    after = site_maxima(model, tokens)
    for name in ("attention_input", "mlp_input"):
        spread = [maxima[0][name].max() / maxima[0][name].median() for maxima in (before, after)]
        assert spread[1] < spread[0] / 3
    for name in ("attention_output", "mlp_output"):
        torch.testing.assert_close(after[0][name], before[0][name], rtol=1e-3, atol=1e-4)
    assert torch.equal(decoder_layers(model)[0].mlp.down_proj.weight, down)


def test_smoothing_lowers_the_4_bit_error_of_a_linear_layer_with_outlier_channels():
    model, tokens = plant_outliers(tiny_model()), tiny_tokens()
    layer, site = decoder_layers(model)[0], architecture_of(model).site("mlp_input")

    def quantized_error():
        with torch.no_grad():
            seen = []
            hook = layer.mlp.up_proj.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
            model(tokens)
            hook.remove()
            exact = layer.mlp.up_proj(seen[0])
            x = fake_quantize(seen[0], QuantizationScheme(bits=4, granularity="token"))
            w = fake_quantize(layer.mlp.up_proj.weight, QuantizationScheme(bits=4, granularity="channel"))
            return (torch.nn.functional.linear(x, w) - exact).square().mean() / exact.square().mean()

    before = quantized_error()
    maxima = site_maxima(model, tokens)[0][site.name]
    weights = weight_maxima(layer.get_submodule(name) for name in site.linears)
    divide_norm(InPlace(layer), architecture_of(model), site, smoothing_scale(maxima, weights, 0.5).double())
    assert quantized_error() < 0.7 * before


def test_a_site_without_norm_cannot_be_smoothed():
    model = tiny_model()
    layer, architecture = decoder_layers(model)[0], architecture_of(model)
    with pytest.raises(ValueError, match="mlp_output has no norm"):
        divide_norm(InPlace(layer), architecture, architecture.site("mlp_output"), torch.ones(96))
