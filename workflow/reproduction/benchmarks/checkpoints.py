"""Bytes of quantized models' files at the papers' shapes (RCP Table 6): written, measured, deleted.

Every file of a checkpoint is written as the library writes it, one for each decoder layer, the embedding and the head.
Sizes do not depend on the numbers, so all layers have those of one, drawn and quantized once.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from reproduction.benchmarks.arguments import CheckpointArguments
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import decoder_config
from rotquant.decoder.config import KINDS, LINEARS, DecoderConfig
from rotquant.decoder.random import random_decoder
from rotquant.foundation.files import folder_size
from rotquant.models.integrity import write_shards
from rotquant.qat.quantizers import Kind, make_quantizer
from rotquant.tensors.codebook_compression import in_float16
from rotquant.weights.packing import weight_tensors

_SEED, _DEVIATION, _MOVED = 0, 0.02, 0.1
_GROUP_SIZE = 128

Tensors = Mapping[str, Tensor]


def checkpoint(arguments: CheckpointArguments) -> dict[str, Measurement]:
    """Bytes of all safetensors files of a checkpoint, headers included, and how many files they are.

    Quantities: bytes; layer_bytes, of the file of one decoder layer; files.
    """
    config = decoder_config(arguments.shape)
    ends = [written(tensors) for tensors in _ends(config, arguments.tied)]
    one = dict(_layer(config, arguments))
    layers = [
        written({f"model.layers.{index}.{name}": tensor for name, tensor in one.items()})
        for index in range(config.layers)
    ]
    return {
        "bytes": Measurement(sum(ends) + sum(layers), "B"),
        "layer_bytes": Measurement(layers[0], "B"),
        "files": Measurement(len(ends) + len(layers), "files"),
    }


def written(tensors: Tensors) -> int:
    """Bytes of the files that tensors make, which are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rotquant-checkpoint-") as folder:
        write_shards(Path(folder), tensors, "quantized")
        return folder_size(folder, "*.safetensors")


def _ends(config: DecoderConfig, tied: bool) -> Iterator[Tensors]:
    """The tensors outside decoder layers, in 16 bits: the embedding, the head if it is not tied, the last norm."""
    table = torch.zeros(config.vocabulary, config.hidden, dtype=torch.bfloat16)
    yield {"model.embed_tokens.weight": table}
    if not tied:
        yield {"lm_head.weight": table}
    yield {"model.norm.weight": torch.ones(config.hidden, dtype=torch.bfloat16)}


def _layer(config: DecoderConfig, arguments: CheckpointArguments) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a decoder layer, one linear layer quantized after the other."""
    if arguments.form == "decoder":
        one = config.model_copy(update={"vocabulary": 1, "tied": True, "norm_gains": False})
        layer = random_decoder(one, KINDS["w2a4kv4"], layers=1, device="cpu", seed=_SEED).layers[0]
        yield from layer.state_dict().items()
        return
    generator = torch.Generator().manual_seed(_SEED)
    for name, (inputs, outputs) in hugging_face_linears(config).items():
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(0.0, _DEVIATION, generator=generator)
        if arguments.quantizer is None:
            yield f"{name}.weight", weight
            continue
        quantizer = make_quantizer(cast(Kind, arguments.quantizer), weight, _GROUP_SIZE, arguments.bits)
        for parameter in quantizer.parameters():  # trained ones are not where they began
            parameter.data += torch.empty_like(parameter).normal_(0.0, _MOVED, generator=generator)
        yield from weight_tensors(f"{name}.weight", in_float16(quantizer.freeze(weight))).items()
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", torch.ones(config.hidden, dtype=torch.bfloat16)


def hugging_face_linears(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of a decoder layer's linear layers by their Hugging Face names, the merged ones apart."""
    sizes = dict(zip(LINEARS, map(config.features, LINEARS), strict=True))
    inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {"q_proj": inner, "k_proj": kv, "v_proj": kv}
    return {
        **{f"self_attn.{name}": (config.hidden, outputs) for name, outputs in attention.items()},
        "self_attn.o_proj": sizes["o"],
        **{f"mlp.{name}": (config.hidden, config.intermediate) for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": sizes["down"],
    }
