"""Exports for vLLM follow the rules of vLLM 0.33.0, and mean to compressed-tensors what they mean here.

vLLM itself is not run: `RULES` says in our words what its compressed_tensors.py, its schemes and its transforms ask
for, and each exported configuration is held against them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rotquant import api
from rotquant.formats import compressed
from rotquant.formats.engines import check_engine
from rotquant.formats.export import check_compressed, export_compressed
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of
from rotquant.models.simulation.runtime import RuntimeQuantization
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.transforms import Transform
from rotquant.weights.build import build_weights
from rotquant.weights.storage import save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.families import method
from tests.helpers.models import tiny_model, tiny_tokens
from tests.library.test_serving import QUANTIZERS, declared, logits, quantized, recipe_of

Args = dict[str, Any]
#: FlatQuant's transforms with 4-bit weights alone.
WEIGHTS_OF_FLATQUANT = override(
    method("flatquant"), {"activations": None, "keys": None, "values": None, "rotation": {"keys": False}}, "test"
)


def _fp8(weights: Args, inputs: Args | None) -> bool:
    return weights["type"] == "float" and bool(inputs) and inputs["type"] == "float" and _w8a8(weights, inputs)


def _rows_or_groups(weights: Args) -> bool:
    return weights["type"] == "int" and weights["strategy"] in ("channel", "group") and not weights["dynamic"]


def _dynamic_by_token(inputs: Args | None, bits: int, *strategies: str) -> bool:
    return bool(inputs) and inputs["num_bits"] == bits and inputs["strategy"] in strategies and inputs["dynamic"]


def _humming(bits: int) -> Callable[[Args, Args | None], bool]:
    def fits(weights: Args, inputs: Args | None) -> bool:
        by_token = _dynamic_by_token(inputs, bits, "token", "group")
        return by_token and inputs["symmetric"] and _rows_or_groups(weights) and 2 <= weights["num_bits"] <= 8

    return fits


def _w8a8(weights: Args, inputs: Args | None) -> bool:
    by_row = weights["num_bits"] == 8 and weights["strategy"] in ("tensor", "channel") and weights["symmetric"]
    static = bool(inputs) and inputs["num_bits"] == 8 and inputs["strategy"] == "tensor" and not inputs["dynamic"]
    return by_row and (static or _dynamic_by_token(inputs, 8, "token"))


#: vLLM 0.33.0, in the order in which it asks: its scheme, the format that this needs, and what weights and inputs fit.
RULES: list[tuple[str, str, Callable[[Args, Args | None], bool]]] = [
    ("WNA8Int (Humming)", "pack-quantized", _humming(8)),
    ("WNA4Int (Humming)", "pack-quantized", _humming(4)),
    ("WNA16", "pack-quantized", lambda w, i: i is None and _rows_or_groups(w) and 2 <= w["num_bits"] <= 8),
    ("W8A8Int8", "int-quantized", _w8a8),
    ("W8A8Fp8", "float-quantized", _fp8),
]


def scheme_in_vllm(config: dict[str, Any]) -> str | None:
    """The scheme that vLLM takes for a configuration, or None where it raises."""
    assert config["kv_cache_scheme"] is None  # it reads 8-bit floats alone
    assert not config["sparsity_config"]
    for group in config["transform_config"].get("config_groups", {}).values():
        for one in group["apply"]:
            assert one["location"] in ("input", "output")  # of linear layers alone; others raise or do nothing
        blocks = group.get("head_dim", 1)
        assert group["type"] != "hadamard" or blocks & blocks - 1 == 0  # hadacore's are powers of two
    (group,) = config["config_groups"].values()
    packing, args = group["format"], (group["weights"], group["input_activations"])
    return next((name for name, kind, fits in RULES if kind == packing and fits(*args)), None)


@pytest.mark.parametrize(
    ("quantizers", "scheme"),
    [
        ("W4A16", "WNA16"),
        ("W4A16g", "WNA16"),
        ("W2A16g", "WNA16"),
        ("W3A16", "WNA16"),
        ("W4A4", "WNA4Int (Humming)"),
        ("W4A8", "WNA8Int (Humming)"),
        ("W8A8", "W8A8Int8"),
        ("FP8", "W8A8Fp8"),
    ],
)
def test_vllms_rules_give_an_export_the_scheme_that_it_means(quantizers: str, scheme: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path / "quantized", recipe_of("R1R2", quantizers))
    assert export_compressed(folder, tmp_path / "out", "vllm") == "compressed-tensors"
    assert scheme_in_vllm(declared(tmp_path / "out")) == scheme
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    types = {"W8A8Int8": torch.int8, "W8A8Fp8": torch.float8_e4m3fn}
    packed = "" if scheme in types else "_packed"
    assert tensors[f"model.layers.1.mlp.up_proj.weight{packed}"].dtype == types.get(scheme, torch.int32)
    own = api.load(folder, recipe_of("R1R2", quantizers).model_copy(update={"activations": None}))
    floats = {name: tensor for name, tensor in own.network.state_dict().items() if name.endswith("_proj.weight")}
    read = api.load(tmp_path / "out").network.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in floats.items())


#: Rotations, and how many matrices an export of two layers stores. Inputs are not rounded, so sums of up to 172 terms
#: in another order are all that differs, of float32 or float64.
TRANSFORMS: list[tuple[str | Recipe, int, torch.dtype, int, float]] = [
    ("R1R2R4", 128, torch.float32, 0, 2e-5),
    ("R1R2R4", 172, torch.float32, 1, 2e-5),
    ("quarot", 112, torch.float32, 2, 2e-5),
    ("inputs", 128, torch.float32, 4, 2e-5),
    ("fast inputs", 128, torch.float32, 0, 2e-5),
    ("inputs", 128, torch.float64, 4, 1e-9),
    (WEIGHTS_OF_FLATQUANT, 112, torch.float32, 8, 2e-5),
    (WEIGHTS_OF_FLATQUANT, 112, torch.float64, 8, 1e-9),
]


@pytest.mark.parametrize(("rotation", "size", "dtype", "matrices", "tolerance"), TRANSFORMS)
def test_the_librarys_own_transforms_give_this_projects_logits(
    rotation: str | Recipe, size: int, dtype: torch.dtype, matrices: int, tolerance: float, tmp_path: Path
) -> None:
    transform = pytest.importorskip("compressed_tensors.transform")
    recipe = recipe_of(rotation, "W4A16") if isinstance(rotation, str) else rotation
    folder = quantized(tmp_path / "quantized", recipe, intermediate_size=size, dtype=dtype)
    export_compressed(folder, tmp_path / "out", "vllm")
    config = declared(tmp_path / "out")
    assert scheme_in_vllm(config) == "WNA16"
    expected = logits(api.load(folder, dtype=dtype).network, use_cache=False)
    read = api.load(tmp_path / "out", dtype=dtype).network
    assert (logits(read, use_cache=False) - expected).abs().max() < tolerance
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):  # where vLLM reads all *.safetensors
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "out" / "transformed.safetensors").rename(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dropped = (logits(model, use_cache=False) - expected).abs().max()
    transform.apply_transform_config(model, transform.TransformConfig.model_validate(config["transform_config"]))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        stored = [name for name in file.keys() if name.endswith("_input.weight")]  # noqa: SIM118 - not a mapping
        for name in stored:
            model.get_parameter(name).data.copy_(file.get_tensor(name))  # shared by all layers
    assert len(stored) == matrices
    assert (logits(model, use_cache=False) - expected).abs().max() < tolerance
    assert dropped > 1e-2  # what transformers alone, which leaves the transforms out, is off by


def test_blocks_that_share_a_matrix_are_stored_once() -> None:
    """A Kronecker product whose left factor is the identity: `head_dim` in the format's words."""
    generator = torch.Generator().manual_seed(0)
    learned = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    blocks = Transform(name="blocks", kind="matrix", location="mlp_output", size=8, online=True, tensors=("m",))
    acting = RuntimeQuantization().with_transforms([blocks], {"m": learned})
    described = compressed.describe(
        recipe_of("none", "W4A16"), architecture_of(tiny_model()), [], "pack-quantized", acting, torch.float64
    )
    for layer, matrix in enumerate(learned):
        scheme = described.config["transform_config"]["config_groups"][f"mlp_output_{layer}"]
        assert (scheme["type"], scheme["head_dim"]) == ("random-hadamard", 8)
        found = described.matrices[f"model.layers.{layer}.mlp.down_proj.mlp_output_{layer}_input.weight"]()
        assert torch.allclose(found, 8**0.5 * matrix, rtol=1e-12)


@pytest.mark.parametrize(("quantizers", "scheme"), [("W8A8", "W8A8Int8"), ("FP8", "W8A8Fp8")])
def test_static_scales_of_inputs_are_the_librarys(quantizers: str, scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    data = {"rotation": {"heads": False, "keys": False, "mlp": False}, **QUANTIZERS[quantizers]}
    data["activations"] = {**data["activations"], "granularity": "tensor", "dynamic": False}
    recipe = Recipe.model_validate(data | {"calibration": {"samples": 2, "sequence_length": 16}})
    model, samples = tiny_model(), tiny_tokens(2, 16, seed=3)
    built = build_weights(model, tiny_tokenizer(), recipe, 0, samples, progress=False)
    save_quantized(tmp_path / "quantized", built)
    export_compressed(tmp_path / "quantized", tmp_path / "out", "any")
    assert scheme_in_vllm(declared(tmp_path / "out")) == scheme
    expected = logits(api.load(tmp_path / "quantized").network, use_cache=False)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), use_cache=False), expected)
    assert torch.equal(logits(api.load(tmp_path / "out").network, use_cache=False), expected)


CLIPPED = {"activations": {"bits": 4, "clip_ratio": 0.9}}
ASYMMETRIC = {"activations": {"bits": 4, "symmetric": False}}
GROUPS = {"weights": {"scheme": {"granularity": "group", "group_size": 20}}}
REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "W4A4KV4", {}, r"vLLM 0\.33 .*--set keys=null --set values=null"),
    ("vllm", "W4A4", CLIPPED, r"clipped to 0\.9 .*vLLM 0\.33"),
    ("vllm", "W4A4", ASYMMETRIC, r"asymmetric INT4 by token .*vLLM 0\.33"),
    ("any", "W4A16", {"rotation": {"mlp": True}}, r"R4 .*transformers without rotquant drops .*rotation\.mlp=false"),
    ("tgi", "W4A16", {}, r"no engine is called 'tgi': choose transformers, vllm, any"),
    ("any", "W4A16", GROUPS, r"groups of 20 .*compressed-"),
]


@pytest.mark.parametrize(("engine", "quantizers", "changes", "sentence"), REFUSALS)
def test_what_an_engine_cannot_say_is_refused_before_weights_are_read(
    engine: str, quantizers: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    recipe = override(recipe_of("R1R2", quantizers), changes, "test")
    folder = quantized(tmp_path / "quantized", recipe)
    (folder / "quantized.safetensors").write_bytes(b"damaged" * 10_000)
    with pytest.raises(RecipeError, match=sentence):
        export_compressed(folder, tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("engine", "name", "sentence"),
    [
        ("vllm", "flatquant", r"clipped to a learned share, .*vLLM 0\.33 cannot say: .*--set activations=null"),
        ("any", "flatquant", r"flatquant transforms what layers read .*transformers without rotquant drops"),
        ("vllm", "cushioncache", r"cushioncache puts a prefix .*vLLM 0\.33 cannot do"),
        ("vllm", "duquant", r"duquant transforms what layers read .*vLLM 0\.33 cannot do"),
    ],
)
def test_methods_that_an_engine_cannot_run_are_refused(engine: str, name: str, sentence: str) -> None:
    recipe = override(method(name), {"keys": None, "values": None}, "test")
    with pytest.raises(RecipeError, match=sentence):
        check_engine(recipe, architecture_of(tiny_model()), engine)


def test_a_bias_next_to_a_transform_is_refused_for_vllm(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"q_proj\.bias .*vLLM 0\.33"):  # a learned one, before there are weights
        check_compressed(WEIGHTS_OF_FLATQUANT, tiny_model("qwen2").config, "vllm")
    folder = quantized(tmp_path / "quantized", recipe_of("R1R2R4", "W4A16"), mlp_bias=True)
    with pytest.raises(RecipeError, match=r"down_proj\.bias .*vLLM 0\.33"):
        export_compressed(folder, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("quantizers", "warned"), [("W4A8", True), ("W8A8", False)])
def test_the_export_says_that_vllm_was_seen_to_drop_the_quantization_of_inputs(
    quantizers: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(quantized(tmp_path / "quantized", recipe_of("R1R2", quantizers)))
    words = ["export", folder, "-o", str(tmp_path / "out"), "--format", "compressed-tensors", "--for", "vllm"]
    assert rotquant(monkeypatch, *words) == 0
    assert ("without quantizing their inputs" in capsys.readouterr().out) == warned
