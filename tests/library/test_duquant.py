"""DuQuant: its search and permutation against the paper's equations and theorems, and a function that never changes."""

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.methods.duquant import DuQuant
from rotquant.methods.duquant.model_transformation import tensors
from rotquant.methods.duquant.rotation_and_permutation import (
    draw_rotation,
    find_transform,
    largest_rows,
    search_rotation,
    search_rotation_reference,
    switched,
    uniform_rotation,
    zigzag,
)
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of, norm_of
from rotquant.models.simulation.queries import quantized_queries
from rotquant.models.simulation.runtime import SiteKey
from rotquant.models.statistics import collect_statistics
from rotquant.models.stream import capture_layer_inputs
from rotquant.models.transforms import Chain
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, check_widths, override, parse_recipe
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.hadamard import hadamard_transform
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.build import build_weights, quantized_forward
from tests.helpers.cases import each_once
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import AWKWARD, FAMILIES, outlier_model, tiny_model, tiny_tokens
from tests.helpers.weights import check_loaded_is_stored

#: Products of some hundred orthogonal matrices in float64.
ROUNDING = 1e-12
#: float64: what remains is the rounding of transformers' float32 norms and rotary tables.
EXACT = {"rtol": 0, "atol": 1e-5}
#: As the authors' code does.
AS_CODE = {"rotations": "shared", "outlier": "row", "peak": "range", "inputs": "mean", "smoothed_by": "query_up"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def with_outliers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, a feature of which is far larger, and one single number far larger than that."""
    x = random(*shape, seed=seed)
    x[..., shape[-1] // 2] *= 20
    x.view(-1)[seed % x.numel()] = 500.0
    return x


def orthogonality_error(matrix: Tensor) -> float:
    return float((matrix @ matrix.mT - torch.eye(matrix.shape[-1], dtype=matrix.dtype)).abs().max())


@pytest.mark.parametrize("size", [2, 3, 4, 7, 128])
def test_the_initial_rotation_is_orthogonal_with_a_uniform_first_row(size: int) -> None:
    matrix = uniform_rotation(size)
    assert orthogonality_error(matrix) < ROUNDING
    torch.testing.assert_close(matrix[0], torch.full((size,), size**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3, 16])
def test_a_drawn_rotation_keeps_the_first_column_and_no_other(size: int) -> None:
    first, second = draw_rotation(size, generator()), draw_rotation(size, generator(1))
    assert orthogonality_error(first) < ROUNDING
    assert torch.equal(first[:, 0], uniform_rotation(size)[:, 0])
    if size > 2:  # of one number +-1 is all there is to draw
        assert not torch.allclose(first, second)
        assert not torch.allclose(first, uniform_rotation(size))


def test_switching_is_the_product_of_equation_2() -> None:
    matrix = random(5, 5)
    for dimension, found in enumerate(switched(matrix, torch.arange(5))):
        switch = torch.eye(5, dtype=torch.float64)
        switch[[0, dimension]] = switch[[dimension, 0]]
        assert torch.equal(found, switch @ matrix @ switch)


@given(
    size=st.integers(2, 17),
    blocks=st.integers(1, 4),
    tokens=st.integers(1, 30),
    steps=st.integers(0, 24),
    seed=st.integers(0, 99),
)
def test_the_search_of_all_blocks_is_the_papers_of_each(
    size: int, blocks: int, tokens: int, steps: int, seed: int
) -> None:
    """Equal peaks, and where no two products are equally good, equal products."""
    x, matrix = with_outliers(blocks, tokens, size, seed=seed), draw_rotation(size, generator(seed))
    found = search_rotation(x, matrix, steps)
    for block, rotation in zip(x, found, strict=True):
        expected = search_rotation_reference(block, matrix, steps)
        peak, least = float((block @ rotation).abs().max()), float((block @ expected).abs().max())
        assert peak == pytest.approx(least, rel=1e-9)
        if size > 2:  # in two dimensions products come again
            torch.testing.assert_close(rotation, expected, rtol=0, atol=1e-9)


@given(size=st.integers(2, 32), steps=st.integers(0, 20), seed=st.integers(0, 99), as_code=st.booleans())
def test_a_found_rotation_is_orthogonal_and_raises_no_peak(size: int, steps: int, seed: int, as_code: bool) -> None:
    """Theorem 1, also where the search is led by the authors' code."""
    x, matrix = with_outliers(3, 9, size, seed=seed), draw_rotation(size, generator(seed))
    chosen = {"outlier": "row", "peak": "range"} if as_code else {}
    rotation = search_rotation(x, matrix, steps, **chosen)  # pyright: ignore[reportArgumentType]
    assert orthogonality_error(rotation) < ROUNDING
    before, after = x, x @ rotation
    if as_code:
        ends = [part.amax(dim=(1, 2)) - part.amin(dim=(1, 2)) for part in (before, after)]
    else:
        ends = [part.abs().amax(dim=(1, 2)) for part in (before, after)]
    assert (ends[1] <= ends[0] * (1 + 1e-12)).all()


def test_a_search_as_in_the_code_takes_the_row_for_the_dimension_and_the_least_range() -> None:
    x, matrix = with_outliers(40, 8, seed=3), draw_rotation(8, generator())
    product = torch.eye(8, dtype=torch.float64)
    products = [product]
    for _ in range(12):
        turned = x @ product
        row = int(turned.abs().argmax()) // 8
        (switch,) = switched(matrix, torch.tensor([row % 8]))
        product = product @ switch
        products.append(product)
    ranges = [float((x @ product).max() - (x @ product).min()) for product in products]
    expected = products[ranges.index(min(ranges))]
    found = search_rotation(x.unsqueeze(0), matrix, 12, "row", "range")[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_search_spreads_an_outlier_over_its_block() -> None:
    """A token of one number alone could at best become equal numbers of a square root of 128 of it: a third of that
    gain is asked for, where one random rotation gives about as much and none gives nothing."""
    x = random(1, 64, 128)
    x[0, 7] = 0.0
    x[0, 7, 90] = 1000.0
    rotation = search_rotation(x, draw_rotation(128, generator()), 64)
    assert orthogonality_error(rotation[0]) < ROUNDING
    assert (x @ rotation).abs().max() < 1000.0 * 3 / 128**0.5


def test_more_steps_never_leave_a_higher_peak() -> None:
    x, matrix = with_outliers(4, 50, 16), draw_rotation(16, generator())
    peaks = [(x @ search_rotation(x, matrix, steps)).abs().amax(dim=(1, 2)) for steps in (0, 1, 4, 16, 64)]
    for fewer, more in itertools.pairwise(peaks):
        assert (more <= fewer * (1 + 1e-12)).all()
    assert (peaks[-1] < peaks[0] / 2).all()


def test_the_zigzag_goes_back_and_forth() -> None:
    """Ranks 0 to 11 to three blocks: 0 1 2, back 5 4 3, and again."""
    maxima = torch.tensor([5.0, 11.0, 3.0, 8.0, 1.0, 10.0, 0.0, 9.0, 2.0, 7.0, 6.0, 4.0])
    ranks = torch.argsort(torch.argsort(maxima, descending=True))[zigzag(maxima, 3)]
    assert ranks.view(3, 4).tolist() == [[0, 5, 6, 11], [1, 4, 7, 10], [2, 3, 8, 9]]


@given(size=st.integers(1, 16), blocks=st.integers(1, 12), seed=st.integers(0, 999), heavy=st.booleans())
def test_after_a_zigzag_the_blocks_means_are_close(size: int, blocks: int, seed: int, heavy: bool) -> None:
    """Theorem 2, for the means' differences: rounds take turns in who gets more, and their spans are disjoint.

    Of two rounds at most the larger span is left, so all together at most (largest - least) / size; of equal spans,
    for even sizes, half of (blocks - 1) times the largest step between neighbours.
    """
    maxima = random(size * blocks, seed=seed).abs()
    if heavy:
        maxima = maxima**8
    order = zigzag(maxima, blocks)
    assert torch.equal(order.sort().values, torch.arange(size * blocks))
    means = maxima[order].view(blocks, size).mean(dim=1)
    spread = float(means.max() - means.min())
    assert spread <= float(maxima.max() - maxima.min()) / size + ROUNDING
    if size % 2 == 0:
        steps = maxima.sort().values.diff()
        assert spread <= (blocks - 1) / 2 * float(steps.max() if len(steps) else 0.0) + ROUNDING


def test_a_search_that_sees_the_largest_tokens_finds_the_peak_of_all() -> None:
    """As long as no other token's norm is above the peak that is left."""
    x = (
        random(400, 24)
        * torch.logspace(-2, 2, 400, dtype=torch.float64)[torch.randperm(400, generator=generator())][:, None]
    )
    kept = largest_rows(x.split(60), 8, 80)
    assert kept.shape == (3, 80, 8)
    at_once = largest_rows([x], 8, 80)
    assert torch.equal(kept, at_once)
    whole, matrix = x.view(400, 3, 8).transpose(0, 1), draw_rotation(8, generator(1))
    rotation = search_rotation(kept, matrix, 30)
    peak = (kept @ rotation).abs().amax(dim=(1, 2))
    others = whole.norm(dim=2).sort(descending=True).values[:, 80]
    assert (others < peak).all()
    torch.testing.assert_close((whole @ rotation).abs().amax(dim=(1, 2)), peak)
    torch.testing.assert_close(rotation, search_rotation(whole, matrix, 30), rtol=0, atol=ROUNDING)


def test_few_tokens_are_all_seen_in_their_order() -> None:
    x = random(6, 12)
    assert torch.equal(largest_rows(x.split(4), 4, 6), x.view(6, 3, 4).transpose(0, 1))
    assert torch.equal(largest_rows(x.split(4), 4, 6, shared=True)[0], x.view(18, 4))


def found_chain(x: list[Tensor], settings: DuQuant) -> tuple[Chain, dict[str, Tensor]]:
    """The transform that is found for some inputs, and its tensors."""
    tensors = find_transform("mlp_input", x, settings, generator(), torch.device("cpu"))
    return Chain(settings.transforms_at("mlp_input", settings.block(x[0].shape[-1])), tensors), tensors


@pytest.mark.parametrize("permutations", [0, 1, 2])
@pytest.mark.parametrize("rotations", ["blocks", "shared"])
def test_a_found_transform_is_orthogonal_and_evens_out_the_features(permutations: int, rotations: str) -> None:
    x = with_outliers(200, 48)
    settings = DuQuant(block_size=8, search_steps=16, permutations=permutations, rotations=rotations, tokens=500)  # pyright: ignore[reportArgumentType]
    found, kept = found_chain(list(x.split(64)), settings)
    assert kept["mlp_input.rotations"].shape == (permutations + 1, 6 if rotations == "blocks" else 1, 8, 8)
    matrix = found(torch.eye(48, dtype=torch.float64))
    assert orthogonality_error(matrix) < ROUNDING
    torch.testing.assert_close(found(x), x @ matrix)
    assert found(x).abs().max() < x.abs().max() * (0.8 if permutations == 0 else 0.4)


def test_a_permutation_lets_an_outlier_leave_its_block() -> None:
    """One block holds all outliers: without a permutation they stay in it."""
    x = random(200, 64)
    x[:, :8] *= 30
    peaks = []
    for permutations in (0, 1):
        settings = DuQuant(block_size=8, search_steps=32, permutations=permutations)
        found, _ = found_chain([x], settings)
        peaks.append(found(x).square().sum(dim=0).view(8, 8).sum(dim=1))
    share = [float(peak.max() / peak.sum()) for peak in peaks]
    assert share[0] > 0.95
    assert share[1] < 0.2


def test_inputs_that_are_not_finite_are_refused() -> None:
    x = random(20, 16)
    x[3, 2] = torch.inf
    with pytest.raises(RotquantError, match="calibration activations are not finite"):
        found_chain([x], DuQuant(block_size=4))


def recipe(block_size: int = 8, sections: Mapping[str, object] | None = None, **settings: Any) -> Recipe:
    """A recipe with the method and further sections."""
    duquant = {"block_size": block_size, "search_steps": 16, "tokens": 32, **settings}
    calibration = {"corpus": "modules", "samples": 4, "sequence_length": 24}
    return parse_recipe({"methods": {"duquant": duquant}, "calibration": calibration, **(sections or {})}, "the test")


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "changes"),
    each_once([*AWKWARD], [{}, AS_CODE, {"alpha": None}, {"permutations": 0}, {"permutations": 2}]),
    ids=str,
)
def test_the_logits_stay_the_same(shape: str, changes: dict[str, Any]) -> None:
    """Grouped queries, tied embeddings, biases, fused projections: what is done to inputs, weights undo."""
    model, tokens = tiny_model(**AWKWARD[shape], dtype=torch.float64), tiny_tokens(4)  # pyright: ignore[reportArgumentType]
    before = logits(model, tokens)
    chosen = recipe(4, **changes)
    stored = build_weights(model, None, chosen, 0, tokens, progress=False)
    assert (logits(model, tokens) - before).abs().max() > 0.1
    with quantized_forward(model, chosen, stored.state):
        torch.testing.assert_close(logits(model, tokens), before, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotations_are_stored_and_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens(4)
    before = logits(model, tokens)
    plain, model = tiny_model(dtype=dtype), tiny_model(dtype=dtype)
    stored = build_weights(model, None, recipe(), 0, tokens, progress=False)
    kept = stored.state.tensors["duquant"]
    assert {value.dtype for value in kept.values()} == {torch.float32, torch.int64}
    with quantized_forward(model, recipe(), stored.state):
        error = (logits(model, tokens) - before).norm()
    # The weights are rounded to the type three times in place of once, and inputs once more.
    assert error < 4 * (logits(plain, tokens) - before).norm() + 1e-6 * before.norm()


@pytest.mark.parametrize("smoothed_by", ["all", "query_up"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_smoothing_divides_by_the_papers_scales(family: str, smoothed_by: str) -> None:
    model, tokens = outlier_model(family=family, dtype=torch.float64), tiny_tokens(4)
    layer, architecture = decoder_layers(model)[1], architecture_of(model)
    maxima = collect_statistics(capture_layer_inputs(model, tokens), "max")[1]["mlp_input"].double()
    gate, up = (
        linear_of(layer, part.name).weight[slice(*(part.rows or (None,)))]
        for part in (architecture.gate, architecture.up)
    )
    seen = torch.cat([gate, up]) if smoothed_by == "all" else up
    scale = (maxima**0.6 / seen.abs().amax(dim=0) ** 0.4).clamp(min=1e-2).detach()
    norm = norm_of(layer, architecture.site("mlp_input"))
    before = norm.weight.detach().clone()
    build_weights(model, None, recipe(smoothed_by=smoothed_by), 0, tokens, progress=False)
    # Of the calibration's maxima the layer before has changed nothing but rounding.
    torch.testing.assert_close(norm.weight.detach(), before / scale, rtol=1e-6, atol=0)


def test_a_scale_that_no_layer_absorbs_is_stored_where_query_heads_share_value_heads() -> None:
    for heads, stored in ((2, True), (4, False)):
        model = tiny_model(num_kv_heads=heads)
        shapes = tensors(DuQuant(block_size=8), architecture_of(model))
        assert ("attention_output.scale" in shapes) is stored
        assert not any(
            name.endswith(".scale") for name in tensors(DuQuant(block_size=8, alpha=None), architecture_of(model))
        )
        kept = build_weights(model, None, recipe(), 0, tiny_tokens(4), progress=False).state.tensors["duquant"]
        assert {name: tuple(value.shape) for name, value in kept.items()} == shapes


@torch.no_grad()
def test_the_search_reads_a_network_whose_function_smoothing_did_not_change() -> None:
    """With grouped queries o_proj's inputs are divided as the model runs, so also while transforms are searched."""
    model, tokens = tiny_model(num_kv_heads=2, dtype=torch.float64), tiny_tokens(4)
    expected = model(tokens, output_hidden_states=True).hidden_states[1]
    seen: list[Tensor] = []
    with decoder_layers(model)[1].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone())):
        build_weights(model, None, recipe(), 0, tokens, progress=False)
    assert len(seen) > 1
    for one in seen:
        torch.testing.assert_close(one, expected, **EXACT)


@torch.no_grad()
def test_the_search_sees_the_mean_text_on_request() -> None:
    """Then texts of the same mean embeddings give the same rotations, also behind the first attention."""
    tokens = tiny_tokens(4)
    other = torch.stack(
        [column[torch.randperm(4, generator=generator(seed))] for seed, column in enumerate(tokens.T)]
    ).T
    found = {}
    for inputs in ("tokens", "mean"):
        kept = [
            build_weights(
                tiny_model(dtype=torch.float64), None, recipe(inputs=inputs, alpha=None), 0, samples, progress=False
            )
            for samples in (tokens, other.contiguous())
        ]
        first, second = (stored.state.tensors["duquant"]["attention_input.rotations"][1] for stored in kept)
        found[inputs] = torch.allclose(first, second, rtol=0, atol=1e-9)
    assert found == {"tokens": False, "mean": True}


def test_the_seed_draws_the_rotations_and_nothing_else_does() -> None:
    state = torch.random.get_rng_state()
    kept = [
        build_weights(tiny_model(), None, recipe(), seed, tiny_tokens(4), progress=False).state.tensors["duquant"]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert not torch.equal(kept[0]["mlp_input.rotations"], kept[2]["mlp_input.rotations"])


@torch.no_grad()
def test_a_quantized_model_is_the_same_in_another_process(tmp_path: Path) -> None:
    chosen = override(preset("duquant"), {"methods": {"duquant": {"block_size": 8, "search_steps": 8}}}, "test")
    tokens = tiny_tokens(4)
    stored = build_weights(tiny_model(), tiny_tokenizer(), chosen, 0, tokens, progress=False)
    check_loaded_is_stored(stored, chosen, tokens, tmp_path / "model")


@torch.no_grad()
@pytest.mark.parametrize("rounding", [None, pytest.param("gptq", marks=pytest.mark.long)])
def test_it_keeps_more_of_a_model_with_outliers_than_rounding_alone_does(rounding: str | None) -> None:
    """Mean over seeds of the error of the logits, W4A4; half of the gain that was measured is asked for."""
    sections = {
        "weights": {"scheme": {"bits": 4, "granularity": "channel"}},
        "activations": {"bits": 4, "symmetric": False},
        "calibration": {"samples": 4, "sequence_length": 24},
    }
    others = {rounding: {}} if rounding else {}
    errors: dict[str, float] = {"plain": 0.0, "duquant": 0.0}
    for seed in range(3):
        tokens = tiny_tokens(4, seed=seed)
        exact = logits(outlier_model(seed=seed), tokens)
        for name in errors:
            methods = others | ({} if name == "plain" else {"duquant": {"block_size": 32, "search_steps": 32}})
            chosen = parse_recipe({**sections, "methods": methods}, "the test")
            stored = build_weights(outlier_model(seed=seed), None, chosen, seed, tokens, progress=False)
            with quantized_forward(stored.model, chosen, stored.state):
                errors[name] += float((logits(stored.model, tokens) - exact).square().mean()) / 3
    assert errors["duquant"] < 0.6 * errors["plain"]


@torch.no_grad()
def test_static_scales_are_those_of_transformed_inputs() -> None:
    """In the last layer too, where no scale would change what an earlier one reads."""
    static = {"activations": {"bits": 8, "granularity": "tensor", "dynamic": False}}
    tokens = tiny_tokens(4)
    model = outlier_model(dtype=torch.float64)
    found = build_weights(model, None, recipe(32, static), 0, tokens, progress=False).state
    stored = build_weights(outlier_model(dtype=torch.float64), None, recipe(32), 0, tokens, progress=False)
    seen: dict[SiteKey, Tensor] = {}

    def keep(key: SiteKey, _module: object, inputs: tuple[Tensor, ...]) -> None:
        seen[key] = inputs[0]

    with quantized_forward(stored.model, recipe(32), stored.state):
        for index, layer in enumerate(decoder_layers(stored.model)):
            for site in architecture_of(stored.model).sites:
                linear = linear_of(layer, site.linears[0])
                linear.register_forward_pre_hook(partial(keep, (index, site.name)))
        logits(stored.model, tokens)
    assert found.static.keys() == seen.keys()
    assert {name.split(".")[0] for name in found.tensors["duquant"]} == {site for _, site in seen}
    for key, qparams in found.static.items():
        torch.testing.assert_close(qparams.scale, seen[key].abs().max() / 127)


@torch.no_grad()
def test_queries_pass_r3_before_they_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    scheme = QuantizationScheme(bits=4, symmetric=False, granularity="head")
    rotation = RotationScheme(residual="none", values="none", heads=False, mlp=False)
    model, tokens, turn = tiny_model(), tiny_tokens(), modeling_llama.apply_rotary_pos_emb
    quantizer = quantized_queries(model, scheme, rotation.transforms)
    found = logits(model, tokens)
    quantizer.remove()

    def turned(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        query, key = turn(*args, **kwargs)
        return hadamard_transform(fake_quantize(hadamard_transform(query), scheme), inverse=True), key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turned)
    torch.testing.assert_close(logits(model, tokens), found)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_the_logits_stay_the_same(family: str) -> None:
    model, tokens = tiny_model(family, dtype=torch.float64), tiny_tokens(4)
    before = logits(model, tokens)
    stored = build_weights(model, None, recipe(), 0, tokens, device="cuda", progress=False)
    model.to("cuda")  # pyright: ignore[reportArgumentType]
    with quantized_forward(model, recipe(), stored.state):
        torch.testing.assert_close(logits(model, tokens.cuda()).cpu(), before, **EXACT)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rotation": {}}, "duquant rotates what linear layers read in its own way"),
        ({"methods": {"duquant": {}, "outliers": {"features": 4}}}, "duquant cannot be combined with outliers"),
        ({"methods": {"duquant": {}, "prefixed_outliers": {}}}, "duquant cannot be combined with prefixed_outliers"),
        ({"methods": {"duquant": {}, "smoothquant": {}}}, "both change the same weights"),
        (
            {"activations": {"bits": 4}, "attention_output": {"bits": 4, "granularity": "head"}},
            "leave attention_output out",
        ),
    ],
)
def test_what_it_does_not_bear_beside_it_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        recipe(sections=sections)


def test_features_without_a_block_are_refused_before_any_work() -> None:
    with pytest.raises(RecipeError, match=r"block_size is 4, and no number from 2 to that divides the 65 ") as error:
        check_widths(recipe(4), {"mlp_output": 65})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("features", "size"), [(64, 64), (4096, 128), (11008, 128), (320, 80), (384, 128), (688, 86)])
def test_a_site_has_blocks_of_the_largest_divisor_of_its_features(features: int, size: int) -> None:
    assert DuQuant().block(features) == size


def test_the_preset_is_the_authors_script_without_learned_clipping() -> None:
    """run.sh: block_size 128, max_rotation_step 256, alpha 0.6, swc 0.8, lac 0.9, W4A4; q, k, v without clipping."""
    found = preset("duquant")
    method = found.methods["duquant"]
    assert isinstance(method, DuQuant)
    assert (method.block_size, method.search_steps, method.alpha, method.permutations) == (128, 256, 0.6, 1)
    schemes = [found.rounded.scheme, *(part for part in (found.activations, found.keys, found.values) if part)]
    assert [(scheme.bits, scheme.symmetric) for scheme in schemes] == [(4, False)] * 4
    assert [scheme.clip_ratio for scheme in schemes] == [0.8, 0.9, 1.0, 1.0]
    assert "queries quantized as keys" in method.describe(found)
