"""4-bit floats: codes and scales are those of compressed-tensors, and what has no meaning is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotquant import api
from rotquant.formats.export import export_compressed
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of
from rotquant.models.fitting import check_transforms
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors import fp4
from rotquant.tensors.quantization import QParams, choose_qparams, dequantize, fake_quantize, quantize
from rotquant.weights.bits import bits_per_weight
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.clipping import choose_weight_qparams
from rotquant.weights.packing import pack_codes
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.bounds import FLOAT64_BOUND
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.invariance import invariance_error
from tests.helpers.models import tiny_model, tiny_tokens
from tests.library.test_serving import logits

SIZES = {"MXFP4": 32, "NVFP4": 16}
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def scheme_of(kind: str, **changes: Any) -> QuantizationScheme:
    data = {"bits": 4, "type": "float", "granularity": "group", "group_size": SIZES[kind], **changes}
    return QuantizationScheme.model_validate(data)


def values(case: str) -> Tensor:
    """[rows, 96] of many sizes."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ()).item()))
    x = torch.randn(24, 96, generator=generator) * torch.exp(3 * torch.randn(24, 96, generator=generator))
    ties = torch.randint(-24, 25, (24, 96), generator=generator) / 4
    ties[:, ::16] = 6.0
    scales = {"usual": 1.0, "subnormal": 1e-42, "tiny": 1e-36, "huge": 1e34}
    x = x.clamp(-2e4, 2e4) * scales[case] if case in scales else ties if case == "ties" else torch.zeros_like(x)
    x[:2, :48] = 0
    return x


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("case", ["usual", "subnormal", "tiny", "huge", "ties", "zeros"])
def test_codes_and_scales_are_those_of_compressed_tensors(kind: str, case: str) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    args, x = library.preset_name_to_scheme(kind, ["Linear"]), values(case)
    groups = x.unflatten(-1, (-1, SIZES[kind]))
    whole = utils.generate_gparam(x.min(), x.max()) if kind == "NVFP4" else None
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args.weights, global_scale=whole)
    scheme = scheme_of(kind)
    qparams = choose_weight_qparams(x, scheme, None)
    assert torch.equal(qparams.scale[..., 0], scale if whole is None else scale / whole)
    theirs = forward.fake_quantize(x, scale, zero.float(), args.weights, global_scale=whole)
    assert torch.equal(fake_quantize(x, scheme, qparams), theirs)
    parts = {"weight": x, "weight_scale": scale} | ({} if whole is None else {"weight_global_scale": whole})
    name = f"{kind.lower()}-pack-quantized"
    packed = compressors.BaseCompressor.get_value_from_registry(name).compress(parts, args)
    codes = quantize(x, qparams, scheme)
    assert torch.equal(pack_codes(codes, 4), packed["weight_packed"])
    stored = fp4.pack_scales(qparams.scale, qparams.global_scale)
    assert torch.equal(stored.squeeze(-1).view(torch.uint8), packed["weight_scale"].view(torch.uint8))
    assert torch.equal(fp4.unpack_scales(stored, qparams.global_scale), qparams.scale)
    assert torch.equal(dequantize(codes, qparams, scheme, torch.float32), theirs)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_are_the_nearest_levels_and_even_ones_between(kind: str, dtype: torch.dtype) -> None:
    x, scheme = values("usual").to(dtype), scheme_of(kind)
    qparams = choose_qparams(x, scheme)
    assert qparams.scale.dtype == dtype
    ratios = (x.unflatten(-1, (-1, SIZES[kind])) / qparams.scale).abs().flatten().tolist()
    codes = quantize(x, qparams, scheme).flatten().tolist()
    for ratio, code in zip(ratios, codes, strict=True):
        distances = [abs(ratio - level) for level in LEVELS]
        best = [index for index, distance in enumerate(distances) if distance == min(distances)]
        assert code % 8 == (best[0] if len(best) == 1 else next(index for index in best if index % 2 == 0))


@pytest.mark.parametrize(("kind", "rule"), [("MXFP4", "mse"), ("NVFP4", "mse"), ("NVFP4", "four_over_six")])
def test_a_searched_scale_has_the_least_error_of_its_candidates(kind: str, rule: str) -> None:
    """The last group is ragged, and what fills it up does not count."""
    x, scheme = values("usual")[:, :56], scheme_of(kind, scale=rule)
    whole = fp4.global_scale(x.abs().amax())
    given = {"global_scale": whole} if kind == "NVFP4" else {}
    ratios = {"four_over_six": [1, 1.5], "mse": [0.7 + step / 10 for step in range(9)]}[rule]
    ratios = [0.5, 1, 2] if kind == "MXFP4" else ratios

    def errors(qparams: QParams) -> Tensor:
        squares = (fake_quantize(x, scheme_of(kind), qparams) - x).double().square()
        return torch.stack([part.sum(-1) for part in squares.split(SIZES[kind], dim=-1)], dim=-1)

    candidates = [errors(choose_qparams(x, scheme_of(kind), ratio, **given)) for ratio in ratios]
    found = errors(choose_qparams(x, scheme, **given))
    # float32 squares decide, of which equally good ones differ in the last bits
    torch.testing.assert_close(found, torch.stack(candidates).amin(0), rtol=1e-5, atol=0)


def test_dynamic_inputs_of_a_token_do_not_depend_on_others() -> None:
    x, scheme = values("usual"), scheme_of("NVFP4")
    whole = fake_quantize(x, scheme)
    assert all(torch.equal(fake_quantize(row[None], scheme)[0], found) for row, found in zip(x, whole, strict=True))


GPTQ = {"methods": {"gptq": {"group_scales": "static", "act_order": True}}, "calibration": {}}


def test_blocks_at_every_site_do_not_change_the_logits() -> None:
    blocks = RotationScheme(residual="none", inputs=16, values="none", heads=8, keys=False, mlp=4)
    assert [(one.location, one.size) for one in blocks.transforms] == [
        ("attention_input", 16),
        ("mlp_input", 16),
        ("attention_output", 8),
        ("mlp_output", 4),
    ]
    assert invariance_error(tiny_model(dtype=torch.float64), blocks, seed=3, input_ids=tiny_tokens()) <= FLOAT64_BOUND
    with pytest.raises(RecipeError, match=r"blocks of 12 of 64 features.*rotation\.heads=64"):
        check_transforms(architecture_of(tiny_model()), blocks.model_copy(update={"heads": 12}).transforms)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("changes", [{}, {**GPTQ, "weights": {"scheme": {"scale": "mse"}}}])
def test_a_stored_model_is_the_made_one_and_as_large_as_said(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    recipe, ids = override(preset(name), changes, name), tiny_tokens(2, 16, seed=3)
    model = tiny_model()
    samples = tiny_tokens(4, 16, seed=1) if recipe.needs_calibration else None
    built = build_weights(model, tiny_tokenizer(), recipe, 0, samples, progress=False)
    save_quantized(tmp_path / "q", built)
    loaded, _, state = load_quantized(tmp_path / "q")
    with torch.no_grad(), quantized_forward(model, recipe, built.state), quantized_forward(loaded, recipe, state):
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    bits = bits_per_weight(recipe, architecture_of(model), built.manifest.quantized)
    assert bits["total"] == pytest.approx(4.25 if name == "mxfp4" else 4.5, abs=0.02)
    of_layer = [built.weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert len({getattr(weight.qparams.global_scale, "item", float)() for weight in of_layer}) == 1


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_transformers_with_compressed_tensors_has_the_logits_of_an_export(name: str, tmp_path: Path) -> None:
    """The library makes bfloat16 of the weights, whatever the type of the model, which for MXFP4 is exact."""
    offload, recipe = pytest.importorskip("compressed_tensors.offload"), preset(name)
    built = build_weights(tiny_model(), tiny_tokenizer(), recipe, 0, tiny_tokens(4, 16, seed=1), progress=False)
    save_quantized(tmp_path / "q", built)
    assert export_compressed(tmp_path / "q", tmp_path / "out", "any") == "compressed-tensors"
    own, read = (api.load(tmp_path / folder).network for folder in ("q", "out"))
    assert torch.equal(logits(read, use_cache=False), logits(own, use_cache=False))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs.hf_quantizer.compressor.decompress_model(theirs)
    offload.remove_dispatch(theirs)
    torch.nn.Module.float(theirs)
    for parameter in (own.get_parameter(weight) for weight in built.weights):
        assert name != "mxfp4" or torch.equal(parameter.bfloat16().float(), parameter)
        parameter.data = parameter.data.bfloat16().float()
    assert torch.equal(logits(theirs, use_cache=False), logits(own, use_cache=False))


def test_block_transforms_are_in_an_export_for_vllm(tmp_path: Path) -> None:
    """With the library's own transforms the network is the exported one: dense matrices, hence other last bits."""
    transform = pytest.importorskip("compressed_tensors.transform")
    samples, recipe = tiny_tokens(4, 16, seed=1), preset("mr-gptq")
    save_quantized(tmp_path / "q", build_weights(tiny_model(), tiny_tokenizer(), recipe, 0, samples, progress=False))
    assert export_compressed(tmp_path / "q", tmp_path / "out", "vllm") == "compressed-tensors"
    said = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert said["format"] == "nvfp4-pack-quantized"
    groups = said["transform_config"]["config_groups"]
    assert {one["head_dim"] for one in groups.values()} == {16}
    with pytest.raises(RecipeError, match="transformers without rotquant drops them"):
        export_compressed(tmp_path / "q", tmp_path / "any", "any")
    alone = recipe.model_copy(update={"activations": None, "calibration": None, "methods": {}, "weights": None})
    rotated = build_weights(tiny_model(), tiny_tokenizer(), alone, 0, None, progress=False)
    with torch.no_grad(), quantized_forward(rotated.model, alone, rotated.state):
        expected = logits(rotated.model, use_cache=False)
    transform.apply_transform_config(rotated.model, transform.TransformConfig(config_groups=groups))
    torch.testing.assert_close(logits(rotated.model, use_cache=False), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights": {"scheme": {"group_size": 64}}}, "of 32 .MXFP4. or 16 .NVFP4."),
        ({"weights": {"scheme": {"granularity": "channel", "group_size": None}}}, "of 32 .MXFP4. or 16 .NVFP4."),
        ({"weights": {"scheme": {"scale": "four_over_six"}}}, "has no meaning for MXFP4"),
        ({"weights": {"clip_search": True}}, "scale mse: set clip_search to false"),
        ({"activations": {"dynamic": False}, "calibration": {}}, "set dynamic to true"),
        ({"activations": {"group_size": 16}}, "one group_size"),
        ({"activations": {"bits": 8, "granularity": "token", "group_size": None}}, "one group_size"),
        ({"methods": {"gptq": {}}, "calibration": {}}, "group_scales to static"),
        ({"methods": {"awq": {}}, "calibration": {}}, "awq knows integers alone"),
        ({"keys": {"bits": 4, "type": "float", "granularity": "group", "group_size": 32}}, "keys take type int"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        override(preset("mxfp4"), changes, "test")


def test_integers_have_no_rule_of_floats() -> None:
    with pytest.raises(ValueError, match="is of 4-bit floats"):
        QuantizationScheme.model_validate({"bits": 4, "scale": "mse"})
