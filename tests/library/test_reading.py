"""Checkpoints of compressed-tensors by other libraries are read as that library runs them, or refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rotquant import api
from rotquant.formats import reading
from rotquant.formats.compressed import packed_weight
from rotquant.formats.reading import foreign_recipe
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.metrics.perplexity import perplexity
from rotquant.recipes.presets import preset
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.quantization import fake_quantize, quantize
from rotquant.text import Tokens
from rotquant.weights.rtn import QuantizedWeight, choose_weight_qparams
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model, tiny_tokens
from tests.library.test_serving import declared, logits

GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": True}
ROWS = {"num_bits": 8, "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
INPUT = {"targets": ["re:.*down_proj$"], "location": "input"}
PART = {"targets": ["re:.*v_proj$"], "location": "input"}
FLOAT = {"num_bits": 4, "type": "float", "symmetric": True}
MXFP4 = {**FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4 = {**FLOAT, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
ASYMMETRIC = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}


def by_the_library(
    folder: Path,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    packing: str,
    transforms: dict[str, Any] | None = None,
    family: str = "llama",
) -> torch.Tensor:
    """Write a checkpoint as llm-compressor does, transformed, rounded, compressed and saved by the library's own code.

    Returns:
        Logits of the model before it was compressed, which has its quantizers and transforms.
    """
    library = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    model = tiny_model(family)
    if transforms is not None:
        transform = pytest.importorskip("compressed_tensors.transform")
        transform.apply_transform_config(model, transform.TransformConfig(config_groups=transforms))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": packing}
    config = library.QuantizationConfig(
        config_groups={"group_0": group}, ignore=["lm_head"], format=packing, quantization_status="frozen"
    )
    library.apply_quantization_config(model, config)
    for module in model.modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is not None:
            grouped = module.weight.unflatten(-1, (-1, args.group_size or module.weight.shape[-1]))
            whole = getattr(module, "weight_global_scale", None)
            if whole is not None:
                whole.data.copy_(utils.generate_gparam(module.weight.min(), module.weight.max()))
                module.input_global_scale.data.fill_(448.0)
            scale, zero_point = utils.calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=whole)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero_point)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.04)
    theirs = logits(model, use_cache=False)
    compressor = compressors.ModelCompressor.from_pretrained_model(model, quantization_format=packing)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    tiny_tokenizer().save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("weights", "inputs", "packing"),
    [
        (GROUPS, None, "pack-quantized"),
        (ASYMMETRIC, None, "pack-quantized"),
        (ROWS, TOKEN, "int-quantized"),
        (ROWS | {"type": "float"}, TOKEN | {"type": "float"}, "float-quantized"),
        (GROUPS, TOKEN | {"symmetric": False}, "pack-quantized"),
        (ROWS, STATIC, "int-quantized"),
    ],
)
def test_a_file_of_others_has_the_logits_that_transformers_has(
    weights: dict[str, Any], inputs: dict[str, Any] | None, packing: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    by_the_library(folder, weights, inputs, packing)
    assert declared(folder)["quant_method"] == "compressed-tensors"
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = api.load(folder)
    difference = (logits(ours.network, use_cache=False) - logits(theirs, use_cache=False)).abs().max()
    if inputs is None:
        assert difference == 0
        text = Tokens(tiny_tokens(1, 200)[0])
        metric = Perplexity(sequence_length=32)
        assert perplexity(ours.network, text, metric) == perplexity(theirs, text, metric)
    # Inputs are equal (below) but for last bits of what layers before gave, which may move one to the next INT8 code:
    # as much as all of the rounding to INT8, which moves these logits, of size 3, by up to 0.07.
    assert difference < 0.1


def quip(kind: str, places: tuple[str, str], inverse: bool, **more: Any) -> dict[str, Any]:
    """A transform of the inputs or the outputs of all linear layers, as llm-compressor's QuIPModifier has it."""
    online, fused = places
    apply = [
        {"targets": ["Linear"], "location": place, "inverse": (place == online) == inverse, "ignore": ["lm_head"]}
        for place in (fused, online)
    ]
    return {"type": kind, "apply": apply, "precision": "torch.float64", **more}


INPUTS, OUTPUTS = ("input", "weight_input"), ("output", "weight_output")


@pytest.mark.parametrize("inputs", [None, TOKEN])
@pytest.mark.parametrize(
    "transforms",
    [
        {"v": quip("random-hadamard", INPUTS, False), "u": quip("random-hadamard", OUTPUTS, True)},
        {"v": quip("hadamard", INPUTS, False, head_dim=16)},
        {"R4": {"type": "random-hadamard", "apply": [INPUT, INPUT | {"location": "weight_input", "inverse": True}]}},
    ],
)
def test_transforms_of_others_act_as_the_library_runs_them(
    transforms: dict[str, Any], inputs: dict[str, Any] | None, tmp_path: Path
) -> None:
    theirs = by_the_library(tmp_path / "theirs", GROUPS, inputs, "pack-quantized", transforms, "qwen2")
    ours = logits(api.load(tmp_path / "theirs").network, use_cache=False)
    # Outputs' transforms are multiplied into the weights, which moves last bits; with quantized inputs these may move
    # one to the next INT8 code, as above.
    assert (ours - theirs).abs().max() < (1e-4 if inputs is None else 0.1)
    without = json.loads((tmp_path / "theirs/config.json").read_text())
    without["quantization_config"]["transform_config"] = {}
    (tmp_path / "theirs/config.json").write_text(json.dumps(without))
    with pytest.raises(CheckpointError, match="weight"):  # nothing says what the stored matrices are for
        api.load(tmp_path / "theirs")


def test_linear_layers_that_read_one_input_share_its_static_scale(tmp_path: Path) -> None:
    by_the_library(tmp_path / "theirs", ROWS, STATIC, "int-quantized")
    tensors = load_file(tmp_path / "theirs/model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.input_scale"] *= 2
    save_file(tensors, tmp_path / "theirs/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no static scale of model\.layers\.1\.self_attn\.q_proj\.input"):
        api.load(tmp_path / "theirs")


@pytest.mark.parametrize(("weights", "dynamic"), [(MXFP4, True), (NVFP4, "local")])
def test_a_file_of_4_bit_floats_has_the_logits_from_before_it_was_packed(
    weights: dict[str, Any], dynamic: bool | str, tmp_path: Path
) -> None:
    """transformers itself makes bfloat16 weights of them, which a float32 model cannot multiply."""
    kind = "mxfp4" if weights is MXFP4 else "nvfp4"
    theirs = by_the_library(tmp_path, weights, weights | {"dynamic": dynamic}, f"{kind}-pack-quantized")
    assert torch.equal(logits(api.load(tmp_path).network, use_cache=False), theirs)


@pytest.mark.parametrize("kind", [{"num_bits": 4}, {"num_bits": 8}, {"num_bits": 8, "type": "float"}])
def test_symmetric_dynamic_inputs_are_the_librarys(kind: dict[str, Any]) -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    library = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    args = library.QuantizationArgs(**TOKEN | kind)
    group = {"targets": ["Linear"], "input_activations": args.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    scheme = foreign_recipe(reading.declared(config, "test"), "test").activations
    assert scheme is not None
    x = torch.randn(4, 50, 64, generator=torch.Generator().manual_seed(0))
    theirs = forward.fake_quantize(x, *utils.compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(64, 64)), args)
    assert torch.equal(fake_quantize(x, scheme), theirs)


def test_codes_and_scales_of_fp8_weights_are_the_librarys() -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    args, scheme = library.preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]), preset("fp8").rounded.scheme
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 96, generator=generator) * torch.exp(3 * torch.randn(24, 96, generator=generator))
    scale, _ = utils.calculate_qparams(weight.amin(1, True), weight.amax(1, True), args.weights)
    compressor = compressors.BaseCompressor.get_value_from_registry("float-quantized")
    theirs = compressor.compress({"weight": weight, "weight_scale": scale}, args)
    qparams = choose_weight_qparams(weight, scheme, None)
    rounded = QuantizedWeight(quantize(weight, qparams, scheme), qparams, scheme)
    ours = packed_weight("layer.weight", rounded, packed=False)
    assert torch.equal(ours["layer.weight_scale"], theirs["weight_scale"])
    assert torch.equal(ours["layer.weight"].view(torch.uint8), theirs["weight"].view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"transform_config": {"config_groups": {"R5": {"type": "hadamard", "apply": [PART]}}}}, "a transform R5"),
        ({"transform_config": {"config_groups": {"R4": {"type": "random-hadamard", "apply": [INPUT]}}}}, "no matrix"),
        ({"format": "naive-quantized"}, "format naive-quantized"),
        ({"format": "float-quantized"}, "weights that are not read here"),
        ({"weights": GROUPS | {"type": "float"}}, "weights that are not read here"),
        ({"weights": GROUPS | {"type": "int", "actorder": "group"}}, r"config_groups\.group_0\.weights\.actorder"),
        ({"input_activations": TOKEN | {"type": "float", "num_bits": 4}}, "input_activations is not read here"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "kv_cache_scheme is not read"),
        ({"weights": GROUPS | {"num_bits": "four"}}, "num_bits"),
        ({"config_groups": {"a": {"targets": ["Linear"]}, "b": {"targets": ["Linear"]}}}, "2 config groups"),
    ],
)
def test_what_is_not_read_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    by_the_library(folder, GROUPS, None, "pack-quantized")
    content = json.loads((folder / "config.json").read_text())
    group = content["quantization_config"]["config_groups"]["group_0"]
    group |= {name: value for name, value in changes.items() if name in ("format", *group)}
    content["quantization_config"] |= {name: value for name, value in changes.items() if name not in group}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=sentence):
        api.load(folder)


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    with pytest.raises(RecipeError, match=r"pip install 'rotquant\[serve\]'"):
        reading.declared({"config_groups": {}}, "test")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight_packed", torch.Tensor.long),
        ("weight_shape", lambda _: None),
        ("weight_shape", lambda shape: shape[:1]),
        ("weight_scale", lambda scale: scale[:3]),
        ("weight_zero_point", torch.Tensor.float),
    ],
)
def test_parts_of_a_weight_that_do_not_fit_are_a_sentence(part: str, change: Any, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    by_the_library(folder, ASYMMETRIC, None, "pack-quantized")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.down_proj.{part}"
    tensors[name] = change(tensors[name])
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the parts of model\.layers\.0\.mlp\.down_proj\.weight do not fit"):
        api.load(folder)
