"""QFeP and QFeM: which tokens stand before a text and which inputs stay as they are, against plain loops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rotquant.foundation.errors import RecipeError
from rotquant.methods.qfep.activation_spikes import (
    SITES,
    find_prefix,
    first_token,
    frequent_tokens,
    measure,
    spike_tokens,
    spiking,
    token_scales,
)
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.simulation.prefix import compute_prefix
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.recipe import Recipe, parse_recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.weights.build import build_weights, quantized_forward
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.prefixes import sink_model
from tests.helpers.weights import check_loaded_is_stored

DYNAMIC = {"bits": 8, "granularity": "tensor"}


def recipe(
    methods: dict[str, Any] | None = None, activations: dict[str, Any] | None = DYNAMIC, **changes: Any
) -> Recipe:
    """The method, inputs of one dynamic scale and a calibration section."""
    data = {
        "methods": {"qfep": changes} if methods is None else methods,
        "activations": activations,
        "weights": {"scheme": {"bits": 8, "granularity": "channel"}, "clip_search": False},
        "calibration": {"corpus": "modules", "samples": 6, "sequence_length": 16},
    }
    return parse_recipe(data, "the test's recipe")


@torch.no_grad()
def reference_scales(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The largest |input| of each token, [layers, sites, windows, tokens], by plain forward passes."""
    kept: list[Tensor] = []
    hooks = [
        layer.get_submodule(site.linears[0]).register_forward_pre_hook(lambda _, x: kept.append(x[0][0].abs().amax(-1)))
        for layer in decoder_layers(model)
        for site in architecture_of(model).sites
    ]
    found = []
    for window in windows:
        model(window[None], use_cache=False)
        found.append(torch.stack(kept).unflatten(0, (-1, len(SITES))))
        kept.clear()
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=2).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_are_the_largest_inputs_of_tokens(family: str) -> None:
    model, windows = tiny_model(family, dtype=torch.float64), tiny_tokens(5, 12)
    assert tuple(site.name for site in architecture_of(model).sites) == SITES
    torch.testing.assert_close(token_scales(model, windows), reference_scales(model, windows))
    torch.testing.assert_close(token_scales(model, windows, last=0), reference_scales(model, windows)[:1])


def reference_prefix(model: PreTrainedModel, samples: Tensor, candidates: int, contexts: int) -> tuple[int, ...]:
    """The search written out as loops over samples, tokens and contexts."""
    bos = model.config.bos_token_id
    windows = torch.tensor([[bos, *sample[:-1]] for sample in samples.tolist()])
    scales = reference_scales(model, windows)
    ratios = [[(s.amax(-1) / s.median(-1).values).mean().item() for s in layer] for layer in scales]
    layer, site = max(
        ((index, place) for index in range(len(ratios)) for place in range(len(SITES))),
        key=lambda where: ratios[where[0]][where[1]],
    )
    largest: dict[int, float] = {}
    for window, row in zip(windows.tolist(), scales[layer, site].tolist(), strict=True):
        for place in sorted(range(len(row)), key=lambda place: -row[place])[:candidates]:
            if window[place] != bos:
                largest[window[place]] = max(largest.get(window[place], 0.0), row[place])
    tokens = sorted(largest, key=lambda token: -largest[token])[:candidates]
    counts = windows[:, 1:].flatten().bincount()
    between = sorted(range(len(counts)), key=lambda token: (-int(counts[token]), token))[:contexts]
    between = [token for token in between if counts[token]]
    best, found = 0.0, ()
    for token in tokens:
        for context in between:
            row = reference_scales(model, torch.tensor([[bos, context, token, context, token]]))[layer, site, 0]
            if row[2] / row[4] > best:
                best, found = (row[2] / row[4]).item(), (bos, context, token)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_the_search_is_that_of_plain_loops(seed: int) -> None:
    model, samples = tiny_model(dtype=torch.float64, seed=seed), tiny_tokens(6, 16, seed=seed)
    found = measure(model, samples)
    assert (found.windows[:, 0] == model.config.bos_token_id).all()
    assert torch.equal(found.windows[:, 1:], samples[:, :-1])
    assert find_prefix(model, found, 3, 10) == reference_prefix(model, samples, 3, 10)


def test_the_token_with_a_spike_is_found_and_its_module_left_alone() -> None:
    samples = tiny_tokens(6, 16, seed=1)
    samples[:, 5] = 7
    model = sink_model()
    stored = build_weights(model, None, recipe(ratio=50.0, candidates=1), 0, samples, progress=False)
    kept = stored.state.tensors["qfep"]
    assert kept["ids"][0] == model.config.bos_token_id
    assert kept["ids"][2] == 7
    assert kept["exact"].tolist() == [[0, SITES.index("mlp_output")]]
    with wrap(sink_model(), RuntimeQuantization()):
        expected = compute_prefix(sink_model(), kept["ids"].tolist())
    assert torch.equal(kept["keys"], expected.keys)
    assert torch.equal(kept["values"], expected.values)


@torch.no_grad()
def test_modules_above_the_ratio_read_what_they_would_without_a_quantizer() -> None:
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens()
    scheme = QuantizationScheme(bits=2, granularity="tensor")
    everything = frozenset((index, site.name) for index in range(2) for site in architecture_of(model).sites)
    plain = model(tokens, use_cache=False).logits
    with wrap(model, RuntimeQuantization(activations=scheme, exact=everything)):
        assert torch.equal(model(tokens, use_cache=False).logits, plain)
    read: dict[str, Tensor] = {}
    layer = decoder_layers(model)[1]
    with wrap(model, RuntimeQuantization(activations=scheme, exact=everything - {(1, "mlp_output")})):
        hook = layer.mlp.down_proj.register_forward_pre_hook(lambda _, x: read.update(x=x[0]))
        model(tokens, use_cache=False)
        hook.remove()
    assert all(text.unique().numel() <= 4 for text in read["x"])
    static = scheme.model_copy(update={"dynamic": False})
    wrap(model, RuntimeQuantization(activations=static, exact=everything)).remove()  # needs no scales


@torch.no_grad()
def test_a_dynamic_scale_of_a_tensor_is_that_of_one_text_whatever_its_batch() -> None:
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens(4)
    with wrap(model, RuntimeQuantization(activations=QuantizationScheme(bits=8, granularity="tensor"))):
        together = model(tokens, use_cache=False).logits
        alone = torch.cat([model(text[None], use_cache=False).logits for text in tokens])
    # float64: what remains is the float32 of norms; one scale for the batch would differ by whole codes
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_spikes_of_bos_count_for_no_token_and_equal_frequencies_go_by_id() -> None:
    windows = torch.tensor([[1, 5, 6], [1, 6, 5]])
    scales = torch.tensor([[9.0, 2.0, 3.0], [9.0, 1.0, 4.0]])
    assert spike_tokens(windows, scales, 1, 2) == [5, 6]
    assert spike_tokens(windows, scales, 1, 3) == [5, 6]
    with pytest.raises(RecipeError, match=r"raise qfep\.candidates"):
        spike_tokens(windows, scales, 1, 1)
    assert frequent_tokens(torch.tensor([8, 3, 8, 4, 3, 2]), 3) == [3, 8, 2]


@torch.no_grad()
def test_modules_alone_have_no_prefix() -> None:
    model, samples = tiny_model(dtype=torch.float64), tiny_tokens(6, 16, seed=1)
    asked = recipe(prefix=False, ratio=1.5)
    stored = build_weights(model, None, asked, 0, samples, progress=False)
    kept = stored.state.tensors["qfep"]
    assert kept["keys"].shape[2] == 0
    found = measure(tiny_model(dtype=torch.float64), samples)
    assert kept["exact"].tolist() == [list(place) for place in spiking(found, 1.5)]
    assert len(kept["exact"])
    with quantized_forward(stored.model, asked, stored.state):
        ours = stored.model(samples, use_cache=False).logits
    exact = frozenset((layer, SITES[site]) for layer, site in kept["exact"].tolist())
    with wrap(stored.model, RuntimeQuantization(activations=asked.activations, exact=exact)):
        assert torch.equal(stored.model(samples, use_cache=False).logits, ours)
    with wrap(stored.model, RuntimeQuantization(activations=asked.activations)):
        assert not torch.equal(stored.model(samples, use_cache=False).logits, ours)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_a_quantized_model_has_its_prefix_and_modules_in_another_process(tmp_path: Path, static: bool) -> None:
    asked = recipe(ratio=2.0, contexts=5, activations={**DYNAMIC, "dynamic": not static})
    samples = tiny_tokens(6, 16, seed=1)
    stored = build_weights(tiny_model(), tiny_tokenizer(), asked, 0, samples, progress=False)
    assert len(stored.state.tensors["qfep"]["exact"])
    check_loaded_is_stored(stored, asked, samples, tmp_path / "model")


def test_the_end_of_a_text_stands_for_a_missing_bos() -> None:
    assert first_token(tiny_model(bos_token_id=None)) == 2
    assert first_token(tiny_model(bos_token_id=None, eos_token_id=[4, 5])) == 4
    with pytest.raises(RecipeError, match="names no BOS and no end of text"):
        first_token(tiny_model(bos_token_id=None, eos_token_id=None))


def test_a_recipe_that_does_not_fit_is_refused_before_any_work() -> None:
    with pytest.raises(RecipeError, match="qfep does nothing without prefix and ratio"):
        recipe(prefix=False)
    with pytest.raises(RecipeError, match=r"qfep\.ratio says which inputs are not quantized"):
        recipe(ratio=6.0, activations=None)
    with pytest.raises(RecipeError, match="both choose the tokens before a text"):
        recipe(methods={"qfep": {}, "prefixed_outliers": {}})
    short = tiny_model(max_position_embeddings=5)
    with pytest.raises(RecipeError, match="leave no room in the model's context"):
        build_weights(short, None, recipe(), 0, tiny_tokens(6, 5, seed=1), progress=False)
