"""A quantized model without transforms at run time is an ordinary checkpoint with the same function."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotquant.formats.export import export_plain
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.metrics.perplexity import perplexity
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.rotation.matrices import initial_rotations
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import RUNTIME_FIELDS, Recipe, override
from rotquant.recipes.registry import method_names
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.families import SAMPLES, method
from tests.helpers.models import FAMILIES, outlier_model, tiny_model, tiny_tokens

EASY = override(preset("spinquant-easy"), {"methods": {"gptq": None}}, "test")
HEAD = {"bits": 4, "symmetric": False, "granularity": "head"}
TEXT = Tokens(tiny_tokens(1, 400)[0])
WINDOWS = Perplexity(sequence_length=32)


def stored(folder: Path, recipe: Recipe, family: str = "llama", **options: object) -> Path:
    """A quantized folder; where the recipe learns rotations, others stand for the learned ones."""
    model = tiny_model(family, **options)
    learned = None
    if recipe.learner:
        learned = initial_rotations(architecture_of(model), recipe.rotation, seed=7)
    save_quantized(folder, build_weights(model, tiny_tokenizer(), recipe, seed=0, rotations=learned))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_has_the_stored_weights_and_any_runtime_loads_it(family: str, tmp_path: Path) -> None:
    export_plain(stored(tmp_path / "quantized", EASY, family), tmp_path / "plain")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto").eval()
    original, _, _ = load_quantized(tmp_path / "quantized")
    assert all(torch.equal(original.state_dict()[name], tensor) for name, tensor in exported.state_dict().items())
    assert perplexity(exported, TEXT, WINDOWS) == perplexity(original, TEXT, WINDOWS)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").bos_token_id == 1
    assert not any("rotquant" in path.name for path in (tmp_path / "plain").iterdir())
    assert not list((tmp_path / "plain").glob("*.bin"))


def test_with_the_recipes_quantizers_an_exported_model_is_the_quantized_one(tmp_path: Path) -> None:
    export_plain(stored(tmp_path / "quantized", EASY), tmp_path / "plain")
    quantized, _, state = load_quantized(tmp_path / "quantized")
    plain, _ = load_checkpoint(tmp_path / "plain", torch.float32)
    running = Recipe.model_validate(
        {"activations": EASY.activations, "attention_output": HEAD, "keys": HEAD, "values": HEAD}
    )
    with quantized_forward(quantized, state.recipe, state), quantized_forward(plain, running):
        assert perplexity(plain, TEXT, WINDOWS) == perplexity(quantized, TEXT, WINDOWS)


def test_rotated_weights_in_floating_point_keep_the_function_of_a_model_with_tied_embeddings(tmp_path: Path) -> None:
    rotated = override(EASY, {"weights": None, "methods": {"spinquant": None}}, "test")
    export_plain(stored(tmp_path / "rotated", rotated, tied=True), tmp_path / "plain")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not exported.config.tie_word_embeddings
    # Weights are rounded to float32 once, after a float64 rotation: logits of size 1 agree to 1e-5.
    with torch.no_grad():
        difference = exported(TEXT.ids[None]).logits - tiny_model(tied=True)(TEXT.ids[None]).logits
    assert difference.abs().max() < 1e-4


def test_weights_can_be_exported_in_another_type(tmp_path: Path) -> None:
    export_plain(stored(tmp_path / "quantized", EASY), tmp_path / "plain", torch.bfloat16)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("switch", ["mlp", "heads"])
def test_weights_that_undo_transforms_at_run_time_are_not_exported(switch: str, tmp_path: Path) -> None:
    recipe = override(EASY, {"rotation": {switch: True}, "methods": {"spinquant": None}}, "test")
    folder = stored(tmp_path / "quantized", recipe)
    with pytest.raises(
        RecipeError, match=rf"at run time \(rotation.{switch}\).* quantize with --set rotation.{switch}=false\.$"
    ):
        export_plain(folder, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def alone(name: str) -> Recipe:
    """The first preset with a method, reduced to it and to what is fused into weights."""
    with_it = next(recipe for recipe in map(method, all_presets()) if name in recipe.methods)
    data = with_it.model_dump()
    if data["rotation"] is not None:
        data["rotation"] |= {"heads": False, "mlp": False}
    return Recipe.model_validate(data | {"methods": {name: data["methods"][name]}})


@torch.no_grad()
def simulated(folder: Path) -> torch.Tensor:
    """The logits of a quantized folder with all that acts at run time but the quantizers of inputs and cache."""
    model, _, state = load_quantized(folder)
    floating = state.recipe.model_copy(update=dict.fromkeys(RUNTIME_FIELDS))
    state = replace(state, manifest=state.manifest.model_copy(update={"recipe": floating}))
    with quantized_forward(model, floating, state):
        return model(SAMPLES, use_cache=False).logits


@pytest.mark.parametrize("name", method_names())
def test_every_method_is_exported_with_the_simulations_logits_or_refused(name: str, tmp_path: Path) -> None:
    recipe, model = alone(name), outlier_model()
    learned = initial_rotations(architecture_of(model), recipe.rotation, seed=7) if recipe.learner else None
    texts = dict.fromkeys(recipe.own_texts, SAMPLES)
    built = build_weights(model, tiny_tokenizer(), recipe, 3, SAMPLES, texts=texts, progress=False, rotations=learned)
    save_quantized(tmp_path / "quantized", built)
    if recipe.methods[name].acts_beyond_quantizers:
        assert name in ("duquant", "flatquant", "prefixed_outliers", "cushioncache", "qfep", "wush")
        with pytest.raises(RecipeError, match=f"the method {name} .* while the model runs"):
            export_plain(tmp_path / "quantized", tmp_path / "plain")
        assert not (tmp_path / "plain").exists()
        return
    export_plain(tmp_path / "quantized", tmp_path / "plain")
    with torch.no_grad():
        exported = load_checkpoint(tmp_path / "plain", torch.float32)[0](SAMPLES, use_cache=False).logits
    assert torch.equal(exported, simulated(tmp_path / "quantized"))


def test_keys_may_have_been_turned_at_run_time(tmp_path: Path) -> None:
    recipe = override(EASY, {"rotation": {"keys": True}, "methods": {"spinquant": None}}, "test")
    export_plain(stored(tmp_path / "quantized", recipe), tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").exists()


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    folder = stored(tmp_path / "quantized", EASY)
    with pytest.raises(ResultError, match="which this command reads"):
        export_plain(folder, folder)
