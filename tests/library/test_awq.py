"""AWQ: its searches against brute force, scales that never change the function, integers that are stored exactly."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotquant.foundation.errors import RecipeError
from rotquant.methods.awq import AWQ
from rotquant.methods.awq import activation_aware_scaling as awq
from rotquant.methods.awq.activation_aware_scaling import Inputs, clip_ratios, search_scale
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.equivalent import InPlace, divide_norm, divide_rows, producers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.quantization import choose_qparams, fake_quantize
from rotquant.weights.build import build_weights
from rotquant.weights.context import QuantizationContext
from rotquant.weights.search import search_ratios
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import AWKWARD, FAMILIES, outlier_model, tiny_model, tiny_tokens
from tests.helpers.weights import weights_by_layer

CHANNEL = QuantizationScheme(bits=3, symmetric=False, granularity="channel")
GROUPS = QuantizationScheme(bits=3, symmetric=False, granularity="group", group_size=4)
RECIPE = override(preset("awq"), {"calibration": {"samples": 6, "sequence_length": 24}}, "test")
SAMPLES = tiny_tokens(batch=6, tokens=24, seed=5)


def layer_problem(seed, tokens=40, rows=6, features=12):
    """A weight and the inputs it sees, some features larger than others; float64, so that sums in any order agree."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(features, generator=generator, dtype=torch.float64))
    x = torch.randn(tokens, features, generator=generator, dtype=torch.float64) * spread
    return torch.randn(rows, features, generator=generator, dtype=torch.float64), x


def inputs_of(x):
    return Inputs(x.abs().mean(0), x.T @ x)


def reference_scale(weight, x, scheme, grid):
    """Eqs. 4-5 as they are written: round the scaled weight, divide the input, compare the outputs on every token."""
    found = []
    for step in range(grid):
        scale = x.abs().mean(0) ** (step / grid)
        scale = scale / (scale.max() * scale.min()).sqrt()
        output = (x / scale) @ fake_quantize(weight * scale, scheme).T
        found.append(((output - x @ weight.T).square().sum().item(), step, scale))
    return min(found)[2]


@pytest.mark.parametrize("scheme", [CHANNEL, GROUPS])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_the_scale_is_the_one_with_the_least_output_error(scheme, seed):
    weight, x = layer_problem(seed)
    found = search_scale([(weight, inputs_of(x))], scheme, grid=20)
    torch.testing.assert_close(found, reference_scale(weight, x, scheme, 20), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scheme", [CHANNEL, GROUPS])
def test_every_clip_ratio_is_the_one_with_the_least_error_of_its_elements(scheme):
    weight, x = layer_problem(0)
    found = search_ratios(weight, x.T @ x, scheme, clip_ratios(20))
    size = scheme.group_size or weight.shape[1]
    assert found.shape == choose_qparams(weight, scheme).scale.shape
    per_row = CHANNEL.model_copy(update={"bits": scheme.bits})
    for row in range(len(weight)):
        for group in range(weight.shape[1] // size):
            columns = slice(group * size, (group + 1) * size)
            part, seen = weight[row : row + 1, columns], x[:, columns]
            errors = {}
            for step in range(10):
                rounded = fake_quantize(part, per_row, choose_qparams(part, per_row, 1 - step / 20))
                errors[1 - step / 20] = (seen @ (rounded - part).T).square().sum().item()
            assert found.view(len(weight), -1)[row, group].item() == min(errors, key=errors.get)
    assert found.unique().numel() > 1


def test_dead_features_get_a_finite_positive_scale():
    weight, x = layer_problem(1)
    x[:, 2] = 0
    scale = search_scale([(weight, inputs_of(x))], CHANNEL, grid=20)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


def scaled_places(model, transforms=()):
    """Scale every site that can be by random factors; which sites those were."""
    architecture, places = architecture_of(model), set()
    generator = torch.Generator().manual_seed(0)
    for layer in decoder_layers(model):
        for site in architecture.sites:
            factors = torch.exp(torch.randn(site.features, generator=generator, dtype=torch.float64))
            before = producers(architecture, site, transforms) or {}
            if site.norm:
                divide_norm(InPlace(layer), architecture, site, factors)
            for name, projection in before.items():
                divide_rows(InPlace(layer), projection, [name], factors)
            places |= {site.name} if site.norm or before else set()
    return places


@pytest.mark.parametrize("name", [*FAMILIES, *AWKWARD])
@torch.no_grad()
def test_scaling_does_not_change_the_logits(name):
    # Biases (Qwen2), fused projections (Phi-3); o_proj only where each query head has its own value head. float64
    # rounding through two layers of logits of size ~10 leaves about 1e-13.
    model = tiny_model(**{"family": name, **AWKWARD.get(name, {}), "dtype": torch.float64})
    tokens = tiny_tokens()
    before = model(tokens).logits
    places = scaled_places(model)
    grouped = architecture_of(model).num_heads != architecture_of(model).num_kv_heads
    assert places == {"attention_input", "mlp_input", "mlp_output"} | (set() if grouped else {"attention_output"})
    assert (model(tokens).logits - before).abs().max() < 1e-10


@torch.no_grad()
def test_features_that_an_online_transform_mixes_are_left_alone():
    rotation = RotationScheme()
    model = tiny_model(num_kv_heads=4, dtype=torch.float64)
    rotate(model, rotation, seed=0)
    with wrap(model, RuntimeQuantization(transforms=rotation.transforms)):
        before = model(tiny_tokens()).logits
        assert scaled_places(model, rotation.transforms) == {"attention_input", "mlp_input"}
        assert (model(tiny_tokens()).logits - before).abs().max() < 1e-10


def test_the_search_sees_the_inputs_of_the_full_precision_model():
    # By hand: record what every linear layer reads in the untouched model, then quantize layer by layer.
    reference, model = outlier_model(dtype=torch.float64), outlier_model(dtype=torch.float64)
    architecture = architecture_of(model)
    context = QuantizationContext(model, RECIPE, SAMPLES, 0, torch.device("cpu"), batch_size=4)
    awq.apply(AWQ.of(RECIPE), context)
    weights = weights_by_layer(context)
    for index, layer in enumerate(decoder_layers(reference)):
        inputs = {}
        for site in architecture.sites:
            seen = []
            hook = layer.get_submodule(site.linears[0]).register_forward_pre_hook(
                lambda _module, arguments, seen=seen: seen.append(arguments[0].flatten(0, 1))
            )
            with torch.no_grad():
                reference(SAMPLES)
            hook.remove()
            inputs |= dict.fromkeys(site.linears, inputs_of(torch.cat(seen)))
        untouched = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        expected = awq.quantize_layer(layer, architecture, inputs, AWQ.of(RECIPE), RECIPE.rounded.scheme, ())
        for name, weight in weights[index].items():
            assert torch.equal(weight.codes, expected[name].codes)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(untouched[name])


def logit_error(recipe):
    """Mean squared error of the outlier model's logits under a recipe, relative to their mean square."""
    tokens = tiny_tokens(batch=8, tokens=24, seed=6)
    with torch.no_grad():
        exact = outlier_model()(tokens).logits
        stored = build_weights(outlier_model(), None, recipe, 0, SAMPLES, progress=False)
        return ((stored.model(tokens).logits - exact).square().mean() / exact.square().mean()).item()


@pytest.mark.parametrize("groups", [{}, {"granularity": "group", "group_size": 8}])
def test_awq_beats_round_to_nearest_on_outlier_channels(groups):
    recipe = override(RECIPE, {"weights": {"scheme": groups}}, "test")
    # 0.70 times the error per channel and 0.33 in groups
    assert logit_error(recipe) < 0.8 * logit_error(override(recipe, {"methods": {"awq": None}}, "test"))


def test_query_and_key_are_not_clipped_and_clipping_can_be_left_out():
    model = outlier_model()
    recipes = [override(RECIPE, {"methods": {"awq": {"clip_search": on}}}, "test") for on in (True, False)]
    clipped, free = (
        build_weights(outlier_model(), None, recipe, 0, SAMPLES, progress=False).weights for recipe in recipes
    )
    shared = {architecture_of(model).query.name, architecture_of(model).key.name}
    for name in clipped:
        same = torch.equal(clipped[name].qparams.scale, free[name].qparams.scale)
        assert same == any(f".{linear}." in name for linear in shared), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_integers_are_the_weights_bit_for_bit(family, dtype, tmp_path: Path):
    stored = build_weights(
        outlier_model(family=family, dtype=dtype), tiny_tokenizer(), RECIPE, 0, SAMPLES, progress=False
    )
    save_quantized(tmp_path / "model", stored)
    model, _, state = load_quantized(tmp_path / "model")
    assert state.recipe == RECIPE
    for name, weight in stored.weights.items():
        assert torch.equal(stored.model.get_parameter(name), weight.dequantize(dtype))
    for key, value in stored.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weights": None}, "awq .* needs a weights section"),
        ({"methods": {"gptq": {}}}, "awq and gptq both round the weights"),
        ({"weights": {"clip_search": True}}, "awq rounds weights in its own way"),
        ({"methods": {"outliers": {"features": 4}}}, "awq cannot be combined with outliers"),
        ({"weights": {"scheme": {"granularity": "tensor"}}}, "granularity channel or group"),
        ({"methods": {"smoothquant": {}}}, "awq and smoothquant both change the same weights"),
        ({"rotation": {}, "methods": {"spinquant": {"network": "all"}}}, "spinquant cannot be combined with awq"),
        ({"calibration": None}, "awq needs a calibration section"),
    ],
)
def test_meaningless_combinations_are_refused(change, problem):
    with pytest.raises(RecipeError, match=problem):
        override(RECIPE, change, "test")


def test_the_run_time_quantizers_do_not_change_the_stored_weights():
    eight = override(RECIPE, {"activations": {"bits": 8}}, "test")
    assert eight.stored() == RECIPE.stored() != Recipe().stored()
