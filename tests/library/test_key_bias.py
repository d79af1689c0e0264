"""Keys with a large bias: the estimate from weights against rounded keys, and the sentence before the work."""

import math
import warnings
from pathlib import Path

import pytest
import torch

from rotquant import api
from rotquant.metrics.key_bias import key_bias_note, key_signals
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.tensors.hadamard import hadamard_transform
from rotquant.tensors.quantization import fake_quantize
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model
from tests.helpers.real import real_model

KEYS = preset("quarot-rtn").keys


def with_bias(family: str, sizes: list[float]) -> torch.nn.Module:
    """A tiny model whose keys have a normal bias of a size by layer, times what varies in them."""
    model = tiny_model(family)
    architecture = architecture_of(model)
    rows = slice(*(architecture.key.rows or (None,)))
    for layer, size in zip(decoder_layers(model), sizes, strict=True):
        linear = layer.get_submodule(architecture.key.name)
        varies = linear.weight[rows].square().sum(1).mean().sqrt()
        with torch.no_grad():
            linear.bias[rows] = size * varies * torch.randn(linear.bias[rows].shape)
    return model


def test_the_estimate_is_near_what_rounded_keys_lose() -> None:
    torch.manual_seed(0)
    model = with_bias("qwen2", [0.0, 30.0])
    architecture = architecture_of(model)
    for bits in (3, 4, 8):
        scheme = KEYS.model_copy(update={"bits": bits, "clip_ratio": 1.0})
        for layer, estimated in zip(decoder_layers(model), key_signals(model, bits), strict=True):
            linear = layer.get_submodule(architecture.key.name)
            hidden = torch.nn.functional.rms_norm(
                torch.randn(512, architecture.hidden_size), (architecture.hidden_size,)
            )
            keys = linear(hidden * layer.input_layernorm.weight).reshape(1, 512, -1, architecture.head_dim)
            keys = hadamard_transform(keys.transpose(1, 2))
            error = (fake_quantize(keys, scheme) - keys).square().mean((0, 2, 3))
            varies = keys.var(2).mean((0, 2))
            measured = 10 * torch.log10(varies / error)
            # 16 features have a smaller range than the 64 to 128 of pretrained models: 3.5 for 5 times the RMS, 3.1 dB
            assert (measured.double() - estimated - 3.1).abs().max() < 4


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_without_a_bias_nothing_is_said(family: str) -> None:
    model = tiny_model(family)
    assert key_signals(model, 4).eq(math.inf).all()
    assert key_bias_note(model, preset("quarot")) == ""


def test_a_sentence_names_the_layers_and_what_keeps_keys(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, recipe = with_bias("qwen2", [0.0, 300.0]), preset("quarot-rtn")
    note = key_bias_note(model, recipe)
    assert "in layers 1 (counted from 0)" in note
    assert "`--set keys.bits=8`" in note
    for kept in ({"keys": None}, {"keys": {"bits": 8}}):
        assert key_bias_note(model, override(recipe, kept, "test")) == ""
    assert key_bias_note(with_bias("qwen2", [0.0, 3.0]), recipe) == ""
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        api.quantize(tmp_path, override(recipe, {"rotation": {"heads": False}}, "test"))
    assert [str(one.message) for one in said if "k_proj" in str(one.message)] == [note]


@pytest.mark.parametrize(
    ("name", "lost"), [("qwen2.5-coder-0.5b", [0, 1, 2, 8]), ("smollm2-135m", []), ("gemma3-270m", [])]
)
def test_pretrained_models(name: str, lost: list[int]) -> None:
    model = api.load_checkpoint(real_model(name), torch.float32)[0]
    assert (key_signals(model, 4).amin(1) < 0).nonzero()[:, 0].tolist() == lost
