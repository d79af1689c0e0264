"""Grid search of scales (PrefixQuant Secs. 3, 6.1): of weights by a layer's outputs, of static scales by a block's."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.methods.grid_scales import GridScales
from rotquant.methods.grid_weights import GridWeights
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.simulation.queries import ScoreRule, observed_queries
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, hook_site, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe, parse_recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, fake_quantize
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.scale_search import attention_weights, best_factors
from rotquant.weights.search import output_error, search_ratios
from tests.helpers.models import FAMILIES, outlier_model, tiny_model, tiny_tokens

SAMPLES = tiny_tokens(batch=4, tokens=24, seed=3)
HEADS = {"bits": 4, "granularity": "head", "dynamic": False}
TENSOR = {"bits": 4, "granularity": "tensor", "dynamic": False}


def recipe(methods: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe with these methods on the samples above."""
    text = {"corpus": "modules", "samples": len(SAMPLES), "sequence_length": SAMPLES.shape[1]}
    return parse_recipe({"methods": methods, "calibration": text, **sections}, "the test's recipe")


def static(scales: dict[str, Any] | None, **sections: Any) -> Recipe:
    """A recipe with static scales of everything, by grid search or, with None, as wide as the text."""
    schemes = {"activations": TENSOR, "keys": HEADS, "values": HEADS}
    return recipe({} if scales is None else {"grid_scales": scales}, **schemes, **sections)


@pytest.mark.parametrize("shape", [(), (3, 1, 1, 1)])
def test_each_factor_comes_near_the_least_of_its_own_cost(shape: tuple[int, ...]) -> None:
    settings = GridScales(smallest=0.1, coarse=10, fine=10)
    least = 0.15 + 0.8 * torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = best_factors(lambda factors: (factors - least).square(), least, settings)
    assert ((found - least).abs() <= 0.1 / 10 / 2 + 1e-9).all()  # half a step of the fine grid


def test_of_equally_good_factors_the_nearest_to_one_is_kept() -> None:
    assert best_factors(torch.zeros_like, torch.zeros(2), GridScales()).tolist() == [1.0, 1.0]


def test_ratios_of_a_ragged_row_are_those_of_each_group_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 21, generator=generator, dtype=torch.float64)
    x = torch.randn(40, 21, generator=generator, dtype=torch.float64)
    options = {"bits": 3, "symmetric": False}
    grouped = QuantizationScheme(granularity="group", group_size=8, **options)
    row = QuantizationScheme(granularity="channel", **options)
    ratios = GridWeights(steps=12).ratios(row)
    pieces = zip(weight.split(8, dim=1), x.split(8, dim=1), strict=True)
    alone = torch.stack([search_ratios(part, seen.T @ seen, row, ratios) for part, seen in pieces], dim=1)
    assert torch.equal(search_ratios(weight, x.T @ x, grouped, ratios), alone)


@pytest.mark.parametrize(
    "scheme",
    [
        QuantizationScheme(bits=4, granularity="channel"),
        QuantizationScheme(bits=3, granularity="channel", symmetric=False),
        QuantizationScheme(bits=4, granularity="tensor"),
        QuantizationScheme(bits=2, granularity="group", group_size=8, symmetric=False),
    ],
)
def test_scales_of_weights_are_those_of_least_error_of_the_outputs(scheme: QuantizationScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 16, generator=generator, dtype=torch.float64)
    x = torch.randn(40, 16, generator=generator, dtype=torch.float64) * torch.rand(16, generator=generator).double()
    ratios = GridWeights(steps=12).ratios(scheme)
    found = choose_qparams(weight, scheme, search_ratios(weight, x.T @ x, scheme, ratios)).scale
    candidates = [choose_qparams(weight, scheme, ratio) for ratio in ratios]
    errors = [x.unsqueeze(0) * (fake_quantize(weight, scheme, q) - weight).unsqueeze(1) for q in candidates]
    # [ratio, out, token, in] summed over the inputs of a scale, squared, summed over tokens
    parts = torch.stack(errors).unflatten(-1, (-1, scheme.group_size or 16)).sum(-1).square().sum(2)
    parts = parts.sum((1, 2)) if scheme.granularity == "tensor" else parts
    best = parts.argmin(0)
    scales = torch.stack([q.scale for q in candidates]).flatten(2 if scheme.granularity != "tensor" else 0)
    expected = scales.gather(0, best.view(1, *best.shape) if best.ndim else best.view(1))
    assert torch.equal(found.flatten(), expected.flatten())


@pytest.mark.gpu
def test_tensor_cores_choose_scales_as_good_as_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    scheme = QuantizationScheme(bits=4, granularity="channel")
    weight = torch.randn(256, 4096, generator=generator)
    x = torch.randn(512, 4096, generator=generator) * torch.rand(4096, generator=generator)
    moment, ratios = x.T @ x, GridWeights().ratios(scheme)
    before = torch.backends.cuda.matmul.fp32_precision
    chosen = search_ratios(weight.cuda(), moment.cuda(), scheme, ratios).cpu()
    assert torch.backends.cuda.matmul.fp32_precision == before
    exact = search_ratios(weight.double(), moment.double(), scheme, ratios)

    def error(found: Tensor) -> Tensor:
        wide = weight.double()
        return output_error(fake_quantize(wide, scheme, choose_qparams(wide, scheme, found)) - wide, moment.double())

    # Factors of 11 bits: each of 4096 products is off by 2^-11 at most, by chance in either direction.
    assert (error(chosen.double()) <= error(exact) * (1 + 1e-3)).all()


def test_ratios_run_from_one_down_to_the_least_without_it() -> None:
    scheme = QuantizationScheme(bits=4, granularity="channel")
    assert GridWeights(smallest=0.5, steps=10).ratios(scheme) == pytest.approx([1 - 0.05 * i for i in range(10)])


def test_attention_weights_are_those_that_attention_computes_with() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 5 + 2 * (heads == 2), 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None].repeat_interleave(2, 1), v[None].repeat_interleave(2, 1), attn_mask=mask
    )[0]
    found = attention_weights(q, k, before=2, causal=True, rule=ScoreRule(8**-0.5)) @ v.unsqueeze(1)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-5, atol=1e-6)


def _output_error(model: torch.nn.Module, name: str, scheme: QuantizationScheme, qparams: QParams) -> Tensor:
    """Squared error of the first layer's outputs where one input alone is quantized so."""
    with wrap(model, RuntimeQuantization()):
        stream = capture_layer_inputs(model, SAMPLES)
    exact = torch.cat(list(stream.outputs(0)))
    with Handle() as handle:
        site = architecture_of(model).site(name)
        hook_site(handle, decoder_layers(model)[0], site, lambda x: fake_quantize(x, scheme, qparams))
        return (torch.cat(list(stream.outputs(0))) - exact).square().sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scale_of_an_input_is_the_one_of_least_error_of_the_layer_s_outputs(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    settings = GridScales(coarse=6, fine=4)
    covering = build_weights(model, None, static(None), 0, SAMPLES, progress=False).state.static
    found = build_weights(model, None, static(settings.model_dump()), 0, SAMPLES, progress=False).state.static
    scheme = QuantizationScheme.model_validate(TENSOR)
    for name in ("attention_input", "attention_output", "mlp_input", "mlp_output"):
        chosen, wide = found[0, name], covering[0, name]
        least = _output_error(model, name, scheme, chosen)
        step = (1 - settings.smallest) / (settings.coarse - 1)
        for number in range(settings.coarse):
            other = QParams(wide.scale * (1 - number * step))
            assert least <= _output_error(model, name, scheme, other) * (1 + 1e-9)  # sums in other batches


@pytest.mark.parametrize(
    ("what", "judged"),
    [("keys", "outputs"), ("keys", "attention"), ("keys", "own"), ("values", "outputs"), ("values", "own")],
)
def test_the_scale_of_a_head_is_the_one_of_least_error_by_what_it_is_judged(what: str, judged: str) -> None:
    model = tiny_model(dtype=torch.float64)
    settings = GridScales.model_validate({"coarse": 6, "fine": 0, "samples": 3, what: judged})
    found = build_weights(model, None, static(settings.model_dump()), 0, SAMPLES, progress=False).state.static
    seen: list[tuple[Tensor, ...]] = []
    stream = capture_layer_inputs(model, SAMPLES[:3])
    with observed_queries(model, lambda *parts: seen.append(parts[:3])):
        list(stream.outputs(0))
    query, key, value = (torch.cat(parts) for parts in zip(*seen, strict=True))
    x, scheme = (key if what == "keys" else value), QuantizationScheme.model_validate(HEADS)
    for head in range(x.shape[1]):
        errors = []
        for number in range(settings.coarse):
            factor = 1 - number * 0.9 / 5
            own = x[:, head]
            rounded = (own / (factor * own.abs().max() / 7)).round().clamp(-8, 7) * (factor * own.abs().max() / 7)
            if judged == "own":
                errors.append((factor, (rounded - own).square().sum().item()))
                continue
            share = query.shape[1] // key.shape[1]
            change = 0.0
            for q in range(head * share, (head + 1) * share):
                for row in range(len(x)):
                    pairs = [(key[row, head], own[row])] * 2  # keys and values of the head, exact and rounded
                    pairs[0] = key[row, head], value[row, head]
                    pairs[1] = (rounded[row], value[row, head]) if what == "keys" else (key[row, head], rounded[row])
                    unseen, outputs = torch.ones(24, 24, dtype=torch.bool).triu(1), []
                    for k, v in pairs:
                        scores = query[row, q] @ k.T / key.shape[-1] ** 0.5
                        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
                        outputs.append(weights if judged == "attention" else weights @ v)
                    change += (outputs[1] - outputs[0]).square().sum().item()
            errors.append((factor, change))
        best = min(errors, key=lambda pair: pair[1])[0]
        expected = best * x[:, head].abs().max() / 7
        torch.testing.assert_close(found[0, what].scale[head].squeeze(), expected, rtol=1e-9, atol=0)
    assert scheme.granularity == "head"


def _covered(**settings: Any) -> dict[Any, QParams]:
    """Static scales of a model's first layer where shares of 1 and next to 1 alone are tried."""
    asked = static({"coarse": 2, "fine": 0, "smallest": 1 - 1e-9, "samples": 3, **settings})
    stored = build_weights(outlier_model(dtype=torch.float64), None, asked, 0, SAMPLES, progress=False)
    return {name: qparams for (layer, name), qparams in stored.state.static.items() if layer == 0}


def test_all_steps_make_a_scale_of_share_one_that_of_twice_the_maximum_over_all_steps() -> None:
    """With 4 bits max / 7.5 in place of max / 7, of inputs, keys, values and weights; the best of equal shares is 1."""
    for name, scale in _covered(covering="all_steps").items():
        torch.testing.assert_close(scale.scale, _covered()[name].scale * 7 / 7.5, rtol=1e-7, atol=0)
    channel = QuantizationScheme(bits=4, granularity="channel")
    ratios = GridWeights(covering="all_steps", smallest=0.5, steps=10).ratios(channel)
    assert ratios == pytest.approx([(1 - 0.05 * i) * 7 / 7.5 for i in range(10)])
    asymmetric = channel.model_copy(update={"symmetric": False})
    assert GridWeights(covering="all_steps").ratios(asymmetric) == GridWeights().ratios(asymmetric)


def test_averaged_ranges_are_moving_averages_of_each_features_maxima_over_the_samples() -> None:
    """0.99 of what was, 0.01 of the next sample, beginning with the first sample; then the largest feature."""
    found, model = _covered(ranges="average"), outlier_model(dtype=torch.float64)
    attention: list[tuple[Tensor, ...]] = []
    inputs: list[Tensor] = []
    linear = decoder_layers(model)[0].mlp.down_proj
    hook = linear.register_forward_pre_hook(lambda _, x: inputs.append(x[0]), prepend=True)
    stream = capture_layer_inputs(model, SAMPLES[:3])
    with observed_queries(model, lambda *parts: attention.append(parts[:3])):
        list(stream.outputs(0))
    hook.remove()
    _, keys, values = (torch.cat(parts) for parts in zip(*attention, strict=True))

    def average(samples: Tensor) -> Tensor:
        one, two, three = samples
        return 0.99 * (0.99 * one + 0.01 * two) + 0.01 * three

    largest = average(torch.cat(inputs).abs().amax(1)).max()
    torch.testing.assert_close(found["mlp_output"].scale, largest / 7, rtol=1e-7, atol=0)
    for name, x in (("keys", keys), ("values", values)):
        expected = average(x.abs().amax(2)).amax(-1) / 7
        torch.testing.assert_close(found[name].scale.flatten(), expected, rtol=1e-7, atol=0)


def test_later_layers_see_what_quantized_layers_give() -> None:
    """The second layer's scales cover what it reads behind a first layer that is quantized by its own scales."""
    model, asked = outlier_model(dtype=torch.float64), static({"coarse": 2, "fine": 0, "smallest": 0.999})
    stored = build_weights(model, None, asked, 0, SAMPLES, progress=False)
    seen: list[Tensor] = []
    linear = decoder_layers(model)[1].mlp.down_proj
    with quantized_forward(model, asked, stored.state), torch.no_grad():
        hook = linear.register_forward_pre_hook(lambda _, x: seen.append(x[0]), prepend=True)
        model(SAMPLES, use_cache=False)
        hook.remove()
    ratio = (stored.state.static[1, "mlp_output"].scale / (torch.cat(seen).abs().max() / 7)).item()
    assert 0.9 < ratio < 1.1  # the own other quantizers of the layer change its input a little
    alone = build_weights(outlier_model(dtype=torch.float64), None, static(None), 0, SAMPLES, progress=False)
    assert not torch.equal(alone.state.static[1, "mlp_output"].scale, stored.state.static[1, "mlp_output"].scale)


@pytest.mark.parametrize(
    ("methods", "sections", "message"),
    [
        ({"grid_scales": {}}, {}, "searches static scales: set dynamic to false"),
        ({"grid_scales": {}}, {"activations": {**TENSOR, "symmetric": False}}, "set activations.symmetric to true"),
        ({"grid_weights": {}}, {}, "it needs a weights section"),
        ({"grid_weights": {}}, {"weights": {"scheme": {"bits": 4, "granularity": "channel"}}}, "clip_search to false"),
        ({"grid_scales": {}, "outliers": {"features": 8}}, {"activations": TENSOR}, "cannot be combined with outliers"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(methods, sections, message) -> None:
    with pytest.raises((RecipeError, ValidationError), match=message):
        recipe(methods, **sections)
