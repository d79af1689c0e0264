"""QUIK's and Atom's choice of outlier features, and the statistics behind it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rotquant.foundation.errors import RecipeError
from rotquant.methods.outliers import OutlierFeatures, select_outliers
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.statistics import collect_statistics, measure, observe
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import fake_quantize, fake_quantize_split
from rotquant.weights.build import build_weights, check_recipe, runtime_quantization
from tests.helpers.models import tiny_model, tiny_tokens

PLANTED = [5, 40, 41]


def test_maximum_and_sum_of_squares_by_hand():
    x = torch.tensor([[[1.0, -3.0], [2.0, 0.0]], [[-2.0, 1.0], [0.0, 0.0]]])
    assert measure(x, "max").tolist() == [2.0, 3.0]
    assert measure(x, "square").tolist() == [9.0, 10.0]


@pytest.mark.parametrize("statistic", ["max", "square"])
def test_statistics_over_batches_equal_those_over_everything(statistic):
    model, tokens = tiny_model(), tiny_tokens(batch=4)
    layer, architecture = decoder_layers(model)[0], architecture_of(model)
    with torch.no_grad():
        with observe(layer, architecture, statistic) as whole:
            model(tokens)
        with observe(layer, architecture, statistic) as pieces:
            for batch in tokens.split(1):
                model(batch)
    assert {site.name: site.features for site in architecture.sites} == {k: v.numel() for k, v in whole.items()}
    for name, expected in whole.items():
        torch.testing.assert_close(pieces[name], expected)  # float32 sums in another order
    assert not layer.self_attn.q_proj._forward_pre_hooks


def test_streamed_statistics_equal_those_of_an_ordinary_forward_pass():
    model, tokens = tiny_model(), tiny_tokens(batch=4)
    streamed = collect_statistics(capture_layer_inputs(model, tokens, batch_size=2), "max")
    for layer, statistics in zip(decoder_layers(model), streamed, strict=True):
        with torch.no_grad(), observe(layer, architecture_of(model), "max") as expected:
            model(tokens)
        for name, value in expected.items():
            torch.testing.assert_close(statistics[name], value, rtol=1e-4, atol=1e-4)  # float32, other batches


@pytest.mark.parametrize("statistic", ["max", "square"])
def test_planted_outliers_are_selected(statistic):
    model = tiny_model()
    layer = decoder_layers(model)[0]
    with torch.no_grad():
        layer.post_attention_layernorm.weight[PLANTED] = 50.0
        with observe(layer, architecture_of(model), statistic) as statistics:
            model(tiny_tokens())
    split = select_outliers(statistics["mlp_input"], OutlierFeatures(features=3, statistic=statistic), "mlp_input")
    assert sorted(split.outlier_columns.tolist()) == PLANTED
    assert split.outlier_bits == 16


def test_quik_keeps_the_natural_order_and_atom_sorts():
    statistic = torch.tensor([3.0, 9.0, 1.0, 7.0, 2.0])
    quik = select_outliers(statistic, OutlierFeatures(features=2), "mlp_input")
    assert quik.normal_columns.tolist() == [0, 2, 4]
    assert quik.outlier_columns.tolist() == [3, 1]
    atom = select_outliers(statistic, OutlierFeatures(features=2, bits=8, order="ascending"), "mlp_input")
    assert atom.normal_columns.tolist() == [2, 4, 0]
    assert atom.outlier_columns.tolist() == [3, 1]
    assert atom.outlier_bits == 8


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=40),
    st.integers(1, 39),
    st.sampled_from(["natural", "ascending"]),
)
def test_a_split_is_a_permutation_whose_outliers_are_the_largest(values, count, order):
    statistic = torch.tensor(values)
    count = min(count, len(values) - 1)
    split = select_outliers(statistic, OutlierFeatures(features=count, order=order), "mlp_input")
    assert sorted(split.permutation.tolist()) == list(range(len(values)))
    assert statistic[split.outlier_columns].min() >= statistic[split.normal_columns].max()
    if order == "ascending":
        assert (statistic[split.permutation].diff() >= 0).all()


def test_sorting_the_normal_features_lowers_the_error_of_group_quantization():
    # Ranges that differ by feature: a group of similar features wastes fewer codes (Atom Sec. 4.1).
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 72, generator=generator) * torch.logspace(-1, 1, 72)[torch.randperm(72, generator=generator)]
    scheme = QuantizationScheme(bits=4, granularity="group", group_size=8)
    statistic = measure(x, "square")

    def error(order):
        split = select_outliers(statistic, OutlierFeatures(features=8, bits=8, order=order), "mlp_input")
        relative = (fake_quantize_split(x, scheme, split) - x) / statistic.sqrt()
        return relative.square().mean()

    assert error("ascending") < 0.5 * error("natural")


def test_keeping_outliers_lowers_the_error_of_the_other_features():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 100
    scheme = QuantizationScheme(bits=4, granularity="token")
    split = select_outliers(measure(x, "max"), OutlierFeatures(features=1), "mlp_input")
    kept = fake_quantize_split(x, scheme, split)
    assert torch.equal(kept[:, 7], x[:, 7])
    assert (kept - x).square().mean() < 0.05 * (fake_quantize(x, scheme) - x).square().mean()


def test_a_share_is_of_each_sites_own_width_and_of_named_sites_alone():
    outliers = OutlierFeatures(share=0.125, sites=("mlp_input",), bits=8)
    assert [outliers.outlier_features("mlp_input", width) for width in (4, 64, 100)] == [1, 8, 12]
    assert outliers.outlier_features("mlp_output", 64) == 0
    assert select_outliers(torch.arange(100.0), outliers, "mlp_input").outlier_columns.tolist() == [*range(88, 100)]
    assert "share" not in OutlierFeatures(features=3).model_dump()  # keys of existing results


def test_sites_without_outliers_are_quantized_whole():
    model, samples = tiny_model(), tiny_tokens()
    outliers = {"features": None, "share": 0.25, "sites": ["attention_input", "mlp_input"]}
    recipe = override(preset("quik"), {"methods": {"outliers": outliers, "gptq": None}, "rotation": None}, "test")
    state = build_weights(model, None, recipe, 0, samples).state
    splits = runtime_quantization(recipe, state).outliers
    assert {site for _, site in splits} == {"attention_input", "mlp_input"}
    assert {split.outliers for split in splits.values()} == {16}


@pytest.mark.parametrize("outliers", [{}, {"features": 3, "share": 0.1}], ids=["neither", "both"])
def test_a_number_or_a_share_is_given(outliers):
    with pytest.raises(ValueError, match="set features or share"):
        override(preset("quik"), {"methods": {"outliers": {"features": None, **outliers}}}, "test")


def test_as_many_outliers_as_features_is_refused():
    with pytest.raises(RecipeError, match="has only 4 features"):
        select_outliers(torch.ones(4), OutlierFeatures(features=4), "mlp_input")


def test_check_names_the_site_that_has_too_few_features():
    recipe = preset("quik")  # 256 outliers, the tiny model is 64 wide
    with pytest.raises(RecipeError, match="attention_input has only 64 features"):
        check_recipe(tiny_model(), recipe, None)


def test_check_refuses_groups_larger_than_what_outliers_leave():
    model, samples = tiny_model(), tiny_tokens()  # 64 and 96 features
    atom = preset("atom-128g")
    scheme = QuantizationScheme(bits=4, granularity="group", group_size=8)

    def recipe(outliers):
        groups = scheme.model_dump()
        methods = {"outliers": {"features": outliers}}
        changes = {"methods": methods, "weights": {"scheme": groups}, "activations": groups}
        return override(atom, changes, "test")

    check_recipe(model, recipe(4), samples)
    with pytest.raises(RecipeError, match=r"group size 8 of .* less 60 outliers\); .*group_size=4"):
        check_recipe(model, recipe(60), samples)
