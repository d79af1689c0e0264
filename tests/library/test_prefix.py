"""A prefix in the KV cache: a text behind it is what it would be behind the tokens themselves, however it is read."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rotquant import api
from rotquant.foundation.errors import CheckpointError, RecipeError, RotquantError
from rotquant.models.architectures import base_model, final_norm
from rotquant.models.simulation.kv_cache import QuantizedCache
from rotquant.models.simulation.prefix import Prefix, compute_prefix
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe, parse_recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import AWKWARD, FURTHER, checkpointed_loss, tiny_model, tiny_tokens
from tests.helpers.prefixes import IDS, behind, sink_model
from tests.helpers.weights import check_loaded_is_stored

PER_HEAD = QuantizationScheme(bits=4, symmetric=False, granularity="head")
#: In the last, longer texts have other keys, those of the prefix among them.
SHAPES = [*(shape for shape in AWKWARD if shape != "phi-3-longrope"), "qwen3", "mixtral", "olmo2", "gemma2", "gemma3"]
#: Families whose layers, or some of them, attend in a window: here as long as the prefix and the texts below. Gemma 3
#: has another RoPE in those layers.
WINDOWED, WINDOW = ("mistral", "qwen2", "gemma2", "gemma3"), len(IDS) + 24
#: float64: what remains is the rounding of transformers' float32 norms and rotary tables.
EXACT = {"rtol": 0, "atol": 1e-5}


def model_and_prefix(shape: str = "llama-3") -> tuple[PreTrainedModel, Prefix]:
    options = {"sliding_window": WINDOW} if shape in WINDOWED else {}
    model = tiny_model(**(AWKWARD | FURTHER)[shape] | options, dtype=torch.float64, eos_token_id=None)
    return model, compute_prefix(model, IDS)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_behind_the_tokens(shape: str, use_cache: bool) -> None:
    model, prefix = model_and_prefix(shape)
    tokens = tiny_tokens()
    expected = model(behind(tokens), use_cache=False).logits[:, len(IDS) :]
    plain = model(tokens, use_cache=False).logits
    with wrap(model, RuntimeQuantization(prefix=prefix)):
        torch.testing.assert_close(model(tokens, use_cache=use_cache).logits, expected, **EXACT)
    assert (plain - expected).abs().max() > 0.01
    assert torch.equal(model(tokens, use_cache=False).logits, plain)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cached_text_goes_on_where_it_was(shape: str) -> None:
    model, prefix = model_and_prefix(shape)
    tokens = tiny_tokens()
    with wrap(model, RuntimeQuantization(keys=PER_HEAD, values=PER_HEAD, prefix=prefix)):
        at_once = model(tokens, use_cache=False).logits
        cache, found = None, []
        for piece in tokens.split([4, 1, tokens.shape[1] - 5], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    assert isinstance(cache, QuantizedCache)
    assert cache.get_seq_length() == tokens.shape[1]
    torch.testing.assert_close(torch.cat(found, dim=1), at_once, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_generating_a_padded_batch_is_generating_behind_the_tokens(shape: str) -> None:
    model, prefix = model_and_prefix(shape)
    prompts = [tiny_tokens(1, length, seed=length)[0] for length in (7, 5, 12)]
    batch = torch.stack([torch.cat([torch.zeros(12 - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([torch.arange(12) >= 12 - len(p) for p in prompts]).long()
    asked = {"max_new_tokens": 6, "do_sample": False}
    alone = [model.generate(behind(prompt[None]), **asked)[0, -6:] for prompt in prompts]
    with wrap(model, RuntimeQuantization(prefix=prefix)):
        together = model.generate(batch, attention_mask=mask, **asked)
    assert torch.equal(together[:, -6:], torch.stack(alone))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_mask_of_pairs_is_that_of_the_text(dtype: torch.dtype) -> None:
    model, prefix = model_and_prefix()
    tokens = tiny_tokens(2)
    seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    seen[1, :, 5:, 2:4] = False
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -1e9)
    whole = torch.ones(2, 1, *[tokens.shape[1] + len(IDS)] * 2, dtype=torch.bool).tril()
    whole[:, :, len(IDS) :, len(IDS) :] = seen
    expected = model(behind(tokens), attention_mask=whole, use_cache=False).logits[:, len(IDS) :]
    positions = torch.arange(tokens.shape[1])[None]
    with wrap(model, RuntimeQuantization(prefix=prefix)):
        found = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, **EXACT)


@torch.no_grad()
def test_the_prefix_is_not_quantized_and_the_text_is() -> None:
    model, prefix = model_and_prefix()
    tokens = tiny_tokens()
    with wrap(model, RuntimeQuantization(keys=PER_HEAD, values=PER_HEAD, prefix=prefix)):
        cache = model(tokens, use_cache=True).past_key_values
    new = prefix.keys[1, :, :1].expand(len(tokens), -1, -1, -1)
    seen, _ = cache.update(new, new, 1)
    assert torch.equal(seen[:, :, : len(IDS)], prefix.keys[1].expand(len(tokens), -1, -1, -1))
    assert seen.shape[2] == len(IDS) + tokens.shape[1] + 1
    assert cache.layers[1].keys.dtype == torch.uint8


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_that_stream_see_it(shape: str) -> None:
    model, prefix = model_and_prefix(shape)
    tokens = tiny_tokens(5)
    with wrap(model, RuntimeQuantization(keys=PER_HEAD, prefix=prefix)):
        expected = base_model(model)(tokens, use_cache=False).last_hidden_state
        stream = capture_layer_inputs(model, tokens, batch_size=2)
        for index, _ in stream.layers("test"):
            stream.advance(index)
        torch.testing.assert_close(final_norm(model)(stream.hidden), expected, **EXACT)


def test_gradient_checkpointing_does_not_lose_it() -> None:
    model, prefix = model_and_prefix()
    tokens = tiny_tokens()
    with wrap(model, RuntimeQuantization(prefix=prefix)):
        expected = model(tokens, labels=tokens, use_cache=False).loss
        loss = checkpointed_loss(model, tokens)
    assert torch.equal(loss, expected)
    assert prefix.keys.grad is None


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    model, prefix = model_and_prefix()
    assert compute_prefix(model, []).tokens == 0
    other = Prefix(prefix.keys[:, :1], prefix.values[:, :1])
    with pytest.raises(RecipeError, match=r"the prefix has keys of shape"):
        wrap(model, RuntimeQuantization(prefix=other))
    short = tiny_model(max_position_embeddings=3)
    with pytest.raises(RecipeError, match="a prefix of 3 tokens leaves no room for a text"):
        wrap(short, RuntimeQuantization(prefix=compute_prefix(short, IDS)))
    long = tiny_model(**AWKWARD["phi-3-longrope"] | {"sliding_window": None})
    with (
        wrap(long, RuntimeQuantization(prefix=compute_prefix(long, IDS))),
        pytest.raises(RotquantError, match="texts of at most 1 tokens after the prefix"),
    ):
        long(tiny_tokens(), use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("shape", WINDOWED)
def test_a_text_that_a_window_parts_from_the_prefix_is_refused_however_it_comes(shape: str) -> None:
    """At once, piece by piece, with padding, which takes places of the window, or while it is generated."""
    model, prefix = model_and_prefix(shape)
    text, refused = tiny_tokens(1, 24), f"a window of {WINDOW} tokens: after a prefix of 3 .* at most 24, not "
    with wrap(model, RuntimeQuantization(prefix=prefix)):
        cache = model(text, use_cache=True).past_key_values
        for tokens, past in ((tiny_tokens(1, 25), None), (text[:, :1], cache)):
            with pytest.raises(RecipeError, match=f"{refused}25"):
                model(tokens, past_key_values=past)
        padded = torch.cat([torch.zeros_like(text), text[:, :5]], dim=1)
        with pytest.raises(RecipeError, match=f"{refused}29"):
            model(padded, attention_mask=(torch.arange(29) >= 24)[None].long())
        with pytest.raises(RecipeError, match=f"{refused}25"):
            model.generate(text[:, :20], max_new_tokens=9, do_sample=False)
    assert model(tiny_tokens(1, 40), use_cache=False).logits.isfinite().all()  # a window alone limits no text


def test_a_stored_models_windows_of_text_are_what_its_own_window_leaves_after_the_prefix(tmp_path: Path) -> None:
    model = tiny_model(**FURTHER["gemma3"] | {"sliding_window": 40})
    given = parse_recipe({"methods": {"prefixed_outliers": {"ids": IDS}}, "calibration": {"sequence_length": 24}}, "")
    stored = build_weights(model, tiny_tokenizer(), given, 0, tiny_tokens(4), progress=False)
    save_quantized(tmp_path / "model", stored)
    limits = api.limits_of(tmp_path / "model")
    assert limits.length() == 40 - len(IDS)
    with pytest.raises(RecipeError, match="a window of 40 tokens: after a prefix of 3 use texts of at most 37, not 38"):
        limits.check_length(38, "windows")


def recipe(**sections: object) -> Recipe:
    """A recipe with the method and further sections."""
    text = {"corpus": "modules", "samples": 6, "sequence_length": 16}
    data = {"methods": {"prefixed_outliers": {"threshold": 8.0, "rare": "once"}}, "calibration": text, **sections}
    return parse_recipe(data, "the test's recipe")


@torch.no_grad()
@pytest.mark.parametrize("rotated", [False, True])
def test_the_method_finds_the_tokens_that_stand_out_and_puts_bos_behind_them(rotated: bool) -> None:
    samples = tiny_tokens(6, 16, seed=1)
    samples[samples == 7] = 8
    samples[:, 5], samples[:4, 9] = 7, 7  # two in most windows, where the first position has none
    stored = build_weights(sink_model(), None, recipe(rotation={} if rotated else None), 0, samples, progress=False)
    assert stored.state.tensors["prefixed_outliers"]["ids"].tolist() == [7, sink_model().config.bos_token_id]


@torch.no_grad()
def test_a_quantized_model_has_its_prefix_in_another_process(tmp_path: Path) -> None:
    asked = recipe(
        rotation={},
        weights={"scheme": {"bits": 4, "granularity": "channel"}},
        activations={"bits": 4, "granularity": "tensor", "dynamic": False},
        keys={"bits": 4, "granularity": "head"},
        values={"bits": 4, "granularity": "head"},
    )
    model, samples = tiny_model(), tiny_tokens(6, 16, seed=1)
    chosen = asked.model_copy(
        update={"methods": {"prefixed_outliers": asked.methods["prefixed_outliers"].model_copy(update={"ids": IDS})}}
    )
    stored = build_weights(model, tiny_tokenizer(), chosen, 0, samples, progress=False)
    assert stored.state.tensors["prefixed_outliers"]["ids"].tolist() == list(IDS)
    check_loaded_is_stored(stored, chosen, samples, tmp_path / "model")


@torch.no_grad()
def test_static_scales_are_those_of_texts_behind_the_prefix() -> None:
    """Token 7 stands out wherever it is; behind a prefix of it, in samples without it, its input is in no scale."""
    samples = tiny_tokens(6, 16, seed=1)
    samples[samples == 7] = 8
    with_it = samples.clone()
    with_it[:, 0] = 7
    static = {"activations": {"bits": 8, "granularity": "tensor", "dynamic": False}}
    chosen = recipe(methods={"prefixed_outliers": {"ids": [7]}}, **static)
    behind_it = build_weights(sink_model(), None, chosen, 0, samples, progress=False).state.static
    among = build_weights(sink_model(), None, recipe(methods={}, **static), 0, with_it, progress=False).state.static
    assert among[0, "mlp_output"].scale > 8 * behind_it[0, "mlp_output"].scale


@torch.no_grad()
def test_no_outlier_token_is_a_result_and_no_prefix() -> None:
    model = tiny_model(bos_token_id=None)
    stored = build_weights(model, None, recipe(), 0, tiny_tokens(6, 16, seed=1), progress=False)
    assert stored.state.tensors["prefixed_outliers"]["keys"].shape[2] == 0
    plain = model(tiny_tokens(), use_cache=False).logits
    with quantized_forward(stored.model, recipe(), stored.state):
        assert torch.equal(stored.model(tiny_tokens(), use_cache=False).logits, plain)


def test_a_recipe_that_does_not_fit_is_refused_before_any_work() -> None:
    model, samples = tiny_model(), tiny_tokens(6, 16, seed=1)
    with pytest.raises(RecipeError, match=r"prefixed_outliers\.ids has no token"):
        recipe(methods={"prefixed_outliers": {"ids": []}})
    with pytest.raises(RecipeError, match="omniquant cannot be combined with prefixed_outliers"):
        recipe(
            methods={"prefixed_outliers": {}, "omniquant": {}},
            weights={"scheme": {"bits": 4, "granularity": "channel"}},
        )
    with pytest.raises(CheckpointError, match="the model's embedding ends at"):
        build_weights(model, None, recipe(methods={"prefixed_outliers": {"ids": [10**6]}}), 0, samples)
    short = tiny_model(max_position_embeddings=16)
    with pytest.raises(RecipeError, match="a prefix of 16 tokens leaves no room"):
        build_weights(short, None, recipe(methods={"prefixed_outliers": {"ids": [3] * 16}}), 0, samples)


@torch.no_grad()
def test_a_prefix_that_is_trained_is_never_stale_and_gets_its_gradient() -> None:
    model, found = model_and_prefix()
    tokens = tiny_tokens()
    trained = Prefix(found.keys.clone().requires_grad_(), found.values.clone().requires_grad_())
    with wrap(model, RuntimeQuantization(prefix=trained)):
        before = model(tokens, use_cache=False).logits
        trained.values.mul_(1.5)
        after = model(tokens, use_cache=False).logits
        with torch.enable_grad():
            for _ in range(2):  # a second step has a graph of its own
                model(tokens, labels=tokens, use_cache=False).loss.backward()
    with wrap(model, RuntimeQuantization(prefix=Prefix(found.keys, found.values * 1.5))):
        assert torch.equal(model(tokens, use_cache=False).logits, after)
    assert not torch.equal(before, after)
    assert all(
        part.grad is not None and part.grad.abs().amin(dim=(1, 3)).min() > 0 for part in (trained.keys, trained.values)
    )
