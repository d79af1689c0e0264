"""Folders in GPTQ's and AWQ's formats give the weights that were packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rotquant import api
from rotquant.foundation.errors import CheckpointError
from rotquant.models.folders import kind_of
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model
from tests.library.test_serving import logits

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
#: Where AutoAWQ puts eight neighbouring outputs, from the lowest four bits on.
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Integers, int32 [rows, columns bits / 32], one code after another: the slow reference."""
    each, rows = 32 // bits, codes.tolist()
    places = places or tuple(range(each))

    def word(codes: list[int]) -> int:
        number = sum(codes[place] << bits * index for index, place in enumerate(places))
        return number - (number >> 31 << 32)

    return torch.tensor([[word(row[i : i + each]) for i in range(0, len(row), each)] for row in rows]).int()


def folder_of(folder: Path, config: dict[str, Any], order: bool = False) -> Tensor:
    """Write a model whose linear layers are packed at random; logits of what they stand for."""
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    bits, awq = config["bits"], "awq" in config["quant_method"]
    less = 0 if awq or config.get("checkpoint_format") == "gptq_v2" else 1
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "_proj" not in name}
    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            place, (out, features) = f"model.layers.{name}", layer.weight.shape
            groups = features // config["group_size"]
            codes = torch.randint(2**bits, (features, out), generator=generator)
            points = torch.randint(1, 2**bits, (groups, out), generator=generator)
            scales = (0.1 * torch.rand(groups, out, generator=generator) / 2**bits).half()
            group = torch.arange(features) // config["group_size"]
            group = group[torch.randperm(features, generator=generator)] if order else group
            layer.weight.data = ((codes - points[group]) * scales.float()[group]).T
            tensors[f"{place}.qweight"] = packed(codes, bits, AWQ_PLACES) if awq else packed(codes.T, bits).T
            tensors[f"{place}.qzeros"] = packed(points - less, bits, AWQ_PLACES if awq else None)
            tensors |= (
                {f"{place}.scales": scales} if awq else {f"{place}.scales": scales, f"{place}.g_idx": group.int()}
            )
    model.config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    tiny_tokenizer().save_pretrained(folder)
    return logits(model, use_cache=False)


@pytest.mark.parametrize(
    "config",
    [
        GPTQ,
        GPTQ | {"bits": 8},
        GPTQ | {"bits": 2},
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        GPTQ | {"quant_method": "awq", "version": "gemm"},
    ],
)
@pytest.mark.parametrize("order", [False, True])
def test_the_weights_are_those_that_were_packed(config: dict[str, Any], order: bool, tmp_path: Path) -> None:
    theirs = folder_of(tmp_path, config, order and config["quant_method"] == "gptq")
    assert kind_of(tmp_path) == config["quant_method"]
    assert torch.equal(logits(api.load(tmp_path).network, use_cache=False), theirs)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bits": 3}, "of 3 bits, which are not read here"),
        ({"checkpoint_format": "marlin"}, "packed as gptq marlin"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "packed as llm_compressor"),
        ({"dynamic": {"-:lm_head": {}}}, "with one width for all layers"),
        ({"bits": 8}, r"the parts of model\.layers\.0\..*weight do not fit each other"),
    ],
)
def test_what_is_not_read_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder_of(tmp_path, GPTQ)
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=sentence):
        api.load(tmp_path)
