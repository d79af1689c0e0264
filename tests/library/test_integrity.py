"""Numbers that are none: every door to a model names the tensor that holds inf or nan, and nothing passes it on."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rotquant.decoder import convert, load_decoder, save_decoder
from rotquant.foundation.errors import CheckpointError, ResultError
from rotquant.metrics.perplexity import PerplexityResult
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.integrity import check_finite, first_not_finite
from rotquant.models.rotation.matrices import Rotations, load_history, load_rotations, save_rotations
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import RotationScheme
from rotquant.weights.build import build_weights
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import TINY_SHAPE, tiny_model, tiny_tokens
from tests.helpers.sealing import reseal

UP = "model.layers.1.mlp.up_proj.weight"


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    for manifest in path.parent.glob("*.json"):  # else the file itself would be found to be another
        if "digests" in json.loads(manifest.read_text()):
            reseal(manifest)


def spoil(name: str, value: float = math.nan) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    tiny_model(dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quantized model and the decoder made from it."""
    folder = tmp_path_factory.mktemp("made")
    model = tiny_model(**{name: TINY_SHAPE[name] for name in ("hidden_size", "intermediate_size")}, num_layers=2)
    stored = build_weights(model, tiny_tokenizer(), preset("quarot-rtn"), seed=0, progress=False)
    save_quantized(folder / "quantized", stored)
    save_decoder(folder / "decoder", convert(stored, dtype="float32"), tiny_tokenizer())
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_number_that_is_none_is_found_in_every_type(dtype: torch.dtype, value: float) -> None:
    good = torch.linspace(-2, 2, 35).view(5, 7).to(dtype)
    bad = good.clone()
    bad[3, 2] = value
    if bad[3, 2].isnan() or bad[3, 2].float().isinf():  # this 8-bit type has no infinity
        assert first_not_finite([("good", good), ("bad", bad)]) == "bad"
    assert first_not_finite([("good", good), ("codes", torch.tensor([1, 2])), ("none", torch.empty(0, 3))]) is None


def test_the_sentence_names_place_and_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"^somewhere is damaged: tensor b holds inf or nan; .*\.$"):
        check_finite("somewhere", [("a", torch.ones(2)), ("b", torch.tensor([1.0, math.inf]))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_checkpoint_with_a_number_that_is_none_is_refused(checkpoint: Path, value: float, dtype: torch.dtype) -> None:
    edit(checkpoint / "model.safetensors", spoil(UP, value))
    with pytest.raises(CheckpointError, match=f"is damaged: tensor {UP} holds inf or nan"):
        load_checkpoint(checkpoint, dtype)


def test_what_is_too_large_for_half_precision_is_told_from_damage(checkpoint: Path) -> None:
    edit(checkpoint / "model.safetensors", spoil(UP, 1e5))
    with pytest.raises(CheckpointError, match=rf"{UP} holds numbers beyond 65504, .*: use bfloat16 or float32\."):
        load_checkpoint(checkpoint, torch.float16)
    load_checkpoint(checkpoint, torch.bfloat16)


def test_a_configuration_that_gives_no_frequencies_is_refused(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("10000.0", "1e-300"))
    with pytest.raises(CheckpointError, match=r"config\.json is damaged: by its values .*inv_freq is inf or nan"):
        load_checkpoint(checkpoint, torch.float32)


@pytest.mark.parametrize("name", ["model.norm.weight", f"{UP}.scale"])
def test_a_quantized_model_with_a_number_that_is_none_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(made / "quantized", tmp_path / "copy"))
    edit(folder / "quantized.safetensors", spoil(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} holds inf or nan"):
        load_quantized(folder)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds inf or nan"):
        convert(folder)


def test_a_quantized_model_that_overflows_in_another_type_is_refused(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "quantized", tmp_path / "copy"))
    edit(folder / "quantized.safetensors", spoil(f"{UP}.scale", 60000.0))  # finite, but not seven times it
    load_quantized(folder)
    with pytest.raises(CheckpointError, match=f"{UP} holds numbers beyond 65504"):
        load_quantized(folder, dtype=torch.float16)


def test_a_decoder_with_a_number_that_is_none_is_refused(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "decoder", tmp_path / "copy"))
    load_decoder(folder)
    edit(folder / "decoder.safetensors", spoil("layers.1.down.scale"))
    with pytest.raises(CheckpointError, match=r"tensor layers\.1\.down\.scale holds inf or nan"):
        load_decoder(folder)


def test_a_model_that_overflows_when_converted_is_refused(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "quantized", tmp_path / "copy"))
    edit(folder / "quantized.safetensors", spoil("lm_head.weight", 1e5))
    with pytest.raises(CheckpointError, match="after conversion to float16, tensor head holds numbers beyond 65504"):
        convert(folder)


@pytest.mark.parametrize(("kind", "load"), [("quantized", load_quantized), ("decoder", load_decoder)])
def test_a_flipped_bit_is_found(made: Path, tmp_path: Path, kind: str, load: Callable[[Path], object]) -> None:
    folder = Path(shutil.copytree(made / kind, tmp_path / "copy"))
    path = folder / f"{kind}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{kind}\.safetensors is damaged or was changed"):
        load(folder)


def test_rotations_whose_bits_were_flipped_or_whose_metadata_are_not_theirs_are_refused(tmp_path: Path) -> None:
    file, rotations = tmp_path / "rotations.safetensors", Rotations(torch.eye(4, dtype=torch.float64), None)
    save_rotations(file, rotations, [{"loss": 1.0}])
    assert load_history(file) == [{"loss": 1.0}]
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(ResultError, match="a matrix was changed"):
        load_rotations(file)
    for metadata in ('[{"loss": 2.0}]', "nothing", '{"history": [2.0], "digest": "", "made_of": null}'):
        save_file(rotations.tensors(), file, metadata={"rotquant.models.rotation.matrices": metadata})
        with pytest.raises(ResultError, match=r"are damaged \(their history\)"):
            load_rotations(file)


def test_rotations_with_a_number_that_is_none_are_refused(tmp_path: Path) -> None:
    bad = torch.eye(4, dtype=torch.float64)
    bad[1, 2] = math.nan
    save_rotations(tmp_path / "rotations.safetensors", Rotations(bad, None), [])
    with pytest.raises(CheckpointError, match="tensor residual holds inf or nan"):
        load_rotations(tmp_path / "rotations.safetensors")


@pytest.mark.parametrize("method", ["quarot-rtn", "gptq"])
def test_quantizing_bad_weights_blames_the_weights(method: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(UP)[0, 0] = math.inf
    recipe = override(preset(method), {"calibration": {"samples": 2, "sequence_length": 24}}, "test")
    with pytest.raises(CheckpointError, match=f"the model is damaged: tensor {UP} holds inf or nan"):
        build_weights(model, None, recipe, seed=0, samples=tiny_tokens(), progress=False)


def test_weights_that_overflow_while_they_are_rotated_are_not_stored() -> None:
    model = tiny_model(dtype=torch.float16)
    with torch.no_grad():
        model.get_parameter(UP).fill_(6e4)  # a rotation gathers equal numbers in one: sqrt(64) times as large
    with pytest.raises(CheckpointError, match=r"after rotation, tensor .* beyond 65504.*: use bfloat16 or float32"):
        build_weights(model, None, Recipe(rotation=RotationScheme()), seed=0, progress=False)


def test_a_perplexity_that_is_no_number_is_printed_as_such() -> None:
    assert str(PerplexityResult(5.0, math.log(5), 0.1, 10, 1)) == "perplexity 5.0000"
    for value in (math.nan, math.inf):
        assert f"not finite ({value}: the network's outputs" in str(PerplexityResult(value, value, math.nan, 10, 1))
