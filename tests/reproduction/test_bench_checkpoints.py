"""Bytes of checkpoints (RCP Table 6): the files are the library's, and at a small shape every byte is accounted for."""

import pytest
import torch
from pydantic import ValidationError

from reproduction.benchmarks.arguments import CheckpointArguments
from reproduction.benchmarks.checkpoints import checkpoint, hugging_face_linears
from reproduction.benchmarks.shapes import SHAPES
from rotquant.decoder.config import DecoderConfig
from rotquant.foundation.errors import ConfigError
from rotquant.models.architectures import architecture_of
from rotquant.weights.storage import save_quantized
from tests.helpers.codebooks import build_levels, table_recipe
from tests.helpers.models import TINY_SHAPE
from tests.library.decoder.test_tables import random_model

#: Names, shapes and types in a file's head.
HEADER = 3000


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY_SHAPE)


def measured(**arguments: object) -> dict[str, float]:
    found = checkpoint(CheckpointArguments.model_validate({"shape": "tiny", **arguments}))
    return {name: one.value for name, one in found.items()}


#: (arguments, bits a weight of linear layers): codes and 16-bit numbers for 128 weights.
SIZES = [
    ({}, 16),
    ({"quantizer": "range", "bits": 2}, 2 + 2 * 16 / 128),
    ({"quantizer": "ldp", "bits": 2}, 2 + 4 * 16 / 128),
    ({"quantizer": "nf3", "bits": 3}, 3 + 2 * 16 / 128),
    ({"quantizer": "nf3_ldp", "bits": 3}, 3 + 3 * 16 / 128),
]


@pytest.mark.parametrize(("arguments", "bits"), SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_byte_is_accounted_for(arguments: dict, bits: float, tied: bool) -> None:
    found = measured(**arguments, tied=tied)
    config = DecoderConfig.from_shape(TINY_SHAPE)
    weights = sum(inputs * outputs for inputs, outputs in hugging_face_linears(config).values())
    layer = weights * bits / 8 + 2 * 2 * config.hidden
    ends = 2 * config.hidden * ((1 if tied else 2) * config.vocabulary + 1)
    assert found["files"] == config.layers + (2 if tied else 3)
    assert 0 < found["layer_bytes"] - layer < HEADER
    assert 0 < found["bytes"] - config.layers * layer - ends < HEADER * found["files"]


def test_layers_are_those_of_the_model() -> None:
    model = random_model()
    linears = {
        name: (layer.in_features, layer.out_features)
        for name, layer in model.model.layers[0].named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    assert hugging_face_linears(DecoderConfig.from_shape(TINY_SHAPE)) == linears
    assert set(linears) == set(architecture_of(model).linears)


def test_a_saved_model_is_as_large(tmp_path) -> None:
    """`save_quantized` writes one file of all that; its model is float32 where the benchmark's has 16 bits."""
    model = random_model()
    save_quantized(tmp_path / "model", build_levels(model, table_recipe(128)))
    written = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    config = DecoderConfig.from_shape(TINY_SHAPE)
    floats = 2 * config.hidden * (2 * config.vocabulary + 2 * config.layers + 1)
    found = measured(quantizer="ldp", bits=2)
    assert abs(written - floats - found["bytes"]) < HEADER * found["files"]


def test_the_decoder_reads_as_many_bytes_but_for_odd_groups() -> None:
    stored, decoder = measured(quantizer="ldp", bits=2), measured(quantizer="ldp", bits=2, form="decoder")
    config = DecoderConfig.from_shape(TINY_SHAPE)
    odd = config.intermediate // 128 % 2 * 128 * config.hidden * 2.5 / 8
    assert abs(decoder["layer_bytes"] - stored["layer_bytes"] - odd) < HEADER


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"bits": 2}, "weights of no quantizer do not have 2 bits"),
        ({"quantizer": "ldp", "bits": 3}, "weights of ldp do not have 3 bits"),
        ({"quantizer": "nf3", "bits": 3, "form": "decoder"}, "other widths are simulated"),
    ],
)
def test_what_there_is_not_is_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        CheckpointArguments(shape="tiny", **arguments)
    with pytest.raises(ConfigError, match="unknown shape 'tinny'"):
        checkpoint(CheckpointArguments(shape="tinny"))
