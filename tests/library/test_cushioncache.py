"""CushionCache: the greedy search against brute force, the tuning against gradients and loops written out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.methods.cushioncache import CushionCache, prefix_tuning
from rotquant.methods.cushioncache import greedy_prefix_search as searching
from rotquant.methods.cushioncache.activation_errors import measured, squared_error
from rotquant.methods.cushioncache.greedy_prefix_search import Prompt, candidate_tokens, search, search_texts
from rotquant.methods.cushioncache.prefix_tuning import losses, network, tune
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.prefix import Prefix, compute_prefix
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, hook_site, wrap
from rotquant.recipes.recipe import Recipe, parse_recipe
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.training.state import Checkpoint
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.context import QuantizationContext
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.interrupting import Interrupted
from tests.helpers.models import AWKWARD, VOCABULARY, tiny_model, tiny_tokens
from tests.helpers.weights import check_loaded_is_stored

STATIC = {"bits": 4, "symmetric": False, "granularity": "tensor", "dynamic": False}
#: A search that takes every token it is offered, and few steps.
AMOUNTS = {"threshold": 1.0, "max_tokens": 3, "sequence_length": 9, "steps": 4, "batch_size": 2, "learning_rate": 0.02}


def recipe(activations: dict[str, Any] | None = None, methods: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """The method with amounts for tiny models, inputs of one static scale and a calibration section."""
    data = {
        "methods": {"cushioncache": {**AMOUNTS, **changes}} if methods is None else methods,
        "activations": activations or STATIC,
        "calibration": {"corpus": "modules", "samples": 6, "sequence_length": 16},
    }
    return parse_recipe(data, "the test's recipe")


def context(
    settings: Recipe, seed: int = 0, model: PreTrainedModel | None = None, checkpoint: Checkpoint | None = None
) -> QuantizationContext:
    """What the method works with, in float64 unless a model is given."""
    model = model or tiny_model(dtype=torch.float64)
    return QuantizationContext(model, settings, tiny_tokens(6, 16, seed=1), seed, torch.device("cpu"), None, checkpoint)


def rounded(x: Tensor, scheme: QuantizationScheme) -> Tensor:
    """The scheme's dynamic quantizer of one text [tokens, features], written out."""
    low, high = (x.min(), x.max()) if scheme.granularity == "tensor" else x.aminmax(dim=-1, keepdim=True)
    if scheme.symmetric:
        scale = torch.maximum(high, -low) / (2 ** (scheme.bits - 1) - 1)
        return (x / scale).round() * scale
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / (2**scheme.bits - 1)
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 2**scheme.bits - 1) - zero) * scale


@torch.no_grad()
def reference_error(
    model: PreTrainedModel,
    online: RuntimeQuantization,
    prompt: Sequence[int],
    text: Tensor,
    scheme: QuantizationScheme,
    what: str,
) -> float:
    """Eq. 6 by one plain forward pass of the prompt's tokens and the text, all activations kept."""
    kept: list[Tensor] = []
    architecture, hooks = architecture_of(model), []
    with wrap(model, online):
        for layer in decoder_layers(model):
            if what == "blocks":
                hooks.append(layer.register_forward_hook(lambda _, __, out: kept.append(out)))
                continue
            for site in architecture.sites:
                linear = layer.get_submodule(site.linears[0])
                hooks.append(linear.register_forward_pre_hook(lambda _, x: kept.append(x[0])))
        model(torch.cat([torch.tensor(list(prompt), dtype=torch.long), text])[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    texts = [x[0, len(prompt) :] for x in kept]
    return sum((x - rounded(x, scheme)).square().sum().item() for x in texts)


@pytest.mark.parametrize("what", ["inputs", "blocks"])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("prompt", [(), (5, 9)])
def test_errors_behind_a_cached_prompt_are_those_of_plain_forward_passes(
    what: str, granularity: str, prompt: tuple[int, ...]
) -> None:
    model = tiny_model(**AWKWARD["llama-3"], dtype=torch.float64, eos_token_id=None)
    settings = recipe({"bits": 4, "symmetric": granularity == "token", "granularity": granularity}, measured=what)
    texts, tried = tiny_tokens(2, 9, seed=3), torch.tensor([1, 7, 40])
    asked = Prompt(model, RuntimeQuantization(), prompt, torch.device("cpu"))
    expected = [
        sum(
            reference_error(model, RuntimeQuantization(), (*prompt, token), text, settings.activations, what)
            for text in texts
        )
        for token in tried.tolist()
    ]
    # float64; transformers computes norms and rotary tables in float32
    torch.testing.assert_close(
        asked.errors(settings, texts, tried), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=0
    )
    alone = sum(
        reference_error(model, RuntimeQuantization(), prompt, text, settings.activations, what) for text in texts
    )
    assert asked.errors(settings, texts).item() == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("rotated", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_search_is_algorithm_1(rotated: bool) -> None:
    settings, model = recipe(), tiny_model(dtype=torch.float64)
    online = RuntimeQuantization(transforms=RotationScheme().transforms if rotated else ())
    if rotated:
        rotate(model, RotationScheme(), 0)
    at = context(settings, model=model)
    at.online = online
    ids, prefix = search(at)
    expected: list[int] = []
    for (text,) in search_texts(model, CushionCache.of(settings), at.calibration_samples, 0):
        errors = [
            reference_error(model, online, (*expected, token), text, settings.activations, "inputs")
            for token in range(VOCABULARY)
        ]
        best = int(torch.tensor(errors).argmin())
        if errors[best] >= reference_error(model, online, expected, text, settings.activations, "inputs"):
            break
        expected.append(best)
    assert ids == tuple(expected)
    assert ids
    with wrap(model, online):
        assert torch.equal(prefix.keys, compute_prefix(model, ids).keys)


def test_batches_of_candidates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = search(context(recipe()))[0]
    monkeypatch.setitem(searching._TOKENS_AT_ONCE, "cpu", 70)  # seven candidates
    assert search(context(recipe()))[0] == at_once


def test_a_token_that_helps_too_little_ends_the_search_and_no_token_is_no_prefix() -> None:
    settings = recipe(threshold=1e-6)
    stored = build_weights(tiny_model(), None, settings, 0, tiny_tokens(6, 16, seed=1), progress=False)
    plain = recipe(methods={})
    without = build_weights(tiny_model(), None, plain, 0, tiny_tokens(6, 16, seed=1), progress=False)
    assert stored.state.tensors["cushioncache"]["keys"].shape[2] == 0
    assert not stored.history
    tokens = tiny_tokens()
    with torch.no_grad(), quantized_forward(without.model, plain, without.state):
        expected = without.model(tokens, use_cache=False).logits
    with torch.no_grad(), quantized_forward(stored.model, settings, stored.state):
        assert torch.equal(stored.model(tokens, use_cache=False).logits, expected)


def test_the_search_may_begin_with_bos_and_try_some_tokens() -> None:
    settings = recipe(start="bos", candidates=4, max_tokens=2)
    at = context(settings)
    counts = at.calibration_samples.flatten().bincount()
    tried = candidate_tokens(at.model, CushionCache.of(settings), at.calibration_samples).tolist()
    assert tried[0] == at.model.config.bos_token_id
    assert len(tried) == 4
    assert all(counts[token] >= counts.topk(4).values[-1] for token in tried[1:])
    ids = search(at)[0]
    assert ids[0] == at.model.config.bos_token_id
    assert set(ids) <= set(tried)
    assert len(ids) <= 2


def test_texts_of_the_search_are_drawn_by_the_seed_and_fit_the_context() -> None:
    model, samples = tiny_model(max_position_embeddings=14), tiny_tokens(6, 14, seed=1)
    settings = CushionCache(max_tokens=5, search_samples=2)
    texts = search_texts(model, settings, samples, 0)
    assert texts.shape == (5, 2, 9)
    assert all((text == samples[:, :9]).all(dim=1).any() for text in texts.flatten(0, 1))
    assert torch.equal(texts, search_texts(model, settings, samples, 0))
    assert not torch.equal(texts, search_texts(model, settings, samples, 1))


def test_an_error_is_of_one_text_and_its_gradient_takes_the_grid_as_fixed() -> None:
    scheme = QuantizationScheme(**STATIC | {"dynamic": True})
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = squared_error(x, scheme)
    grid = torch.stack([rounded(text, scheme) for text in x.detach()])
    torch.testing.assert_close(found, (x - grid).square().sum(dim=(1, 2)))
    found.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() - grid))


def reference_losses(
    model: PreTrainedModel, settings: Recipe, keys: Tensor, values: Tensor, ids: Tensor, weight: float
) -> Tensor:
    """Eq. 11 with transformers' own cache in front of the text, errors of what the sites read, quantizers as hooks."""
    cache = DynamicCache()
    for layer in range(len(keys)):
        cache.update(keys[layer][None], values[layer][None], layer)
    total: list[Tensor] = []
    scheme = settings.activations.model_copy(update={"dynamic": True})

    def straight_through(x: Tensor) -> Tensor:
        grid = torch.stack([rounded(text, scheme) for text in x.detach()])
        total.append((x - grid).square().sum())
        return x + (grid - x).detach()  # scales of each text cut nothing off

    positions = torch.arange(ids.shape[1])[None] + keys.shape[2]
    with Handle() as handle:
        for layer in decoder_layers(model):
            for site in architecture_of(model).sites:
                hook_site(handle, layer, site, straight_through)
        logits = model(ids, past_key_values=cache, position_ids=positions, use_cache=True).logits
    prediction = cross_entropy(logits[0, :-1].float(), ids[0, 1:])
    return prediction + weight * torch.stack(total).sum()


@pytest.mark.parametrize("shape", ["llama-3", "phi-3"])
def test_gradients_are_those_of_the_quantized_network_behind_a_plain_cache(shape: str) -> None:
    # Eight bits: fewer codes next to a border, which the two orders of float32 sums may take for different ones.
    model = tiny_model(**AWKWARD[shape], dtype=torch.float64, eos_token_id=None).requires_grad_(False)
    settings, ids = recipe({**STATIC, "bits": 8}), tiny_tokens(1, 12, seed=5)
    found = compute_prefix(model, (5, 9, 1))
    parts = [[part.clone().requires_grad_() for part in (found.keys, found.values)] for _ in range(2)]
    with measured(model, network(settings, RuntimeQuantization(), Prefix(*parts[0])), settings) as errors:
        ours = losses(model, errors, ids, 0.3)["loss"]
    expected = reference_losses(model, settings, *parts[1], ids, 0.3)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    ours.backward()
    expected.backward()
    for one, other in zip(*parts, strict=True):
        assert one.grad.abs().max() > 1e-3
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_tuning_lowers_the_loss_and_changes_nothing_but_the_prefix(dtype: torch.dtype) -> None:
    model, settings = tiny_model(dtype=dtype), recipe(steps=20, batch_size=6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    at = context(settings, model=model)
    ids, found = search(at)
    tuned, history = tune(at, found)
    assert history[-1]["loss"] < history[0]["loss"] - 0.01  # every step sees all six samples
    assert {name: p.requires_grad for name, p in model.named_parameters()} == asked
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tuned.keys.dtype == tuned.values.dtype == dtype
    assert tuned.tokens == len(ids)
    assert (tuned.keys != found.keys).any()
    assert (tuned.values != found.values).any()
    assert not tuned.keys.requires_grad


def test_lambda_decides_what_the_tuning_lowers() -> None:
    at = context(recipe(steps=0))
    found = search(at)[1]
    last = {}
    for weight in (0.0, 10.0):
        history = tune(context(recipe(steps=10, batch_size=6, error_weight=weight)), found)[1]
        last[weight] = history[-1]
        assert history[0]["loss"] == pytest.approx(history[0]["prediction"] + weight * history[0]["error"])
    assert last[0.0]["prediction"] < last[10.0]["prediction"]
    assert last[0.0]["error"] > last[10.0]["error"]


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    state = torch.get_rng_state()
    first, again, other = (
        build_weights(tiny_model(), None, recipe(), seed, tiny_tokens(6, 16, seed=1), progress=False).state
        for seed in (0, 0, 1)
    )
    for name, tensor in first.tensors["cushioncache"].items():
        assert torch.equal(tensor, again.tensors["cushioncache"][name])
    assert not torch.equal(first.tensors["cushioncache"]["keys"], other.tensors["cushioncache"]["keys"])
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_a_quantized_model_has_its_tuned_prefix_in_another_process(tmp_path: Path) -> None:
    data = recipe().model_dump(mode="json")
    asked = parse_recipe({**data, "weights": {"scheme": {"bits": 8, "granularity": "channel"}}}, "test")
    samples = tiny_tokens(6, 16, seed=1)
    stored = build_weights(tiny_model(), tiny_tokenizer(), asked, 0, samples, progress=False)
    check_loaded_is_stored(stored, asked, samples, tmp_path / "model")


@pytest.mark.parametrize(("where", "calls"), [("search", 9), ("tuning", 5)])
def test_what_was_killed_goes_on_with_the_same_result(
    where: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(searching._TOKENS_AT_ONCE, "cpu", 200)
    checkpoint = Checkpoint(tmp_path / "file", "this", every=1)
    counted = {"search": 0, "tuning": 0}
    stop: dict[str, int] = {}

    def limited(name: str, function: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            counted[name] += 1
            if counted[name] == stop.get(name):
                raise Interrupted
            return function(*arguments, **more)

        return called

    monkeypatch.setattr(Prompt, "errors", limited("search", Prompt.errors))
    monkeypatch.setattr(prefix_tuning, "losses", limited("tuning", losses))

    def made(checkpoint: Checkpoint | None) -> Any:
        samples = tiny_tokens(6, 16, seed=1)
        return build_weights(tiny_model(), None, recipe(), 0, samples, checkpoint=checkpoint, progress=False)

    straight, whole = made(None), dict(counted)
    counted.update(search=0, tuning=0)
    stop[where] = calls
    with pytest.raises(Interrupted):
        made(checkpoint)
    stop.clear()
    resumed = made(checkpoint)
    for name, tensor in straight.state.tensors["cushioncache"].items():
        assert torch.equal(resumed.state.tensors["cushioncache"][name], tensor)
    assert resumed.history == straight.history
    # what was under way is done twice, at most one batch of candidates or one step of two sequences
    assert all(counted[name] <= whole[name] + 2 for name in counted)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "file-search"}


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    with pytest.raises(RecipeError, match="lowers the quantization error of activations: it needs an activations"):
        parse_recipe({"methods": {"cushioncache": {}}, "calibration": {"samples": 2}}, "test")
    with pytest.raises(RecipeError, match="both choose the tokens before a text"):
        recipe(methods={"cushioncache": {}, "prefixed_outliers": {}})
    samples = tiny_tokens(6, 11, seed=1)
    with pytest.raises(RecipeError, match="a prefix of 10 tokens leaves no room for a text"):
        build_weights(tiny_model(max_position_embeddings=11), None, recipe(max_tokens=10), 0, samples)
    with pytest.raises(RecipeError, match="attention has a window of 6 tokens: after a prefix of 3 use"):
        build_weights(tiny_model(**AWKWARD["mistral"]), None, recipe(), 0, samples, progress=False)
    with pytest.raises(RecipeError, match=r"names no BOS: set cushioncache\.start to nothing"):
        build_weights(tiny_model(bos_token_id=None), None, recipe(start="bos"), 0, samples, progress=False)
    with pytest.raises(RotquantError, match=r"lower methods\.cushioncache\.learning_rate"):
        build_weights(tiny_model(), None, recipe(learning_rate=1e30), 0, samples, progress=False)
