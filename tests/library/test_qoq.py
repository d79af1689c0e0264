"""QoQ: two levels of integers that are one level of scales, transformations that keep the function, its searches."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rotquant.foundation.errors import RecipeError
from rotquant.methods.qoq import QoQ, reordering_and_clipping
from rotquant.methods.qoq.progressive import (
    PROTECTIVE_RANGE,
    QuantizationGrid,
    channel_scale,
    choose_grid,
    dequantize_by_levels,
    group_levels,
)
from rotquant.methods.qoq.reordering_and_clipping import (
    AttentionBlock,
    LayerStats,
    clip_ratios,
    gptq_codes,
    quantize_layer,
    salience_order,
    search_block_clip,
    smooth_layer,
    watched,
)
from rotquant.methods.qoq.smoothing import attention_scale, output_scale
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.models.equivalent import InPlace, scale_rows
from rotquant.models.rotation.fusing import rotate
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import quantize
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.context import QuantizationContext
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.search import search_ratios
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.invariance import norms_in_model_dtype
from tests.helpers.models import AWKWARD, FAMILIES, tiny_model, tiny_tokens
from tests.helpers.weights import weights_by_layer

GROUPS = QuantizationScheme(bits=4, symmetric=False, granularity="group", group_size=4)
CHANNEL = QuantizationScheme(bits=4, symmetric=False, granularity="channel")
SHORT = {"calibration": {"samples": 6, "sequence_length": 24}, "methods": {"qoq": {"clip_grid": 4}}}
RECIPE = override(preset("qoq"), {**SHORT, "weights": {"scheme": {"group_size": 4}}}, "test")
CHANNELS = override(preset("qoq-channel"), SHORT, "test")
SAMPLES = tiny_tokens(batch=6, tokens=24, seed=5)
SHAPES: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    **AWKWARD,
    "biased": {"family": "llama", "attention_bias": True, "mlp_bias": True},
}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def uneven(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A weight whose rows and columns differ in size."""
    return gaussian(rows, columns, seed=seed, dtype=dtype) * torch.exp(
        gaussian(rows, 1, seed=seed + 1, dtype=dtype) + gaussian(1, columns, seed=seed + 2, dtype=dtype)
    )


# Two levels of integers


def reference(row: list[float], size: int, ratio: float, real: bool) -> tuple[float, list[int], list[int], list[int]]:
    """Eqs. 3-4 for one output channel, number by number: s0, s1 and z of each group, and the 4-bit codes."""
    s0 = float(np.float16(max(map(abs, row)) / 119))  # torch rounds by float32, so twice
    scaled = [max(-119.0, min(119.0, w / s0 if real else round(w / s0))) for w in row]
    scales, zeros, codes = [], [], []
    for start in range(0, len(scaled), size):
        group = scaled[start : start + size]
        low, high = ratio * min(0, *group), ratio * max(0, *group)
        s1 = max(1, round((high - low) / 15))
        z = min(15, max(0, round(-low / s1)))
        scales.append(s1)
        zeros.append(z)
        codes += [min(15, max(0, round(value / s1) + z)) for value in group]
    return s0, scales, zeros, codes


@pytest.mark.parametrize("intermediate", ["integers", "real"])
@given(seed=st.integers(0, 2**31), ratio=st.sampled_from([1.0, 0.93, 0.41]))
@settings(max_examples=30)
def test_codes_and_scales_are_those_of_the_equations(intermediate, seed, ratio):
    weight = uneven(5, 16, seed=seed)
    grid = choose_grid(weight, GROUPS, ratio, intermediate)
    codes = grid.codes(weight)
    for i, row in enumerate(weight.tolist()):
        s0, scales, zeros, expected = reference(row, 4, ratio, real=intermediate == "real")
        assert grid.unit[i].item() == s0
        assert grid.pair[0][i].flatten().tolist() == scales
        assert grid.pair[1][i].flatten().tolist() == zeros
        assert codes[i].tolist() == expected


def kernel(values: Tensor, limit: int = 127, ratio: float = 1.0) -> Tensor:
    """What a kernel's intermediate weights become for groups of two whole numbers [n, 2]."""
    pairs = GROUPS.model_copy(update={"group_size": 2})
    levels = group_levels(values, pairs, ratio)
    return dequantize_by_levels(
        quantize(values, levels, pairs), QuantizationGrid(values.new_ones(()), levels, pairs, limit=limit)
    )[0]


def ranges(limit: int) -> Tensor:
    """Every (least, largest) that the codes of a group may have within +-limit, float32 [n, 2].

    Codes between the two become something between: rounding and clamping are monotone.
    """
    numbers = torch.arange(-limit, limit + 1)
    pairs = torch.cartesian_prod(numbers, numbers)
    return pairs[pairs[:, 0] <= pairs[:, 1]].float()


@pytest.mark.parametrize("ratio", [1.0, 0.97, 0.9, 0.5, 0.2])
def test_within_the_protective_range_no_intermediate_weight_leaves_int8(ratio):
    assert kernel(ranges(PROTECTIVE_RANGE), ratio=ratio).abs().max() <= 127
    assert group_levels(ranges(PROTECTIVE_RANGE), GROUPS.model_copy(update={"group_size": 2})).scale.max() == 16


def test_one_beyond_the_protective_range_is_too_much_and_the_papers_example_leaves_int8():
    # Sec. 4.1: codes in [-113, 120] have scale 16 and zero point 7, and 120 becomes 128.
    assert kernel(torch.tensor([[-113.0, 120.0]])).tolist() == [[-112, 128]]
    assert kernel(ranges(PROTECTIVE_RANGE + 1)).max() > 127
    assert kernel(ranges(127)).min() < -128


def test_a_weight_leaves_int8_without_the_protective_range_and_not_with_it():
    weight = torch.tensor([[-113.0, 120.0, 0.0, 5.0, 127.0, 0.0, 1.0, 2.0]])
    for limit, fits in ((127, False), (PROTECTIVE_RANGE, True)):
        grid = choose_grid(weight, GROUPS, limit=limit)
        whole, _ = dequantize_by_levels(grid.codes(weight), grid)
        assert (whole.abs().max() <= 127) == fits


@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    ratio=st.sampled_from([1.0, 0.93, 0.4]),
)
@settings(max_examples=40)
def test_the_stored_form_is_the_two_levels_bit_for_bit(seed, exponent, dtype, ratio):
    # s0 has 11 significant bits, s1 5, codes less their zero points 4: no product of the three is rounded in float32.
    weight = uneven(6, 16, seed=seed, dtype=dtype) * 2.0**exponent
    grid = choose_grid(weight, GROUPS, ratio)
    codes = grid.codes(weight)
    whole, values = dequantize_by_levels(codes, grid)
    assert whole.abs().max() <= 127
    stored = QuantizedWeight(codes, grid.qparams, GROUPS)
    assert torch.equal(stored.dequantize(dtype), values)
    for other in (torch.float16, torch.bfloat16):
        assert torch.equal(stored.dequantize(other), values.to(other))


def test_the_first_level_has_scales_that_are_float16_numbers():
    scale = channel_scale(uneven(200, 16, dtype=torch.float32))
    assert torch.equal(scale, scale.half().float())
    exact = uneven(200, 16, dtype=torch.float32).abs().amax(1, keepdim=True) / 119
    assert ((scale / exact - 1).abs() <= 2.0**-11).all()


@pytest.mark.parametrize("scheme", [GROUPS, CHANNEL])
def test_rows_of_zeros_and_of_next_to_nothing_stay_finite(scheme):
    weight = torch.tensor([[0.0] * 8, [1e-38] * 8, [0.0] * 7 + [3e38], [2.0] * 8, [-2.0] * 8])
    rounded = choose_grid(weight, scheme).rounded(weight)
    assert torch.isfinite(rounded).all()
    assert (rounded[0] == 0).all()
    # One step of 4 bits over a range from zero; within groups s1 is a whole number of 119, which moves the end by 1 %.
    assert torch.allclose(rounded[3:], weight[3:], rtol=0.01)


def test_rounding_once_leaves_less_error_than_by_way_of_integers():
    weight = gaussian(64, 256)
    eights = GROUPS.model_copy(update={"group_size": 16})
    once, twice = (
        (choose_grid(weight, eights, intermediate=how).rounded(weight) - weight).square().mean()
        for how in ("real", "integers")
    )
    assert once < twice < 1.1 * once


# Transformations


def layer_stats(
    model: nn.Module, samples: Tensor = SAMPLES, keep: bool = False
) -> list[tuple[nn.Module, LayerStats, int]]:
    """Each decoder layer, what calibration shows of it, and how many dimensions of a head RoPE turns."""
    stream, found = capture_layer_inputs(model, samples, batch_size=4), []
    for index, layer in stream.layers("test"):
        with watched(layer, architecture_of(model), keep, stream.hidden.device) as stats:
            stream.advance(index)
        found.append((layer, stats, stream.kwargs[index]["position_embeddings"][0].shape[-1]))
    return found


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_smoothing_keeps_the_logits(name):
    # Grouped queries, biases (Qwen2, a biased Llama), fused projections (Phi-3), RoPE on a part of each head. In
    # float64, with logits of size 10, rounding leaves about 1e-13.
    model = tiny_model(**SHAPES[name], dtype=torch.float64)
    untouched = {name: parameter.clone() for name, parameter in model.named_parameters()}
    chosen = QoQ(attention_alpha=0.7, output_alpha=0.4)
    with norms_in_model_dtype(model):
        before = model(tiny_tokens(), use_cache=False).logits
        for layer, stats, rotary_dim in layer_stats(model):
            smooth_layer(layer, architecture_of(model), stats, chosen, rotary_dim)
        assert (model(tiny_tokens(), use_cache=False).logits - before).abs().max() < 1e-10
    architecture, layer = architecture_of(model), "model.layers.0"
    for part in (architecture.query, architecture.key, architecture.value, architecture.up):
        rows, weight = slice(*(part.rows or (None,))), f"{layer}.{part.name}.weight"
        assert not torch.allclose(model.get_parameter(weight)[rows], untouched[weight][rows], rtol=0.1)
    gate = slice(*(architecture.gate.rows or (None,)))
    same = f"{layer}.{architecture.gate.name}.weight"
    assert torch.equal(model.get_parameter(same)[gate], untouched[same][gate])


@torch.no_grad()
def keys_of(model: nn.Module, index: int, tokens: Tensor) -> Tensor:
    """A Llama layer's keys after RoPE, by transformers' own function: [batch, kv heads, tokens, head_dim]."""
    seen: dict[str, Any] = {}
    attention = decoder_layers(model)[index].self_attn
    hooks = [
        attention.register_forward_pre_hook(lambda _m, _a, kwargs: seen.update(kwargs), with_kwargs=True),
        attention.k_proj.register_forward_hook(lambda _m, _i, output: seen.update(keys=output)),
    ]
    model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    keys = seen["keys"].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    return apply_rotary_pos_emb(keys, keys, *seen["position_embeddings"])[1]


@torch.no_grad()
def test_what_is_watched_is_what_layers_read_and_what_the_cache_holds():
    model = tiny_model(dtype=torch.float64)
    architecture = architecture_of(model)
    for index, (layer, stats, rotary_dim) in enumerate(layer_stats(model, keep=True)):
        inputs: dict[str, Tensor] = {}
        hooks = [
            layer.get_submodule(site.linears[0]).register_forward_pre_hook(
                lambda _m, args, name=site.name, inputs=inputs: inputs.update({name: args[0].flatten(0, 1)})
            )
            for site in architecture.sites
        ]
        model(SAMPLES, use_cache=False)
        for hook in hooks:
            hook.remove()
        # float64; transformers' own norms compute in float32, whose last bit other batches of a product may flip.
        for name, x in inputs.items():
            torch.testing.assert_close(stats.maxima[name], x.abs().amax(0), rtol=1e-5, atol=1e-6)
            for linear in architecture.site(name).linears:
                torch.testing.assert_close(stats.moments[linear], x.T @ x, rtol=1e-5, atol=1e-4)
        kept = torch.cat(stats.attention).flatten(0, 1)
        torch.testing.assert_close(kept, inputs["attention_input"], rtol=1e-5, atol=1e-6)
        expected = keys_of(model, index, SAMPLES).abs().amax(dim=(0, 2))
        torch.testing.assert_close(stats.keys, expected, rtol=1e-5, atol=1e-6)
        assert rotary_dim == architecture.head_dim


@pytest.mark.parametrize("name", ["llama-3", "phi-3"])
@torch.no_grad()
def test_searches_know_the_second_moments_of_smoothed_inputs(name):
    model = tiny_model(**AWKWARD[name], dtype=torch.float64)
    chosen, architecture = QoQ(output_alpha=0.4), architecture_of(model)
    with norms_in_model_dtype(model):
        known = [smooth_layer(layer, architecture, stats, chosen, size) for layer, stats, size in layer_stats(model)]
        for moments, (_, stats, _) in zip(known, layer_stats(model), strict=True):
            for site, moment in stats.moments.items():
                torch.testing.assert_close(moments[site], moment, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rotary_dim", [8, 6])
def test_the_two_dimensions_that_rope_turns_share_a_scale(rotary_dim):
    maxima = gaussian(3, 8).abs()
    scale, half = attention_scale(maxima, 0.5, rotary_dim), rotary_dim // 2
    for head, i in itertools.product(range(3), range(8)):
        partner = i if i >= rotary_dim else (i + half) % rotary_dim
        assert scale[head, i] == max(maxima[head, i], maxima[head, partner]) ** 0.5


def test_scales_of_what_is_always_zero_are_one():
    assert attention_scale(torch.zeros(1, 4), 0.5, 4).tolist() == [[1.0] * 4]
    maxima, weights = torch.tensor([4.0, 0.0, 4.0, 0.0]), torch.tensor([9.0, 9.0, 0.0, 0.0])
    assert output_scale(maxima, weights, 0.5).tolist() == pytest.approx([2 / 3, 1.0, 1.0, 1.0])
    assert output_scale(maxima, weights, 0.0).tolist() == pytest.approx([1 / 9, 1.0, 1.0, 1.0])


@torch.no_grad()
def planted(seed: int = 0) -> nn.Module:
    """A tiny Llama with two dimensions of every key far larger than the others (Sec. 4.2's observation)."""
    model = tiny_model(seed=seed)
    for layer in decoder_layers(model):
        for row in (3, 21):
            layer.self_attn.k_proj.weight[row] *= 12
            layer.self_attn.q_proj.weight[[row, row + 16]] /= 12
    return model


@torch.no_grad()
def test_smooth_attention_levels_the_keys_and_lowers_the_error_of_a_4_bit_cache():
    tokens = tiny_tokens(batch=8, tokens=24, seed=6)

    def measured(alpha: float, seed: int) -> tuple[float, float]:
        recipe = override(
            RECIPE,
            {
                "rotation": None,
                "activations": None,
                "values": None,
                "methods": {"qoq": {"attention_alpha": alpha, "smoothed": (), "clip_search": False, "reorder": "none"}},
            },
            "test",
        )
        stored = build_weights(planted(seed), None, recipe, 0, SAMPLES, progress=False)
        exact = stored.model(tokens, use_cache=False).logits
        with quantized_forward(stored.model, recipe, stored.state):
            error = (stored.model(tokens, use_cache=False).logits - exact).norm() / exact.norm()
        largest = keys_of(stored.model, 0, tokens).abs().amax(dim=(0, 2))
        return error.item(), (largest.amax() / largest.median()).item()

    plain, smooth = ([measured(alpha, seed) for seed in range(3)] for alpha in (0.0, 0.5))
    # 0.52 times the error and 0.28 times the ratio of the largest to the median dimension
    assert sum(error for error, _ in smooth) < 0.76 * sum(error for error, _ in plain)
    assert sum(ratio for _, ratio in smooth) < 0.64 * sum(ratio for _, ratio in plain)


# Orders and searches


@pytest.mark.parametrize("name", ["llama-2", "llama-3", "phi-3"])
@torch.no_grad()
def test_the_order_of_what_output_layers_read_can_be_had_by_reordering_rows_of_the_layers_before(name):
    model = tiny_model(**AWKWARD[name], dtype=torch.float64)
    architecture, size = architecture_of(model), architecture_of(model).head_dim
    before = model(tiny_tokens(), use_cache=False).logits
    repeats = architecture.num_heads // architecture.num_kv_heads
    for layer, stats, _ in layer_stats(model):
        for site, part in (("attention_output", architecture.value), ("mlp_output", architecture.up)):
            order = salience_order(stats.maxima[site], architecture.site(site), architecture)
            assert sorted(order.tolist()) == list(range(len(order)))
            weight = linear_of(layer, architecture.site(site).linears[0]).weight
            weight.copy_(weight[:, order])
            if site == "attention_output":  # rows of v_proj: those of the first query head of each group
                heads = order.view(architecture.num_kv_heads, repeats, size)
                assert all((heads[:, :1] % size == heads % size).flatten())
                order = (heads[:, 0] % size + size * torch.arange(architecture.num_kv_heads).unsqueeze(1)).flatten()
            parts = (part,) if site == "attention_output" else (architecture.gate, part)
            for projection in parts:
                rows = slice(*(projection.rows or (None,)))
                linear = linear_of(layer, projection.name)
                linear.weight[rows] = linear.weight[rows][order]
    assert (model(tiny_tokens(), use_cache=False).logits - before).abs().max() < 1e-6  # of float32 norms


def test_features_are_ordered_by_salience_where_weights_have_groups_and_the_recipe_says_so():
    model = tiny_model()
    found = {
        reorder: build_weights(
            tiny_model(),
            None,
            override(RECIPE, {"rotation": None, "methods": {"qoq": {"reorder": reorder, "clip_search": False}}}, "t"),
            0,
            SAMPLES,
            progress=False,
        ).weights
        for reorder in ("none", "outputs", "all")
    }
    outputs = {architecture_of(model).attention_output, architecture_of(model).mlp_output}
    for name in found["none"]:
        of_output = any(f".{linear}." in name for linear in outputs)
        assert found["none"][name].columns is None
        assert (found["outputs"][name].columns is not None) == of_output
        assert found["all"][name].columns is not None
    maxima = layer_stats(tiny_model())[0][1].maxima
    for linear, site in (("mlp.down_proj", "mlp_output"), ("mlp.up_proj", "mlp_input")):
        ordered = maxima[site][found["all"][f"model.layers.0.{linear}.weight"].columns]
        assert (ordered.diff() >= 0).all()
    channels = override(CHANNELS, {"methods": {"qoq": {"reorder": "all", "clip_search": False}}}, "test")
    stored = build_weights(tiny_model(), None, channels, 0, SAMPLES, progress=False)
    assert all(weight.columns is None for weight in stored.weights.values())


@pytest.mark.parametrize("scheme", [GROUPS, CHANNEL])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=10)
def test_each_scale_is_clipped_where_its_elements_disturb_the_output_least(scheme, seed):
    weight, x = uneven(3, 12, seed=seed), gaussian(40, 12, seed=seed + 3)
    ratios = clip_ratios(8)

    def rounded(ratio):
        return choose_grid(weight, scheme, ratio).rounded(weight)

    found = search_ratios(weight, x.T @ x, scheme, ratios, rounded)
    size = scheme.group_size or 12
    for row, group in itertools.product(range(3), range(12 // size)):
        columns = slice(group * size, (group + 1) * size)
        errors = []
        for ratio in ratios:
            rounded = choose_grid(weight, scheme, ratio).rounded(weight)
            difference = x[:, columns] @ (rounded - weight)[row, columns]
            errors.append(difference.square().sum().item())
        # Integer scales give many shares the same error; sums in another order differ in the last digits.
        chosen = errors[ratios.index(found.reshape(3, -1)[row, group].item())]
        assert chosen <= min(errors) * (1 + 1e-9)


def test_the_shares_of_a_range_go_down_to_a_fifth():
    assert clip_ratios(80)[:2] == [1.0, 0.99]
    assert clip_ratios(80)[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("reorder", ["outputs", "all"])
@pytest.mark.parametrize("name", ["llama-3", "qwen2", "phi-3-longrope"])
@torch.no_grad()
def test_queries_and_keys_are_clipped_where_the_attention_blocks_output_changes_least(name, reorder):
    model = tiny_model(**AWKWARD[name], dtype=torch.float64)
    architecture, ratios = architecture_of(model), clip_ratios(4)
    layer, stats, rotary_dim = layer_stats(model, keep=True)[0]
    untouched = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    chosen = QoQ(clip_grid=4, attention_alpha=0.0, smoothed=(), reorder=reorder)
    order = torch.arange(architecture.hidden_size)
    if reorder == "all":  # groups are formed in this order, and the block reads features in their natural one
        order = salience_order(stats.maxima["attention_input"], architecture.site("attention_input"), architecture)
    block = AttentionBlock(
        layer.get_submodule(architecture.attention), stats.attention, stats.arguments, torch.device("cpu")
    )

    def attended(linear: str, rows: slice, values: Tensor | None) -> Tensor:
        """The attention block's output of the whole model, with other numbers in some rows of a weight."""
        outputs: list[Tensor] = []
        hook = layer.get_submodule(architecture.attention).register_forward_hook(
            lambda _m, _i, output: outputs.append(output[0])
        )
        parameter = linear_of(layer, linear).weight
        if values is not None:
            parameter[rows] = values
        model(SAMPLES, use_cache=False)
        parameter.copy_(untouched[f"{linear}.weight"])
        hook.remove()
        return outputs[0]

    expected = {}
    for part in (architecture.query, architecture.key):
        rows = slice(*(part.rows or (None,)))
        weight, exact = untouched[f"{part.name}.weight"][rows], attended(part.name, rows, None)

        def rounded(ratio: float, weight: Tensor = weight) -> Tensor:
            return choose_grid(weight[:, order], GROUPS, ratio).rounded(weight[:, order])[:, order.argsort()]

        errors = [(attended(part.name, rows, rounded(ratio)) - exact).square().sum() for ratio in ratios]
        expected[part] = ratios[int(torch.stack(errors).argmin())]
        found = search_block_clip(block, linear_of(layer, part.name).weight, rows, rounded, ratios)
        assert found == expected[part]
        assert torch.equal(linear_of(layer, part.name).weight, untouched[f"{part.name}.weight"])
    weights = quantize_layer(layer, architecture, stats, chosen, GROUPS, rotary_dim)
    for part, ratio in expected.items():
        rows = slice(*(part.rows or (None,)))
        grid = choose_grid(untouched[f"{part.name}.weight"][rows][:, order], GROUPS, ratio)
        assert torch.equal(weights[part.name].qparams.scale[rows], grid.qparams.scale)


def reference_gptq(weight: Tensor, grid: QuantizationGrid, hessian: Tensor, damping: float) -> Tensor:
    """Column by column, the inverse of what remains of the Hessian found anew for each (Frantar et al., Eqs. 2-3)."""
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)
    values, codes = weight / grid.unit, torch.empty(weight.shape, dtype=torch.uint8)
    features = weight.shape[1]
    scale, zero = (part.flatten(1).repeat_interleave(features // part.flatten(1).shape[1], 1) for part in grid.pair)
    left = hessian.diagonal().argsort(descending=True).tolist()
    while left:
        j, *rest = left
        code = (torch.round(grid.bounded(values[:, j : j + 1])[:, 0] / scale[:, j]) + zero[:, j]).clamp(0, 15)
        codes[:, j] = code.to(torch.uint8)
        error = values[:, j] - (code - zero[:, j]) * scale[:, j]
        if rest:
            values[:, rest] += error[:, None] * torch.linalg.solve(hessian[rest][:, rest], hessian[rest, j])
        left = rest
    return codes


@pytest.mark.parametrize("intermediate", ["integers", "real"])
@pytest.mark.parametrize("scheme", [GROUPS, CHANNEL])
def test_gptq_under_fixed_scales_is_its_equations(scheme, intermediate):
    weight, x = uneven(6, 140), uneven(300, 140, seed=5)  # two blocks of columns, the last one shorter
    grid, hessian = choose_grid(weight, scheme, 0.9, intermediate), x.T @ x
    codes = gptq_codes(weight, grid, hessian, 0.01)
    assert torch.equal(codes, reference_gptq(weight, grid, hessian, 0.01))
    nearest = grid.codes(weight)

    def error(found: Tensor) -> float:
        values = QuantizedWeight(found, grid.qparams, scheme).dequantize(weight.dtype)
        return (x @ (values - weight).T).square().sum().item()

    assert error(codes) < error(nearest)


def test_gptq_leaves_int8_no_more_than_rounding_to_nearest():
    # Weights that errors have moved beyond the protective range; without its bound the largest becomes 128.
    weight, x = gaussian(64, 64).sign() * 0.5 + gaussian(64, 64, seed=3) * 0.01, uneven(200, 64, seed=1)
    grid = choose_grid(weight, GROUPS)
    codes = gptq_codes(weight, grid, x.T @ x, 0.01)
    whole, values = dequantize_by_levels(codes, grid)
    assert whole.abs().max() <= 127
    assert torch.equal(QuantizedWeight(codes, grid.qparams, GROUPS).dequantize(torch.float64), values)
    unbounded = QuantizationGrid(grid.unit, grid.levels, GROUPS, "real", limit=10**6)
    assert dequantize_by_levels(gptq_codes(weight, unbounded, x.T @ x, 0.01), unbounded)[0].max() > 127


# The whole method


def test_every_layer_is_searched_on_what_full_precision_gives():
    # By hand: watch each layer in the untouched model, then quantize it.
    reference_model, model = (tiny_model(dtype=torch.float64) for _ in range(2))
    plain = override(RECIPE, {"rotation": None}, "test")
    architecture, chosen = architecture_of(model), QoQ.of(plain)
    context = QuantizationContext(model, plain, SAMPLES, 0, torch.device("cpu"), batch_size=4)
    reordering_and_clipping.apply(chosen, context)
    weights = weights_by_layer(context)
    for found, (layer, stats, rotary_dim) in zip(weights, layer_stats(reference_model, keep=True), strict=True):
        for name, weight in quantize_layer(layer, architecture, stats, chosen, GROUPS, rotary_dim).items():
            assert torch.equal(found[name].codes, weight.codes)
            assert torch.equal(found[name].qparams.scale, weight.qparams.scale)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference_model.parameters(), strict=True))


@torch.no_grad()
def test_online_transforms_act_while_weights_are_searched():
    """With the output layers' inputs rotated at run time they are left unsmoothed, and X^T X is of rotated features."""
    rotated = {"values": "hadamard", "heads": True, "mlp": True}
    recipe = override(RECIPE, {"rotation": rotated, "methods": {"qoq": {"smoothed": ()}}}, "test")
    stored = build_weights(tiny_model(), None, recipe, 0, SAMPLES, progress=False)
    model = tiny_model()
    rotate(model, recipe.rotation, seed=0)
    context = QuantizationContext(model, recipe, SAMPLES, 0, torch.device("cpu"), None)
    reordering_and_clipping.apply(QoQ.of(recipe), context)
    weights = weights_by_layer(context)
    name = "mlp.down_proj"
    assert torch.equal(stored.weights[f"model.layers.1.{name}.weight"].codes, weights[1][name].codes)
    exact = tiny_model()(tiny_tokens(), use_cache=False).logits
    with quantized_forward(stored.model, recipe, stored.state):
        error = (stored.model(tiny_tokens(), use_cache=False).logits - exact).norm() / exact.norm()
    assert error < 0.3  # of 4-bit weights; a transform without its inverse would leave about 1.4


@torch.no_grad()
def logit_error(recipe, seeds=range(3)) -> float:
    """Relative error of a tiny model's logits under a recipe, the mean over models."""
    tokens, errors = tiny_tokens(batch=8, tokens=24, seed=6), []
    for seed in seeds:
        exact = planted(seed)(tokens, use_cache=False).logits
        stored = build_weights(planted(seed), None, recipe, 0, SAMPLES, progress=False)
        with quantized_forward(stored.model, recipe, stored.state):
            errors.append((stored.model(tokens, use_cache=False).logits - exact).norm() / exact.norm())
    return torch.stack(errors).mean().item()


@pytest.mark.parametrize("recipe", [RECIPE, CHANNELS], ids=["groups", "channels"])
def test_qoq_beats_round_to_nearest(recipe):
    plain = override(recipe, {"methods": {"qoq": None}, "rotation": None}, "test")
    # 0.83 times the error in groups and 0.87 per channel
    assert logit_error(recipe) < 0.93 * logit_error(plain)


@pytest.mark.parametrize("recipe", [RECIPE, CHANNELS], ids=["groups", "channels"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_integers_are_the_weights_bit_for_bit(recipe, family, dtype, tmp_path: Path):
    stored = build_weights(tiny_model(family=family, dtype=dtype), tiny_tokenizer(), recipe, 0, SAMPLES, progress=False)
    save_quantized(tmp_path / "model", stored)
    model, _, state = load_quantized(tmp_path / "model")
    assert state.recipe == recipe
    for name, weight in stored.weights.items():
        assert torch.equal(stored.model.get_parameter(name), weight.dequantize(dtype))
    for key, value in stored.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


ROTATED = {"rotation": {"heads": True}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weights": None}, "qoq .* needs a weights section"),
        ({"weights": {"scheme": {"bits": 3}}}, "qoq takes asymmetric weights of 4 bits"),
        ({"weights": {"scheme": {"bits": 8}}}, "qoq takes asymmetric weights of 4 bits"),
        ({"weights": {"scheme": {"symmetric": True}}}, "qoq takes asymmetric weights of 4 bits"),
        (
            {"weights": {"scheme": {"granularity": "tensor", "group_size": None}}},
            "4 bits with granularity channel or group",
        ),
        ({"weights": {"scheme": {"clip_ratio": 0.9}}}, "leave weights.scheme.clip_ratio at 1"),
        ({"weights": {"clip_search": True}}, "qoq rounds weights in its own way"),
        ({"methods": {"gptq": {}}}, "qoq and gptq both round the weights"),
        ({"methods": {"smoothquant": {}}}, "both change the same weights"),
        ({"methods": {"outliers": {"features": 4}}}, "qoq cannot be combined with outliers"),
        ({"methods": {"prefixed_outliers": {}}}, "qoq cannot be combined with prefixed_outliers"),
        ({"rotation": {"heads": True}}, "attention_output, which rotation.heads mixes"),
        ({"rotation": {"mlp": True}}, "mlp_output, which rotation.mlp mixes"),
        ({"methods": {"qoq": {"smoothed": ["mlp_input"]}}}, "methods.qoq.smoothed"),
        ({"calibration": None}, "qoq needs a calibration section"),
    ],
)
def test_meaningless_combinations_are_refused(change, problem):
    with pytest.raises(RecipeError, match=problem):
        override(RECIPE, change, "test")


def test_groups_larger_than_a_row_are_refused_before_any_work():
    large_groups = override(RECIPE, {"weights": {"scheme": {"group_size": 360}}}, "test")
    with pytest.raises(RecipeError, match="group size 360 of weights exceeds"):
        build_weights(tiny_model(), None, large_groups, 0, SAMPLES, progress=False)


def test_what_is_mixed_at_run_time_may_be_left_unsmoothed():
    recipe = override(RECIPE, {"rotation": {"heads": True}, "methods": {"qoq": {"smoothed": ["mlp_output"]}}}, "test")
    assert QoQ.of(recipe).smoothed == ("mlp_output",)


def test_the_run_time_quantizers_do_not_change_the_stored_weights():
    four = override(RECIPE, {"activations": {"bits": 4}}, "test")
    assert four.stored() == RECIPE.stored()


def test_words_say_what_is_done():
    assert QoQ.of(RECIPE).describe(RECIPE) == (
        "QoQ (keys smoothed by alpha 0.5, inputs of o_proj and down_proj by 0.1, by way of INT8, outputs in order of "
        "salience, clipped by 4 steps)"
    )
    changes = {"attention_alpha": 0, "smoothed": [], "clip_search": False, "rounding": "gptq", "reorder": "none"}
    bare = override(CHANNELS, {"methods": {"qoq": changes}}, "test")
    assert QoQ.of(bare).describe(bare) == "QoQ (GPTQ (damping 1%, activation order))"


@torch.no_grad()
def test_rows_of_a_fused_projection_are_scaled_with_their_biases_and_no_others():
    model = tiny_model("phi3")
    architecture, layer = architecture_of(model), decoder_layers(model)[0]
    linear = linear_of(layer, architecture.key.name)
    linear.bias = nn.Parameter(torch.ones(len(linear.weight)))
    before, (start, stop) = linear.weight.clone(), architecture.key.rows
    factor = torch.arange(1, stop - start + 1)
    scale_rows(InPlace(layer), architecture.key, factor)
    assert torch.equal(linear.bias[start:stop], factor.float())
    assert torch.equal(linear.weight[start:stop], before[start:stop] * factor.unsqueeze(1))
    others = [row for row in range(len(before)) if not start <= row < stop]
    assert torch.equal(linear.weight[others], before[others])
    assert (linear.bias[others] == 1).all()
