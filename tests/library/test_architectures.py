"""The adapters find every weight of every family, and say so plainly when they do not know one."""

import json
import sys

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, SeedOssConfig, SeedOssForCausalLM

from rotquant.cli import app
from rotquant.foundation.errors import UnsupportedArchitectureError
from rotquant.models.architectures import (
    FAMILIES,
    Family,
    architecture_of,
    base_model,
    check_family,
    decoder_layers,
    embedding,
    final_norm,
    lm_head,
    rotary,
)
from rotquant.recipes.schemes import RotationScheme
from tests.helpers.invariance import invariance_error
from tests.helpers.models import FAMILIES as DENSE
from tests.helpers.models import VOCABULARY, tiny_model, tiny_tokens


@pytest.mark.parametrize("family", DENSE)
def test_sites_cover_every_linear_layer_of_a_decoder_layer_once(family: str) -> None:
    model = tiny_model(family)
    architecture = architecture_of(model)
    for layer in decoder_layers(model):
        present = sorted(name for name, module in layer.named_modules() if isinstance(module, nn.Linear))
        assert sorted(architecture.linears) == present


@pytest.mark.parametrize("family", DENSE)
def test_sites_are_in_execution_order_and_name_what_the_linear_layers_really_read(family: str) -> None:
    model = tiny_model(family)
    architecture = architecture_of(model)
    layer = decoder_layers(model)[0]
    read: dict[str, torch.Tensor] = {}
    produced: dict[str, torch.Tensor] = {}
    for name in architecture.linears:
        layer.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: read.update({name: args[0]}))
    for site in architecture.sites:
        if site.norm:
            norm = layer.get_submodule(site.norm)
            norm.register_forward_hook(lambda _, args, out, name=site.norm: produced.update({name: out}))
    model(tiny_tokens(), use_cache=False)
    assert list(read) == list(architecture.linears)
    for site in architecture.sites:
        for name in site.linears:
            assert read[name].shape[-1] == site.features
            if site.norm:
                assert torch.equal(read[name], produced[site.norm])


@pytest.mark.parametrize("family", DENSE)
def test_projections_cover_the_output_rows_of_their_linear_layers(family: str) -> None:
    model = tiny_model(family, num_heads=4, num_kv_heads=1)
    architecture = architecture_of(model)
    layer = decoder_layers(model)[0]
    rows: dict[str, list[int]] = {}
    for role in ("query", "key", "value", "gate", "up"):
        projection = getattr(architecture, role)
        out_features = layer.get_submodule(projection.name).out_features
        rows.setdefault(projection.name, []).extend(range(*(projection.rows or (0, out_features))))
    for name, covered in rows.items():
        assert covered == list(range(layer.get_submodule(name).out_features))


def test_fused_rows_are_the_ones_the_model_uses() -> None:
    """Zeroing the rows said to be v's makes attention return zero; zeroing those said to be up's, the MLP."""
    model = tiny_model("phi3")
    architecture = architecture_of(model)
    layer = decoder_layers(model)[0]
    outputs: dict[str, torch.Tensor] = {}
    for name in (architecture.attention_output, architecture.mlp_output):
        layer.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: outputs.update({name: out}))
    with torch.no_grad():
        for projection in (architecture.value, architecture.up):
            layer.get_submodule(projection.name).weight[slice(*projection.rows)] = 0.0
        model(tiny_tokens(), use_cache=False)
    assert all(output.abs().max() == 0.0 for output in outputs.values())


@pytest.mark.parametrize("family", DENSE)
def test_the_parts_outside_the_decoder_layers_are_found(family: str) -> None:
    model = tiny_model(family)
    assert embedding(model).weight.shape == (VOCABULARY, 64)
    assert lm_head(model).weight.shape == (VOCABULARY, 64)
    assert final_norm(model).weight.shape == (64,)
    assert len(decoder_layers(model)) == 2
    assert rotary(model) is model.model.rotary_emb
    assert base_model(model) is model.model
    assert base_model(model.model) is model.model


def test_shapes_come_from_the_configuration() -> None:
    config = LlamaConfig(
        hidden_size=640, num_attention_heads=20, num_key_value_heads=4, head_dim=64, intermediate_size=99
    )
    architecture = architecture_of(config)
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (20, 4, 64)
    assert architecture.site("attention_output").features == 20 * 64
    assert architecture.site("mlp_output").features == 99


@pytest.mark.parametrize(
    ("config", "step"),
    [
        ({"model_type": "gpt_neox", "layer_norm_eps": 1e-5}, "LayerNorm, and rotations are fused with RMSNorm alone"),
        ({"model_type": "gpt2", "layer_norm_epsilon": 1e-5}, "LayerNorm"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "take the family's dense model, or a Mixtral"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "experts in some layers and none in others"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "save the language model by itself"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "save the language model by itself"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}, "save the language model by itself"),
        ({"model_type": "mistral", "layer_types": []}, "no adapter describes the model family 'ministral'"),
        ({"model_type": "internlm2", "auto_map": {}}, "Its code comes with the checkpoint and is never run"),
        ({"model_type": "granite", "rms_norm_eps": 1e-6}, r'write the entry "granite": Family\(\) into `FAMILIES`'),
        ({}, "names no family"),
    ],
)
def test_an_unknown_family_has_a_next_step_before_torch_is_loaded(config, step, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": config.get("model_type", "none")}))
    with pytest.raises(UnsupportedArchitectureError, match=step) as raised:
        check_family(config)
    if not config:
        return
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it would be an error
    with pytest.raises(SystemExit, match="2"):
        app(["quantize", str(tmp_path), "-o", str(tmp_path / "out")])
    assert capsys.readouterr().err == f"rotquant: {raised.value}\n"


def test_the_entry_that_an_unknown_family_is_told_is_enough_for_seed_oss(monkeypatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with torch.random.fork_rng():
        model = SeedOssForCausalLM(SeedOssConfig(**sizes, **heads)).eval()
    monkeypatch.setitem(FAMILIES, "seed_oss", Family())
    assert invariance_error(model, RotationScheme(), seed=0, input_ids=tiny_tokens()) <= 1e-4


def test_an_unknown_family_is_one_clear_error() -> None:
    with pytest.raises(
        UnsupportedArchitectureError,
        match=r"'gpt2'; known families: gemma2, gemma3_text, llama, mistral, mixtral, olmo2, phi3,",
    ):
        architecture_of(GPT2Config())
