"""Weights of levels on disk and out of it: packed, equal bit for bit, and damage in a sentence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rotquant.formats.export import export_plain
from rotquant.foundation.errors import CheckpointError
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.qat.quantizers import make_quantizer
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.codebook import CodebookWeight
from rotquant.weights.build import quantized_forward
from rotquant.weights.context import QuantizationContext
from rotquant.weights.storage import (
    Manifest,
    QuantizedState,
    StoredModel,
    load_quantized,
    read_quantized,
    save_quantized,
)
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model
from tests.helpers.processes import logits_elsewhere
from tests.helpers.sealing import reseal

UP = "model.layers.0.mlp.up_proj.weight"
GROUP = 32


def recipe_of(bits: int) -> Recipe:
    scheme = {"bits": bits, "symmetric": False, "granularity": "group", "group_size": GROUP}
    return Recipe.model_validate({"weights": {"scheme": scheme}, "activations": {"bits": 8, "symmetric": True}})


def stored_model(bits: int, dtype: torch.dtype = torch.float32) -> StoredModel:
    """A model whose weights were partitioned (2 bits) or rounded to NormalFloat (3), parameters moved at random."""
    model, recipe = tiny_model(dtype=dtype), recipe_of(bits)
    context = QuantizationContext(model, recipe, None, 0, torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(bits)
    for index, layer in enumerate(decoder_layers(model)):
        for site in architecture_of(model).sites:
            frozen = []
            for name in site.linears:
                weight = linear_of(layer, name).weight.detach()
                quantizer = make_quantizer("ldp" if bits == 2 else "nf3_ldp", weight, GROUP, bits)
                for parameter in quantizer.parameters():
                    parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
                frozen.append(quantizer.freeze(weight))
            context.store(index, layer, site, frozen)
    shapes = {name: weight.shape for name, weight in context.weights.items()}
    name = str(dtype).removeprefix("torch.")
    manifest = Manifest.model_validate({"recipe": recipe, "seed": 0, "dtype": name, "quantized": shapes})
    return StoredModel(model, tiny_tokenizer(), context.weights, QuantizedState(manifest, {}, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 3])
def test_a_loaded_model_equals_the_saved_one(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = stored_model(bits, dtype)
    save_quantized(tmp_path / "model", stored)
    model, _, _ = load_quantized(tmp_path / "model")
    for key, value in stored.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert len(model.get_parameter(UP)[0, :GROUP].unique()) <= 2**bits
    weights = read_quantized(tmp_path / "model").weights
    assert weights.keys() == stored.weights.keys()
    for name, weight in weights.items():
        saved = stored.weights[name]
        assert isinstance(weight, CodebookWeight)
        assert isinstance(saved, CodebookWeight)
        assert torch.equal(weight.codes, saved.codes)
        assert torch.equal(weight.levels, saved.levels)


@pytest.mark.parametrize("bits", [2, 3])
def test_a_code_takes_as_many_bits_as_the_recipe_says(bits: int, tmp_path: Path) -> None:
    save_quantized(tmp_path / "model", stored_model(bits))
    codes = load_file(tmp_path / "model" / "quantized.safetensors")[f"{UP}.codes"]
    rows, columns = tiny_model().get_parameter(UP).shape
    assert codes.dtype == torch.uint8
    assert codes.numel() * 8 == rows * columns * bits


@pytest.mark.unflipped
def test_another_process_gives_the_same_logits(tmp_path: Path) -> None:
    stored = stored_model(2)
    save_quantized(tmp_path / "model", stored)
    tokens = torch.tensor([[1, 9, 30, 7]])
    with torch.no_grad(), quantized_forward(stored.model, stored.manifest.recipe, stored.state):
        expected = stored.model(tokens, use_cache=False).logits
    assert torch.equal(logits_elsewhere(tmp_path / "model", tokens), expected)


def test_an_exported_model_has_the_stored_weights(tmp_path: Path) -> None:
    stored = stored_model(3)
    save_quantized(tmp_path / "model", stored)
    export_plain(tmp_path / "model", tmp_path / "plain")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in stored.model.state_dict().items())


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("levels") / "model"
    save_quantized(folder, stored_model(2))
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{UP}.levels": None}, r"weight.codes has shape \[96, 16\], expected \[96, 32\]"),  # of integers with scales
        ({f"{UP}.codes": None}, r"up_proj.weight.codes is missing"),
        (
            {f"{UP}.codes": torch.zeros(96, 15, dtype=torch.uint8)},
            r"weight.codes has shape \[96, 15\], expected \[96, 16\]",
        ),
        ({f"{UP}.levels": torch.zeros(96, 2, 8)}, r"weight.levels has shape \[96, 2, 8\], expected \[96, 2, 4\]"),
        ({f"{UP}.levels": torch.full((96, 2, 4), torch.nan)}, r"weight.levels holds inf or nan"),
        ({f"{UP}.levels": torch.zeros(96, 2, 4, dtype=torch.int32)}, r"weight.levels is of type int32"),
        ({f"{UP}.codes": torch.zeros(96, 16)}, r"weight.codes is of type float32"),
        ({f"{UP}.scale": torch.zeros(96, 2, 1)}, r"up_proj.weight.scale"),
    ],
)
def test_damage_is_one_sentence(
    good_folder: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], sentence: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in good_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(good_folder / "quantized.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "quantized.safetensors")
    reseal(folder / "rotquant.json")  # else the file itself would be found another
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_quantized(folder)
    assert "\n" not in str(caught.value)


def test_levels_of_a_recipe_of_four_bits_are_refused(good_folder: Path, tmp_path: Path) -> None:
    stored = stored_model(2)
    manifest = stored.manifest.model_copy(update={"recipe": recipe_of(4)})
    save_quantized(
        tmp_path / "model",
        StoredModel(stored.model, stored.tokenizer, stored.weights, QuantizedState(manifest, {}, {})),
    )
    with pytest.raises(CheckpointError, match=r"weight.levels should not be there"):
        load_quantized(tmp_path / "model")
