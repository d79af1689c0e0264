"""OmniQuant: Eq. 2's clipping, transformations that keep the function, and training that lowers the block's error."""

from functools import cache

import pytest
import torch

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.methods.omniquant import OmniQuant
from rotquant.methods.omniquant import block_reconstruction as omniquant
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.equivalent import rotary_pairs
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.quantization import choose_qparams, fake_quantize
from rotquant.weights import reconstruction
from rotquant.weights.context import QuantizationContext
from rotquant.weights.reconstruction import DecoderBlock, clipped_qparams, transformed
from rotquant.weights.rtn import quantize_rtn
from tests.helpers.models import FAMILIES, outlier_model, tiny_model, tiny_tokens
from tests.helpers.weights import weights_by_layer

SYMMETRIC = QuantizationScheme(bits=4, granularity="channel")
ASYMMETRIC = QuantizationScheme(bits=4, symmetric=False, granularity="channel")


def logit(p):
    return torch.logit(torch.tensor(p))


def layer_inputs(model, tokens):
    """Hidden states before the first decoder layer and its keyword arguments."""
    stream = capture_layer_inputs(model, tokens)
    return stream.hidden, stream.kwargs[0]


def recipe(steps, rotation=None, symmetric=True, **weights):
    """OmniQuant for tiny models; symmetric, where learned clipping has the most to win in few steps."""
    base = preset("omniquant")
    scheme = base.weights.scheme.model_copy(update={"symmetric": symmetric, **weights})
    return base.model_copy(
        update={
            "rotation": rotation,
            "activations": base.activations.model_copy(update={"symmetric": symmetric}),
            "methods": {"omniquant": OmniQuant(steps=steps, batch_size=4)},
            "weights": base.weights.model_copy(update={"scheme": scheme}),
        }
    )


def run(settings, model, tokens, seed=0):
    """Apply OmniQuant to a model in place and return the integer weights of all layers."""
    context = QuantizationContext(model, settings, tokens, seed, torch.device("cpu"), batch_size=4)
    omniquant.apply(OmniQuant.of(settings), context)
    return weights_by_layer(context)


def block_error(model, reference, settings, tokens):
    """Mean squared error of the first block's output on full-precision inputs, quantizers in place."""
    hidden, kwargs = layer_inputs(reference, tokens)
    with torch.no_grad():
        target = decoder_layers(reference)[0](hidden, **kwargs)
        with wrap(
            model, RuntimeQuantization(settings.transforms, settings.activations, settings.keys, settings.values)
        ):
            return (decoder_layers(model)[0](hidden, **kwargs) - target).square().mean().item()


@cache
def trained_error(steps):
    """Error of the first block of the outlier model after `steps` steps."""
    model = outlier_model(num_layers=1)
    run(recipe(steps), model, tiny_tokens(batch=16))
    return block_error(model, outlier_model(num_layers=1), recipe(steps), tiny_tokens(batch=16))


def test_asymmetric_clipping_is_equation_2():
    # gamma 0.5 of max 4 is 2, beta 0.25 of min -4 is -1: h = 3 / 15 = 0.2 and z = 1 / 0.2 = 5.
    qparams = clipped_qparams(torch.tensor([[-4.0, 1.0, 4.0]]), ASYMMETRIC, logit([[0.5]]), logit([[0.25]]))
    torch.testing.assert_close(qparams.scale, torch.tensor([[0.2]]))
    assert qparams.zero_point.tolist() == [[5.0]]


def test_symmetric_clipping_takes_the_larger_end():
    # The ends are 0.5 * 4 = 2 and 0.9 * 3 = 2.7: h = 2.7 / 7.
    qparams = clipped_qparams(torch.tensor([[-3.0, 1.0, 4.0]]), SYMMETRIC, logit([[0.5]]), logit([[0.9]]))
    torch.testing.assert_close(qparams.scale, torch.tensor([[2.7 / 7]]))
    assert qparams.zero_point is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("granularity", "group"), [("tensor", None), ("channel", None), ("group", 8)])
def test_unclipped_scales_are_those_of_round_to_nearest(symmetric, granularity, group):
    scheme = QuantizationScheme(bits=4, symmetric=symmetric, granularity=granularity, group_size=group)
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    expected = choose_qparams(weight, scheme)
    open_ends = torch.full_like(expected.scale, 100.0)  # sigmoid(100) is 1 in float32
    qparams = clipped_qparams(weight, scheme, open_ends, open_ends)
    assert torch.equal(qparams.scale, expected.scale)
    assert symmetric or torch.equal(qparams.zero_point, expected.zero_point)


def test_the_loss_reaches_both_clipping_logits():
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    upper, lower = (torch.full((6, 1), 1.0, requires_grad=True) for _ in range(2))
    quantized = fake_quantize(weight, ASYMMETRIC, clipped_qparams(weight, ASYMMETRIC, upper, lower))
    (quantized - weight).square().sum().backward()
    assert (upper.grad != 0).all()
    assert (lower.grad != 0).all()


def test_training_sees_how_activation_scales_follow_the_transformation():
    # One large feature decides the scale of its token. To first order only the gradient through that scale can tell
    # that dividing the feature by s lets the others have smaller steps: compare with a finite difference of the sum
    # over many tokens, where rounding averages out.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20000, 16, generator=generator, dtype=torch.float64)
    x[:, 0] = 30.0
    scheme = QuantizationScheme(bits=4)

    def loss(s, scale_gradients=False):
        smooth = torch.cat([x[:, :1] / s, x[:, 1:]], dim=1)
        return (fake_quantize(smooth, scheme, scale_gradients=scale_gradients) - smooth)[:, 1:].square().mean()

    s = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    (through_scale,) = torch.autograd.grad(loss(s, scale_gradients=True), s)
    with torch.no_grad():
        expected = (loss(s + 0.2) - loss(s - 0.2)) / 0.4
    assert expected < 0
    torch.testing.assert_close(through_scale, expected, rtol=0.2, atol=0.0)
    (constant,) = torch.autograd.grad(loss(s), s, allow_unused=True)
    assert not constant


def test_pairs_that_rope_mixes_share_a_scale():
    assert rotary_pairs(8, 8).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    # Partial rotary: the last two dimensions are not turned and have scales of their own.
    assert rotary_pairs(6, 4).tolist() == [0, 1, 0, 1, 2, 3]


def transformation_change(model, settings, quantization=None):
    """Largest change of the block's output when random positive scales stand at every place."""
    hidden, kwargs = layer_inputs(model, tiny_tokens())
    block = DecoderBlock(decoder_layers(model)[0], architecture_of(model), kwargs)
    parameters = {name: parameter.detach() for name, parameter in block.layer.named_parameters()}
    maxima = {site.name: torch.ones(site.features, dtype=torch.float64) for site in block.architecture.sites}
    learned = omniquant.initial(parameters, block.architecture, maxima, settings, block.rotary_dim)
    generator = torch.Generator().manual_seed(0)
    scales = {
        name: torch.exp(torch.randn(scale.shape, generator=generator, dtype=torch.float64))
        for name, scale in learned.scales.items()
    }
    with torch.no_grad(), wrap(model, quantization or RuntimeQuantization()):
        before = block(parameters, hidden)
        changed = transformed(parameters, block.architecture, scales, block.rotary_dim)
        assert sum(not torch.equal(changed[name], parameters[name]) for name in parameters) >= 5
        return set(scales), (block(changed, hidden) - before).abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_transformation_does_not_change_the_function(family):
    # Grouped-query attention, biases (Qwen2), fused projections (Phi-3); float64 leaves rounding near 1e-15.
    places, change = transformation_change(tiny_model(family, dtype=torch.float64), recipe(1))
    assert places == {"attention_input", "value", "query_key", "mlp_input"}
    assert change < 1e-11


def test_the_transformation_leaves_out_the_place_where_an_online_transform_stands():
    rotation = RotationScheme()
    model = tiny_model(dtype=torch.float64)
    rotate(model, rotation, seed=0)
    places, change = transformation_change(
        model, recipe(1, rotation), RuntimeQuantization(transforms=rotation.transforms)
    )
    assert "value" not in places
    assert change < 1e-11


def test_training_lowers_the_block_error():
    assert trained_error(60) < 0.95 * trained_error(1)  # 0.87 here


def test_omniquant_beats_round_to_nearest_on_outlier_channels():
    settings, reference = recipe(60), outlier_model(num_layers=1)
    rounded = outlier_model(num_layers=1)
    with torch.no_grad():
        for name in architecture_of(rounded).linears:
            weight = decoder_layers(rounded)[0].get_submodule(name).weight
            weight.copy_(quantize_rtn(weight, settings.weights).dequantize(weight.dtype))
    assert trained_error(60) < 0.5 * block_error(rounded, reference, settings, tiny_tokens(batch=16))


@pytest.mark.parametrize("symmetric", [True, False])
def test_stored_integers_are_exactly_the_weights_that_training_saw(symmetric):
    settings = recipe(5, symmetric=symmetric)
    model = outlier_model(num_layers=1)
    hidden, kwargs = layer_inputs(model, tiny_tokens(batch=8))
    block = DecoderBlock(decoder_layers(model)[0], architecture_of(model), kwargs)
    parameters = {name: parameter.detach().clone() for name, parameter in block.layer.named_parameters()}
    maxima = {site.name: torch.rand(site.features) + 0.5 for site in block.architecture.sites}
    learned = omniquant.initial(parameters, block.architecture, maxima, settings, block.rotary_dim)
    scheme = settings.weights.scheme
    reconstruction.train(block, parameters, learned, hidden, hidden, scheme, OmniQuant.of(settings), seed=0)
    seen = reconstruction.quantized_parameters(parameters, block.architecture, scheme, learned, block.rotary_dim)
    weights = reconstruction.fuse(block, learned, scheme)
    for name in block.architecture.linears:
        assert torch.equal(weights[name].dequantize(torch.float32), seen[f"{name}.weight"])
    for name, parameter in block.layer.named_parameters():
        assert torch.equal(parameter, seen[name])


def test_group_scales_and_half_precision_models_work():
    model = outlier_model(dtype=torch.bfloat16)
    weights = run(recipe(2, granularity="group", group_size=8), model, tiny_tokens(batch=4))
    layer = decoder_layers(model)[1]
    stored = layer.mlp.down_proj.weight
    assert stored.dtype == torch.bfloat16
    assert weights[1]["mlp.down_proj"].qparams.scale.shape == (64, 12, 1)
    assert torch.equal(stored, weights[1]["mlp.down_proj"].dequantize(torch.bfloat16))
    assert torch.isfinite(model(tiny_tokens()).logits).all()


def test_the_same_seed_gives_the_same_weights_and_another_does_not():
    def codes(seed):
        return run(recipe(5), outlier_model(num_layers=1), tiny_tokens(batch=8), seed)[0]["mlp.down_proj"].qparams.scale

    state = torch.get_rng_state()
    first, again, other = codes(0), codes(0), codes(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_diverging_block_is_reported():
    settings = override(recipe(4), {"methods": {"omniquant": {"transformation_lr": 1e30}}}, "test")
    with pytest.raises(
        RotquantError, match=r"block of OmniQuant is nan after .* steps: lower methods.omniquant.transform"
    ):
        run(settings, tiny_model(), tiny_tokens(batch=8))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"methods": {"gptq": {}}}, "omniquant and gptq both round the weights"),
        ({"weights": {"clip_search": True}}, "set weights.clip_search to false"),
        ({"methods": {"outliers": {"features": 8}}}, "omniquant cannot be combined with outliers"),
        ({"activations": {"granularity": "tensor", "dynamic": False}}, "omniquant needs dynamic activations"),
    ],
)
def test_meaningless_combinations_are_refused(change, problem):
    with pytest.raises(RecipeError, match=problem):
        override(recipe(1), change, "test")
