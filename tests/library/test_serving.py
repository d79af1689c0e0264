"""Exports to compressed-tensors: transformers runs them with this project's logits, or does not load them at all.

Equal means to the last bit where the same code computes, that is by `rotquant.serving` and wherever weights alone
count. compressed-tensors' own transforms are products with dense matrices, not fast ones: float32 sums of up to 112
terms in another order, after which an input may round to the next of its codes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, pipeline
from transformers.quantizers import auto

import rotquant.serving  # noqa: F401 - registers the quantization method
from rotquant import api
from rotquant.formats import export
from rotquant.formats.export import export_compressed
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.models import integrity
from rotquant.models.architectures import architecture_of
from rotquant.models.rotation.matrices import initial_rotations
from rotquant.recipes.presets import all_presets
from rotquant.recipes.recipe import Recipe
from rotquant.weights.build import build_weights
from rotquant.weights.storage import save_quantized
from tests.helpers.cases import one_in, one_of_each
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.families import SAMPLES, method
from tests.helpers.models import outlier_model, tiny_model, tiny_tokens

TOKENS = tiny_tokens(2, 20)
OFF = {"heads": False, "keys": False, "mlp": False}
ROTATIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "R1R2": OFF | {"values": "random_hadamard"},
    "R1R2R4": OFF | {"mlp": True},
    "inputs": OFF | {"residual": "none", "inputs": "orthogonal"},
    "fast inputs": OFF | {"residual": "none", "inputs": "hadamard"},
    "R1toR4": OFF | {"mlp": True, "keys": True},
    "R3 in blocks": OFF | {"keys": 8},
    "quarot": {},
}
TOKEN = {"bits": 4, "granularity": "token"}
HEAD = {"bits": 4, "symmetric": False, "granularity": "head"}
WEIGHTS = {"scheme": {"bits": 4, "granularity": "channel"}, "clip_search": False}
QUANTIZERS: dict[str, dict[str, Any]] = {
    "W4A16": {"weights": WEIGHTS},
    "W4A16g": {"weights": {**WEIGHTS, "scheme": {"bits": 4, "granularity": "group", "group_size": 16}}},
    "W4A16 full": {
        "weights": {"scheme": {"bits": 4, "granularity": "group", "group_size": 16, "scale": "full"}},
        "methods": {"gptq": {"act_order": True, "group_scales": "static"}},
        "calibration": {},
    },
    "W3A16": {"weights": {**WEIGHTS, "scheme": {"bits": 3, "granularity": "tensor"}}},
    "W2A16g": {
        "weights": {**WEIGHTS, "scheme": {"bits": 2, "symmetric": False, "granularity": "group", "group_size": 16}}
    },
    "W4A4": {"weights": WEIGHTS, "activations": TOKEN},
    "W4A8": {"weights": WEIGHTS, "activations": TOKEN | {"bits": 8}},
    "W4A4KV4": {"weights": WEIGHTS, "activations": TOKEN, "keys": HEAD, "values": HEAD},
    "FP8": {
        "weights": {**WEIGHTS, "scheme": {"bits": 8, "type": "float", "granularity": "channel"}},
        "activations": {"bits": 8, "type": "float"},
    },
    "FP8 static": {
        "weights": {**WEIGHTS, "scheme": {"bits": 8, "type": "float", "granularity": "tensor"}},
        "activations": {"bits": 8, "type": "float", "granularity": "tensor", "dynamic": False},
        "calibration": {},
    },
    "W8A8": {
        "weights": {**WEIGHTS, "scheme": {"bits": 8, "granularity": "channel"}},
        "activations": TOKEN | {"bits": 8},
    },
}
#: 28 * 4 features of the MLP, 172 of them: widths whose Hadamard matrices are not Sylvester's.
SIZES: dict[str, dict[str, Any]] = {"power": {"intermediate_size": 128}, "28": {"intermediate_size": 112}}
SIZES["172"] = {"intermediate_size": 172}


def recipe_of(rotation: str, quantizers: str) -> Recipe:
    return Recipe.model_validate({"rotation": ROTATIONS[rotation], **QUANTIZERS[quantizers]})


def quantized(folder: Path, recipe: Recipe, family: str = "llama", **sizes: Any) -> Path:
    model, samples = tiny_model(family, **sizes), SAMPLES if recipe.needs_calibration else None
    save_quantized(folder, build_weights(model, tiny_tokenizer(), recipe, 0, samples, progress=False))
    return folder


@torch.no_grad()
def logits(model: Any, **arguments: Any) -> torch.Tensor:
    return model(TOKENS, **arguments).logits


def declared(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


CASES = [
    ("none", "W4A16g", "llama", "power"),
    ("none", "W2A16g", "phi3", "power"),
    ("R1R2", "W4A16 full", "llama", "power"),
    ("R1R2", "W3A16", "llama", "28"),
    ("R1R2", "W4A4", "phi3", "28"),
    ("R1R2R4", "W4A16", "llama", "172"),
    ("R1R2R4", "W4A4", "phi3", "power"),
    ("R1toR4", "W4A4KV4", "llama", "28"),
    ("R1toR4", "W8A8", "qwen2", "172"),
    ("R1R2R4", "FP8", "llama", "28"),
    ("none", "FP8 static", "phi3", "power"),
    ("quarot", "W4A16", "phi3", "28"),
    ("quarot", "W4A8", "llama", "power"),
    ("quarot", "W4A4KV4", "llama", "172"),
    ("quarot", "W4A4KV4", "phi3", "28"),
]


@pytest.mark.parametrize(("rotation", "quantizers", "family", "size"), one_in(2, CASES))
def test_transformers_has_this_projects_logits(
    rotation: str, quantizers: str, family: str, size: str, tmp_path: Path
) -> None:
    folder = quantized(tmp_path / "quantized", recipe_of(rotation, quantizers), family, **SIZES[size])
    online = rotation not in ("none", "R1R2") or "A16" not in quantizers
    if not online:
        pytest.importorskip("compressed_tensors")
    assert export_compressed(folder, tmp_path / "out") == ("rotquant" if online else "compressed-tensors")
    expected = logits(api.load(folder).network, use_cache=False)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(served, use_cache=False), expected)
    assert torch.equal(logits(api.load(tmp_path / "out").network, use_cache=False), expected)


def test_without_the_package_it_is_named_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized(tmp_path / "quantized", recipe_of("none", "W4A16"))
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors.pack_quantized.helpers", None)
    monkeypatch.setattr(export, "read_quantized", lambda _: pytest.fail("the weights were read"))
    with pytest.raises(RecipeError, match=r"pip install 'rotquant\[serve\]'"):
        export_compressed(folder, tmp_path / "out")


def test_an_export_is_smaller_and_is_a_configuration_that_the_library_knows(tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    transform = pytest.importorskip("compressed_tensors.transform")
    folder = quantized(tmp_path / "quantized", recipe_of("quarot", "W4A4KV4"), **SIZES["28"])
    export_compressed(folder, tmp_path / "out")
    content = declared(tmp_path / "out")
    groups = transform.TransformConfig.model_validate(content["transform_config"]).config_groups
    places = {name: [(one.targets[0], one.location) for one in scheme.apply] for name, scheme in groups.items()}
    assert places == {
        "heads": [("re:.*o_proj$", "input")],
        "R4": [("re:.*down_proj$", "input")],
        "R3": [("re:.*self_attn$", "q_attn"), ("re:.*self_attn$", "k_cache")],
    }
    known = {name: content[name] for name in library.QuantizationConfig.model_fields if name in content}
    scheme = library.QuantizationConfig.model_validate(known).config_groups["group_0"]
    assert (scheme.weights.num_bits, scheme.input_activations.num_bits) == (4, 4)
    with safe_open(tmp_path / "out" / "rotquant.safetensors", framework="pt") as file:
        assert file.get_tensor("model.layers.0.mlp.down_proj.weight_packed").dtype == torch.int32


def test_transformers_alone_does_not_load_what_acts_at_run_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized(tmp_path / "quantized", recipe_of("R1R2R4", "W4A16"))
    export_compressed(folder, tmp_path / "out")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "rotquant")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "rotquant")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "import rotquant.serving" in declared(tmp_path / "out")["runs_with"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """QuaRot's W4A4KV4 as transformers reads it, next to the folder that it was made from."""
    place = tmp_path_factory.mktemp("served")
    quantized(place / "quantized", recipe_of("quarot", "W4A4KV4"))
    export_compressed(place / "quantized", place / "out")
    return place / "out"


def test_generate_and_pipelines_write_what_this_project_writes(served: Path) -> None:
    ours = api.load(served.parent / "quantized")
    model = AutoModelForCausalLM.from_pretrained(served)
    expected = ours.network.generate(TOKENS, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=8, do_sample=False), expected)
    same = [
        pipeline("text-generation", model=model, tokenizer=ours.tokenizer)("w5 w6", max_new_tokens=4, do_sample=False)
        for model in (AutoModelForCausalLM.from_pretrained(served), ours.network)
    ]
    assert same[0] == same[1]
    assert pipeline("text-generation", model=str(served))("w5 w6", max_new_tokens=4, do_sample=False) == same[0]


def test_another_type_of_the_model_is_what_it_is_here(served: Path) -> None:
    ours = api.load(served.parent / "quantized", dtype=torch.bfloat16).network
    theirs = AutoModelForCausalLM.from_pretrained(served, dtype=torch.bfloat16)
    assert torch.equal(logits(theirs), logits(ours))


def test_lm_eval_reads_an_export(served: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    ours = api.load(served.parent / "quantized")
    request = Instance("loglikelihood", {}, ("w5 w6 w7", " w8 w9"), 0)
    same = [HFLM(pretrained=model, tokenizer=ours.tokenizer, device="cpu") for model in (str(served), ours.network)]
    assert same[0].loglikelihood([request]) == same[1].loglikelihood([request])


def test_a_loaded_export_is_not_saved_as_something_else(served: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        AutoModelForCausalLM.from_pretrained(served).save_pretrained(tmp_path / "again")


REFUSED = {
    "quip-sharp": "lattice",
    "qoq": "reordered columns",
    "int4-per-token-head": "no weights",
    "oscar": "no weights",
}
REFUSED |= dict.fromkeys(("quik", "atom-128g", "resq"), "outlier features")
REFUSED |= dict.fromkeys(("qift", "rcp", "bitdistiller", "bitdistiller-rotated"), "codebook")
#: Presets whose quantizers of inputs all engines have, and those of which nothing acts at run time. The others clip
#: inputs or quantize the KV cache.
FLOATS, BLOCKS = ("fp8", "fp8-static", "mxfp4", "nvfp4"), ("mr-gptq", "wush")
WEIGHTS_ALONE = ("awq", "awq-128g", "efficientqat", "gptq-w4a16", "quarot-w4a16", "quarot-w4a16-tuned")


@pytest.mark.parametrize("name", one_of_each([name for name in all_presets() if name != "baseline"], FLOATS + BLOCKS))
def test_every_preset_is_exported_with_its_run_time_part_or_refused(name: str, tmp_path: Path) -> None:
    recipe, model = method(name), outlier_model()
    learned = initial_rotations(architecture_of(model), recipe.rotation, seed=7) if recipe.learner else None
    texts = dict.fromkeys(recipe.own_texts, SAMPLES)
    built = build_weights(model, tiny_tokenizer(), recipe, 3, SAMPLES, texts=texts, progress=False, rotations=learned)
    save_quantized(tmp_path / "quantized", built)
    if name in REFUSED:
        with pytest.raises(RecipeError, match=rf"{REFUSED[name]}.*(compressed-tensors|plain)"):
            export_compressed(tmp_path / "quantized", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    export_compressed(tmp_path / "quantized", tmp_path / "out")
    for engine in ("vllm", "any"):
        if name in FLOATS or (name in BLOCKS and engine == "vllm"):
            export_compressed(tmp_path / "quantized", tmp_path / engine, engine)
            continue
        if name not in WEIGHTS_ALONE:
            with pytest.raises(RecipeError, match=r"vLLM 0\.33|transformers"):
                export_compressed(tmp_path / "quantized", tmp_path / engine, engine)
            continue
        export_compressed(tmp_path / "quantized", tmp_path / engine, engine)
        assert declared(tmp_path / engine) == declared(tmp_path / "out")
    if declared(tmp_path / "out")["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    expected = logits(api.load(tmp_path / "quantized").network, use_cache=False)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), use_cache=False), expected)


CACHE_AND_INPUTS = dict.fromkeys(("activations", "keys", "values"))


def test_only_what_acts_at_run_time_may_change(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "quantized", recipe_of("R1R2", "W4A4KV4"))
    pytest.importorskip("compressed_tensors")
    assert export_compressed(folder, tmp_path / "out", "any", CACHE_AND_INPUTS) == "compressed-tensors"
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(served), logits(api.load(folder, recipe_of("R1R2", "W4A16")).network))
    with pytest.raises(RecipeError, match="only what acts at run time can change"):
        export_compressed(folder, tmp_path / "other", "any", {"rotation": None})
    with pytest.raises(RecipeError, match=r"activations\.bits"):
        export_compressed(folder, tmp_path / "other", "any", {"activations": {"bits": 99}})
    with pytest.raises(ResultError, match="not empty"):
        export_compressed(folder, tmp_path / "out", "any", CACHE_AND_INPUTS)


def test_the_learned_rotations_of_an_export_need_no_quantizers_to_be_learned_for(tmp_path: Path) -> None:
    recipe, model = method("spinquant-hard"), tiny_model()
    rotations = initial_rotations(architecture_of(model), recipe.rotation, seed=7)
    built = build_weights(model, tiny_tokenizer(), recipe, 3, SAMPLES, progress=False, rotations=rotations)
    save_quantized(tmp_path / "quantized", built)
    changes = {**CACHE_AND_INPUTS, "attention_output": None, "keys": {"bits": 8}}
    assert export_compressed(tmp_path / "quantized", tmp_path / "out", changes=changes) == "rotquant"
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = api.load(tmp_path / "quantized").network
    own = api.load(tmp_path / "out")
    assert own.recipe.activations is None
    assert own.recipe.keys is not None
    assert own.recipe.keys.bits == 8
    assert own.recipe.methods == recipe.methods
    assert torch.equal(logits(served, use_cache=False), logits(own.network, use_cache=False))
    assert not torch.equal(logits(served, use_cache=False), logits(ours, use_cache=False))


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_weights_may_lie_in_several_files(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path / "quantized", recipe_of("R1R2R4", "W4A16"), **SIZES["28"])
    monkeypatch.setattr(integrity, "LARGEST_SHARD", 40_000)
    export_compressed(folder, tmp_path / "out", engine)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = logits(api.load(folder).network, use_cache=False)
    read = logits(api.load(tmp_path / "out").network, use_cache=False)
    if engine == "vllm":  # by the stored matrix of 112 features, in place of the fast transform
        assert (read - expected).abs().max() < 2e-5
        return
    assert torch.equal(read, expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), use_cache=False), expected)
