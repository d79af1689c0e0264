"""GGUF files, read back by the package gguf: the weights that were stored, in llama.cpp's order; what has no form."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import models, pre_tokenizers

from rotquant.formats import gguf as gguf_export
from rotquant.formats.gguf import BLOCK, check_gguf, export_gguf, integers, paired_rows
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.tensors.quantization import QParams
from rotquant.weights.build import build_weights
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.storage import load_quantized, read_quantized, save_quantized
from tests.helpers.checkpoints import byte_level, tiny_tokenizer
from tests.helpers.models import tiny_model

WEIGHTS_ALONE: dict[str, Any] = dict.fromkeys(("activations", "attention_output", "keys", "values"))
GROUPS = {"bits": 4, "symmetric": True, "granularity": "group", "group_size": BLOCK}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def recipe(scheme: dict[str, Any]) -> Recipe:
    """Merged rotations and weights rounded to nearest."""
    methods = {"spinquant": None, "gptq": None}
    changes = {"methods": methods, "weights": {"scheme": scheme}, **WEIGHTS_ALONE}
    return override(preset("spinquant-easy"), changes, "test")


def stored(folder: Path, scheme: dict[str, Any], family: str = "llama", **options: Any) -> Path:
    model = tiny_model(family, **{**SIZES, **options})
    save_quantized(folder, build_weights(model, byte_level(), recipe(scheme), seed=0))
    return folder


def read(file: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Every tensor dequantized, by its name in GGUF, and the reader."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(file)
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}, reader


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (GROUPS, "Q4_0"),
        ({**GROUPS, "group_size": 64, "scale": "full"}, "Q4_0"),
        ({**GROUPS, "bits": 3, "granularity": "channel", "group_size": None}, "Q4_0"),
        ({**GROUPS, "symmetric": False}, "Q4_1"),
        ({**GROUPS, "bits": 8, "granularity": "channel", "group_size": None}, "Q8_0"),
    ],
)
def test_blocks_read_back_are_the_stored_weights_with_scales_in_float16(
    family: str, scheme: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    folder = stored(tmp_path / "quantized", scheme, family)
    pytest.importorskip("gguf")
    assert export_gguf(folder, tmp_path / "model.gguf") == kind
    tensors, reader = read(tmp_path / "model.gguf")
    assert {one.tensor_type.name for one in reader.tensors} == {kind, "F32"}
    paired = family == "llama"
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}
    content = read_quantized(folder)
    heads = content.config.num_attention_heads, content.config.num_key_value_heads
    for layer in range(content.config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = content.weights[f"model.layers.{layer}.{ours}.weight"]
            exact = with_float16_scales(weight)
            if paired and theirs in ("attn_q", "attn_k"):
                exact = exact[paired_rows(len(exact), heads[theirs == "attn_k"])]
            found = torch.from_numpy(tensors[f"blk.{layer}.{theirs}.weight"])
            assert torch.equal(found, exact), (layer, theirs)


def with_float16_scales(weight: QuantizedWeight) -> torch.Tensor:
    """The weight dequantized in float32 from a float16 scale, and of asymmetric ones a float16 value of code 0."""
    rows, columns = weight.shape

    def by_column(part: torch.Tensor) -> torch.Tensor:
        """Of groups of which the last may be smaller."""
        return part.reshape(rows, -1).repeat_interleave(weight.scheme.group_size or columns, dim=1)[:, :columns]

    scale = by_column(weight.qparams.scale)
    values = weight.codes.float() * scale.half().float()
    if weight.qparams.zero_point is not None:
        values = values + (-by_column(weight.qparams.zero_point) * scale).half().float()
    return values


def test_dequantized_numbers_are_those_that_are_loaded(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = stored(tmp_path / "quantized", GROUPS, "qwen2")
    assert export_gguf(folder, tmp_path / "model.gguf", torch.float32) == "F32"
    tensors, reader = read(tmp_path / "model.gguf")
    model, tokenizer, _ = load_quantized(folder)
    own = dict(model.named_parameters())
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.1.self_attn.k_proj.bias", "blk.1.attn_k.bias"),
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
    ):
        assert np.array_equal(tensors[theirs], own[ours].detach().numpy()), theirs
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert said["qwen2.block_count"] == model.config.num_hidden_layers
    assert said["qwen2.rope.freq_base"] == model.config.rope_parameters["rope_theta"]
    assert said["tokenizer.ggml.pre"] == "gpt-2"
    assert said["tokenizer.ggml.bos_token_id"] == tokenizer.bos_token_id
    assert said["tokenizer.ggml.tokens"][5] == tokenizer.convert_ids_to_tokens(5)
    assert len(said["tokenizer.ggml.tokens"]) == model.config.vocab_size


def test_paired_rows_make_llamas_rotation_one_of_neighbours() -> None:
    """Rotating features i and i + half, as transformers does, is rotating neighbours in the other order of rows."""
    heads, size = 2, 8
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(heads * size, generator=generator)
    angles = torch.rand(size // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.view(heads, 2, size // 2).unbind(1)
    ours = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1).flatten()
    rows = paired_rows(heads * size, heads)
    even, odd = x[rows].view(heads, size // 2, 2).unbind(2)
    theirs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=2).flatten()
    assert torch.allclose(ours[rows], theirs)


@pytest.mark.parametrize(
    ("scheme", "options", "sentence"),
    [
        ({**GROUPS, "group_size": 16}, {}, "the weights have groups of 16, and blocks of GGUF hold 32"),
        (GROUPS, {"intermediate_size": 80}, "mlp_output has 80 features, and blocks of GGUF hold 32"),
        ({**GROUPS, "bits": 8, "symmetric": False}, {}, "asymmetric codes of 8 bits, which no type of GGUF holds"),
        (GROUPS, {"mlp_bias": True}, "the MLP has biases, which llama.cpp does not add"),
        (GROUPS, {"family": "phi3"}, "phi3 models are not written as GGUF here"),
    ],
)
def test_what_has_no_form_is_refused_in_a_sentence(
    scheme: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored(tmp_path / "quantized", scheme, **options)
    monkeypatch.setattr(gguf_export, "library", lambda: None)
    with pytest.raises(RecipeError, match=sentence):
        export_gguf(folder, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_transforms_at_run_time_are_refused(tmp_path: Path) -> None:
    model = tiny_model(**SIZES)
    save_quantized(tmp_path / "q", build_weights(model, byte_level(), preset("quarot-rtn"), seed=0))
    with pytest.raises(RecipeError, match=r"transforms at run time \(rotation\.heads, rotation\.mlp\), which GGUF"):
        export_gguf(tmp_path / "q", tmp_path / "model.gguf")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path / "q", build_weights(tiny_model(**SIZES), tiny_tokenizer(), recipe(GROUPS), seed=0))
    with pytest.raises(CheckpointError, match="is not byte-level BPE"):
        export_gguf(tmp_path / "q", tmp_path / "model.gguf")


def test_a_tokenizer_without_what_gguf_asks_for_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One written in Python, one of another model, one with an empty list of splits."""
    unigram, empty = byte_level(), byte_level()
    unigram.backend_tokenizer.model = models.Unigram([(f"w{i}", -1.0) for i in range(9)], 0)
    empty.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    for found in (object(), unigram, empty):
        monkeypatch.setattr(gguf_export, "load_tokenizer", lambda _, found=found: found)
        with pytest.raises(CheckpointError, match="is not byte-level BPE"):
            gguf_export.check_tokenizer(tmp_path)


def test_scales_that_float16_does_not_hold_are_refused() -> None:
    scheme = recipe(GROUPS).rounded.scheme
    codes = torch.zeros(2, BLOCK, dtype=torch.int8)
    for scale in (1e-9, 1e6):
        weight = QuantizedWeight(codes, QParams(torch.full((2, 1, 1), scale)), scheme)
        with pytest.raises(RecipeError, match="to a fourth of a step"):
            integers("w", weight, torch.arange(2))


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'rotquant\[serve\]'"):
        export_gguf(stored(tmp_path / "q", GROUPS), tmp_path / "model.gguf")


def test_online_rotations_of_inputs_are_refused_with_what_to_set() -> None:
    model = tiny_model()
    recipe = override(preset("quarot"), {"rotation": {"residual": "none", "inputs": "hadamard", "heads": False}}, "")
    with pytest.raises(RecipeError, match=r"\(rotation\.inputs, rotation\.mlp\), which GGUF .*rotation\.inputs=none"):
        check_gguf(recipe, model.config)
