"""GGUF files of tiny models, written by the package gguf as llama.cpp's converter writes them."""

from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rotquant.models.architectures import config_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def write_gguf(
    path: Path,
    model: nn.Module,
    tokens: Mapping[str, Any] | None = None,
    *,
    kind: str = "F32",
    settings: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a model.

    Args:
        tokens: settings of the tokenizer without `tokenizer.ggml.`; default: `letters`.
        kind: of matrices, by gguf's name, where their rows are whole blocks of it.
        settings: replaced or added ones by key, None to leave one out. without: names of tensors that are left out.
    """
    gguf: Any = pytest.importorskip("gguf")
    config: Any = config_of(model)
    architecture = ARCHITECTURES[config.model_type]
    words = tokens or letters(config.vocab_size)
    said = {**_shape(config, architecture), **{f"tokenizer.ggml.{key}": one for key, one in words.items()}}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**said, **(settings or {})}.items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    if settings and "general.architecture" in settings:
        writer.kv_data[0]["general.architecture"].value = settings["general.architecture"]
    for name, values in _tensors(gguf, model, config, architecture).items():
        if name in without:
            continue
        form = gguf.GGMLQuantizationType[kind]
        whole = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[form][0] == 0
        if kind == "F32" or not whole:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def letters(count: int) -> dict[str, Any]:
    """A byte-level BPE vocabulary of single bytes and one merge."""
    from tokenizers import pre_tokenizers

    known = sorted(pre_tokenizers.ByteLevel.alphabet())[: count - 4]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<unk>", "<s>", "</s>", *known, known[0] + known[1]],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(known) + 1),
        "merges": [f"{known[0]} {known[1]}"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def byte_level_fields(tokenizer: PreTrainedTokenizerBase, pre: str, **more: Any) -> dict[str, Any]:
    """The settings of a byte-level BPE tokenizer of transformers."""
    import json

    content = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore[reportAttributeAccessIssue]
    added = {one["id"]: CONTROL if one["special"] else USER_DEFINED for one in content["added_tokens"]}
    texts = {place: text for text, place in tokenizer.get_vocab().items()}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [texts[place] for place in range(len(texts))],
        "token_type": [added.get(place, NORMAL) for place in range(len(texts))],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        **more,
    }


def _shape(config: Any, architecture: str) -> dict[str, Any]:
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0)),
    }
    family = config.model_type
    if family in ("mixtral", "qwen3_moe"):
        said["expert_count"] = getattr(config, "num_local_experts", None) or config.num_experts
        said["expert_used_count"] = config.num_experts_per_tok
    if family == "qwen3_moe":
        said["expert_feed_forward_length"] = config.moe_intermediate_size
    if family in ("phi3", "gemma2", "gemma3_text") and config.sliding_window:
        said["attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        said["attn_logit_softcapping"] = config.attn_logit_softcapping
        said["final_logit_softcapping"] = config.final_logit_softcapping
    if rope["rope_type"] == "longrope":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        longer = config.max_position_embeddings / rope["original_max_position_embeddings"]
        said["rope.scaling.attn_factor"] = sqrt(1 + log(longer) / log(rope["original_max_position_embeddings"]))
    if rope["rope_type"] == "linear":
        said |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {f"{architecture}.{key}": value for key, value in said.items()}


def _tensors(gguf: Any, model: nn.Module, config: Any, architecture: str) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        own, _, end = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            found |= {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{layer}.ffn_down_exps.weight"] = values
        elif name.endswith("mlp.gate.weight"):
            found[f"{layer}.ffn_gate_inp.weight"] = values
        else:
            theirs = names.get_name(own)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            count = heads.get(theirs.rpartition(".")[2]) if architecture == "llama" else None
            if count:
                rows = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
                values = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
            offset = 1.0 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
            found[f"{theirs}.{end}"] = values + np.float32(offset)
    return found | _factors(config)


def _factors(config: Any) -> dict[str, np.ndarray]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in ("short", "long")
        }
    if rope.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        usual = rope["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
        return {"rope_freqs.weight": (usual / scaled.double().numpy()).astype(np.float32)}
    return {}
