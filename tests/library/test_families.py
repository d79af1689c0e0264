"""Methods on model families: the function stays, a stored model is the same model, a cache changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RotquantError
from rotquant.models.architectures import architecture_of, base_model, final_norm
from rotquant.models.fitting import fitted
from rotquant.models.simulation.kv_cache import QuantizedCache
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.presets import all_presets
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme
from rotquant.weights.actions import hooks
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import StoredModel, load_quantized, save_quantized
from tests.helpers.cases import one_of_each, only
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.families import FLOATS, SAMPLES, method
from tests.helpers.invariance import invariance_error
from tests.helpers.models import AWKWARD, FURTHER, tiny_model, tiny_tokens

PRESETS = all_presets()
#: Methods that train weights of 2 and 3 bits to be something else.
LOW_BITS = ("qift", "rcp", "bitdistiller", "bitdistiller-rotated")
#: Methods of 4-bit weights alone: QuIP#'s codebooks and QoQ's intermediate INT8 end there.
FOUR_BITS = ("quip-sharp", "qoq", "qoq-channel")
#: Methods that are a prefix and nothing else: without it they round to nearest.
PREFIXES = ("cushioncache", "qfep")
#: With families that not every method takes.
SHAPES = AWKWARD | {name: FURTHER[name] for name in ("qwen3", "mixtral", "qwen3-moe", "olmo2", "gemma2", "gemma3")}


def turns(*left_out: str) -> list[Any]:
    """Families and presets: the first preset on the first two families, the next on the second and third, ...; `long`
    are the second of the two, and presets with the methods of others."""
    families, methods = list(AWKWARD), [name for name in PRESETS if name not in left_out]
    usual = {case.values[0] for case in one_of_each(methods, FLOATS) if not case.marks}
    pairs = [(families[(i + j) % len(families)], name) for i, name in enumerate(methods) for j in (0, 1)]
    return only([pair for pair in pairs[::2] if pair[1] in usual], pairs)


def build(shape: str, recipe: Recipe, **options: object) -> StoredModel:
    if recipe.has_role("prefix") and "sliding_window" in SHAPES[shape]:
        options["sliding_window"] = 64  # with room for a prefix before every text
    model = tiny_model(**SHAPES[shape] | options)
    recipe, _ = fitted(recipe, architecture_of(model))
    learned = hooks(recipe.learner).learn_rotations(model, recipe, 3, SAMPLES) if recipe.learner else None
    rotations = learned and learned.rotations
    texts = dict.fromkeys(recipe.own_texts, SAMPLES)
    return build_weights(model, tiny_tokenizer(), recipe, 3, SAMPLES, texts=texts, progress=False, rotations=rotations)


@torch.no_grad()
def logits(model: nn.Module, stored: StoredModel) -> Tensor:
    with quantized_forward(model, stored.manifest.recipe, stored.state):
        return model(tiny_tokens(), use_cache=False).logits


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("shape", AWKWARD)
def test_rotation_does_not_change_the_logits(shape: str, dtype: torch.dtype, bound: float) -> None:
    model = tiny_model(**AWKWARD[shape], dtype=dtype)
    assert invariance_error(model, RotationScheme(), seed=3, input_ids=tiny_tokens()) <= bound


@pytest.mark.parametrize(("shape", "name"), turns(*FOUR_BITS, *PREFIXES, *LOW_BITS))
def test_every_method_keeps_the_function_up_to_its_rounding(shape: str, name: str) -> None:
    """8 bits move the logits by 1 to 4 percent, floats by more; a transform without its inverse would, by about their
    own size."""
    asked = method(name, bits=8)  # a prefix is no part of the function that is kept
    kept = {name: settings for name, settings in asked.methods.items() if "prefix" not in settings.roles}
    stored = build(shape, asked.model_copy(update={"methods": kept}))
    with torch.no_grad():
        expected = tiny_model(**AWKWARD[shape])(tiny_tokens(), use_cache=False).logits
    error = (logits(stored.model, stored) - expected).norm() / expected.norm()
    assert (error == 0.0) if name == "baseline" else (0.0 < error < FLOATS.get(name, 0.06))


STORED = turns("quip-sharp")  # no Hadamard matrix of order 148


@pytest.mark.parametrize(("shape", "name"), STORED)
def test_a_stored_model_is_loaded_bit_for_bit(shape: str, name: str, tmp_path: Path) -> None:
    # Longer texts of phi-3-longrope have other keys, and its window here has no room for a prefix.
    shape = "phi-3" if shape == "phi-3-longrope" and method(name).has_role("prefix") else shape
    stored = build(shape, method(name))
    save_quantized(tmp_path / "model", stored)
    model, _, state = load_quantized(tmp_path / "model")
    architecture = architecture_of(model)
    quantized = 0 if method(name).weights is None else architecture.num_layers * len(architecture.linears)
    assert len(state.manifest.quantized) == quantized
    assert torch.equal(logits(model, stored), logits(stored.model, stored))


@pytest.mark.parametrize("shape", SHAPES)
def test_calibration_gives_every_layer_its_own_mask_and_positions(shape: str) -> None:
    model = tiny_model(**SHAPES[shape])
    stream = capture_layer_inputs(model, SAMPLES, batch_size=3)
    for index, _ in stream.layers("test"):
        stream.advance(index)
    with torch.no_grad():
        expected = base_model(model)(SAMPLES, use_cache=False).last_hidden_state
        # float32 sums in another order (other batches); hidden states are of order 1.
        torch.testing.assert_close(final_norm(model)(stream.hidden), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def greedy_by_recomputation(model: nn.Module, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Tokens [steps] and logits [steps, vocabulary] of a continuation for which nothing is kept between tokens."""
    text, seen = prompt[None], []
    for _ in range(steps):
        seen.append(model(text, use_cache=False).logits[0, -1])
        text = torch.cat([text, seen[-1].argmax().view(1, 1)], dim=1)
    return text[0, -steps:], torch.stack(seen)


@pytest.mark.parametrize("shape", SHAPES)
def test_generating_a_padded_batch_with_the_cache_is_recomputing_each_text_alone(shape: str) -> None:
    stored = build(shape, method("quarot-rtn"), dtype=torch.float64, eos_token_id=None)
    # transformers' eager attention makes nan of a row that sees nothing, as padding's do, in float64.
    lengths = (12, 12, 12) if shape == "gemma2" else (7, 5, 12)
    prompts = [tiny_tokens(1, length, seed=index)[0] for index, length in enumerate(lengths)]
    batch = torch.stack([torch.cat([torch.zeros(12 - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([torch.arange(12) >= 12 - len(p) for p in prompts]).long()
    with quantized_forward(stored.model, stored.manifest.recipe, stored.state):
        out = stored.model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        alone = [greedy_by_recomputation(stored.model, prompt, 8) for prompt in prompts]
    assert isinstance(out.past_key_values, QuantizedCache)
    assert out.past_key_values.get_seq_length() == 12 + 8 - 1
    for row, (tokens, expected) in enumerate(alone):
        assert torch.equal(out.sequences[row, -8:], tokens)
        together = torch.stack([step[row] for step in out.logits])
        # float64: what remains is the rounding of transformers' float32 norms and rotary tables.
        assert (together - expected).abs().max() < 1e-5


def test_a_cached_text_that_outgrows_the_short_rope_frequencies_is_refused() -> None:
    model = tiny_model(**AWKWARD["phi-3-longrope"], eos_token_id=None)
    recipe = method("rtn").model_copy(update={"weights": None})
    with quantized_forward(model, recipe), torch.no_grad():
        assert model.generate(tiny_tokens(2, 2), max_new_tokens=3, do_sample=False).shape == (2, 5)
        with pytest.raises(RotquantError, match="other frequencies for texts of more than 4 tokens"):
            model.generate(tiny_tokens(2, 2), max_new_tokens=4, do_sample=False)
        short = model(tiny_tokens(1, 4), use_cache=True).past_key_values
        with pytest.raises(RotquantError, match="other frequencies for texts of more than 4 tokens"):
            model(tiny_tokens(1, 1), past_key_values=short, use_cache=True)
        model(tiny_tokens(1, 6), use_cache=True)  # At once, all keys have the frequencies of long texts.
