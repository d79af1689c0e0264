"""Stored weights: packed integers, a folder that loads as it was saved, and what damage to it is called."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rotquant.foundation.errors import CheckpointError, ResultError
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.folders import kind_of
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.codebook import CodebookWeight
from rotquant.tensors.quantization import QParams
from rotquant.weights.build import quantized_forward
from rotquant.weights.packing import HostWeights, all_weight_tensors, pack_codes, unpack_codes
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.storage import load_quantized, read_manifest, save_quantized
from tests.helpers.sealing import reseal
from tests.helpers.weights import RECIPES, ROTATED_GPTQ, build


@hypothesis_settings(max_examples=50)
@given(bits=st.integers(2, 8), symmetric=st.booleans(), length=st.integers(1, 33), seed=st.integers(0, 99))
def test_packing_is_lossless(bits: int, symmetric: bool, length: int, seed: int) -> None:
    low, high = QuantizationScheme(bits=bits, symmetric=symmetric, granularity="channel").code_range
    codes = torch.randint(low, high + 1, (3, length), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.int8 if symmetric else torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape[-1] == ((length + 1) // 2 if bits <= 4 else length)
    assert torch.equal(unpack_codes(packed, bits, symmetric, length), codes)


def test_weights_on_the_host_are_packed_and_come_back_as_they_were() -> None:
    """Integers of odd length with outliers, of 8 bits, and what is no integer."""
    scheme = QuantizationScheme(bits=4, granularity="channel")
    codes, scale = torch.randint(-8, 8, (5, 7), dtype=torch.int8), QParams(torch.rand(5, 1))
    split = QuantizedWeight(codes, scale, scheme, torch.arange(9), torch.rand(5, 2))
    wide = QuantizedWeight(codes, scale, QuantizationScheme(bits=8, granularity="channel"))
    table = CodebookWeight(torch.randint(0, 4, (5, 8), dtype=torch.uint8), torch.rand(5, 2, 4))
    kept, given = HostWeights(), {"split": split, "wide": wide, "table": table}
    kept.update(given)
    assert kept.packed["split"].codes.shape == (5, 4)
    assert kept.shapes == {"split": (5, 9), "wide": (5, 7), "table": (5, 8)}
    stored, expected = all_weight_tensors(kept), all_weight_tensors(given)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())
    for name, weight in given.items():
        assert torch.equal(kept[name].dequantize(torch.float32), weight.dequantize(torch.float32))
    assert stored["split.codes"].data_ptr() == kept.packed["split"].codes.data_ptr()


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "model"
    save_quantized(folder, build(RECIPES["atom"]), source={"checkpoint": "tiny"})
    return folder


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


def edit_tensors(folder: Path, change: object) -> None:
    tensors = load_file(folder / "quantized.safetensors")
    change(tensors)
    save_file(tensors, folder / "quantized.safetensors")
    reseal(folder / "rotquant.json")  # else the file itself would be found to be another


def truncate(folder: Path) -> None:
    path = folder / "quantized.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip(folder: Path) -> None:
    """One bit in the last tensor."""
    path = folder / "quantized.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def of_version_2(folder: Path, digests: bool) -> None:
    """As folders were written before their manifest covered more than tensors."""
    path = folder / "rotquant.json"
    content = json.loads(path.read_text()) | {"format_version": 2}
    name = "quantized.safetensors"
    del content["digest"]
    path.write_text(json.dumps(content | {"digests": {name: content["digests"][name]} if digests else {}}))


def test_a_folder_of_before_all_was_covered_loads_with_a_note(folder: Path) -> None:
    expected = load_quantized(folder)[0].state_dict()
    of_version_2(folder, digests=True)
    with pytest.warns(UserWarning, match="written by an older rotquant: of its content the tensors, not recipe"):
        loaded = load_quantized(folder)[0].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_a_folder_whose_tensors_cannot_be_checked_is_refused(folder: Path) -> None:
    of_version_2(folder, digests=False)
    with pytest.raises(ResultError, match="has no digests of the tensors"):
        load_quantized(folder)


@pytest.mark.parametrize("name", ["atom", "asymmetric-3-bit", "per-tensor"])
def test_a_model_loads_alike_in_blocks_and_threads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = build(RECIPES[name])
    save_quantized(tmp_path / "model", stored)
    monkeypatch.setattr("rotquant.tensors.devices._BLOCK", 200)  # two or three rows of the tiny model
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        loaded = load_quantized(tmp_path / "model")[0].state_dict()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    expected = stored.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_what_damage_does_is_not_reported_before_the_damage(folder: Path) -> None:
    path = folder / "quantized.safetensors"
    data = bytearray(path.read_bytes())
    data[-64:] = b"\xff" * 64  # no numbers
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="it is not the file that was written"):
        load_quantized(folder)


UP = "model.layers.0.mlp.up_proj.weight"


def without_scheme(folder: Path) -> None:
    recipe = json.loads((folder / "rotquant.json").read_text())["recipe"]
    reseal(folder / "rotquant.json", recipe=recipe | {"weights": None, "methods": {}})


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (lambda f: (f / "rotquant.json").unlink(), ResultError, "manifest .* does not exist"),
        (lambda f: (f / "rotquant.json").write_text('{"format'), ResultError, "manifest .* is damaged"),
        (
            lambda f: reseal(f / "rotquant.json", format_version=7),
            ResultError,
            "has format version 7, this rotquant reads 3",
        ),
        (lambda f: reseal(f / "rotquant.json", seed="red"), ResultError, r"manifest .* is damaged \(seed"),
        (lambda f: reseal(f / "rotquant.json", quantized={}), CheckpointError, "it lacks"),
        (without_scheme, ResultError, "weights are quantized, and the recipe has no weights section"),
        (truncate, CheckpointError, "is truncated or damaged"),
        (
            flip,
            CheckpointError,
            r"quantized\.safetensors is damaged or was changed: it is not the file that was written",
        ),
        (lambda f: edit_tensors(f, lambda t: t.pop(f"{UP}.codes")), CheckpointError, "up_proj.weight.codes is missing"),
        (lambda f: edit_tensors(f, lambda t: t.pop(f"{UP}.scale")), CheckpointError, "up_proj.weight.scale is missing"),
        (
            lambda f: edit_tensors(f, lambda t: t.update({f"{UP}.codes": t[f"{UP}.codes"][:-1].clone()})),
            CheckpointError,
            r"up_proj.weight.codes has shape \[95, 28\], expected",
        ),
        (
            lambda f: edit_tensors(f, lambda t: t.pop("rotquant.methods.outliers.1.mlp_output")),
            CheckpointError,
            "rotquant.methods.outliers.1.mlp_output is missing",
        ),
        (
            lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
            CheckpointError,
            "it lacks model.norm.weight",
        ),
        (
            lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
            CheckpointError,
            r"model.norm.weight has shape \[3\], expected \[64\]",
        ),
        (lambda f: (f / "quantized.safetensors").unlink(), CheckpointError, "quantized.safetensors is not there"),
        (lambda f: (f / "tokenizer.json").unlink(), CheckpointError, "is incomplete: tokenizer.json is not there"),
        (lambda f: (f / "config.json").write_text("{"), CheckpointError, "config.json is damaged"),
    ],
)
def test_a_damaged_folder_is_one_sentence(folder: Path, damage: object, error: type[Exception], sentence: str) -> None:
    damage(folder)
    with pytest.raises(error, match=sentence) as caught:
        load_quantized(folder)
    assert "\n" not in str(caught.value)


def test_the_manifest_says_how_the_weights_were_made(good_folder: Path) -> None:
    manifest = read_manifest(good_folder)
    assert manifest.source == {"checkpoint": "tiny"}
    assert manifest.seconds.keys() == {"outlier features", "GPTQ"}
    assert manifest.quantized[UP] == (96, 64)
    assert manifest.versions["torch"] == metadata.version("torch")
    assert kind_of(good_folder) == "quantized"


def test_a_manifest_is_what_its_file_says_and_does_not_run_a_model(good_folder: Path) -> None:
    manifest = read_manifest(good_folder)
    assert manifest.model_dump(mode="json") == json.loads((good_folder / "rotquant.json").read_text())
    model, _, state = load_quantized(good_folder)
    assert state.manifest == manifest
    with pytest.raises(AttributeError, match="static"):  # without the outlier features another function would run
        quantized_forward(model, manifest.recipe, manifest)


def test_transformers_refuses_the_folder_instead_of_inventing_weights(good_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(good_folder)
    with pytest.raises(CheckpointError, match="load it with load_quantized"):
        load_checkpoint(good_folder, torch.float32)


def test_large_models_are_stored_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotquant.models.integrity.LARGEST_SHARD", "30KB")
    stored = build(ROTATED_GPTQ)
    save_quantized(tmp_path / "model", stored)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    model, _, _ = load_quantized(tmp_path / "model")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.model.state_dict().items())


def test_an_interrupted_save_leaves_the_earlier_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = build(ROTATED_GPTQ)

    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", disk_full)
    with pytest.raises(ResultError, match="No space left"):
        save_quantized(folder, stored)
    assert load_quantized(folder)[2].recipe == RECIPES["atom"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
