"""A quantized model as a GGUF file, which llama.cpp and what builds on it read.

GGUF says no transform at run time, so only recipes whose rotations are merged have this form. Integers become blocks of
32 weights with a float16 scale: Q4_0 (symmetric, up to 4 bits), Q4_1 (asymmetric, up to 4), Q8_0 (symmetric, up to 8).
Codes are exact; scales are rounded to float16. Quantizers of activations and KV cache are left to the runtime.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotquant import __version__
from rotquant.formats.engines import check_methods, check_undone
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.foundation.files import atomic_path, check_output_file
from rotquant.foundation.progress import task
from rotquant.models.architectures import Architecture, architecture_of
from rotquant.models.checkpoints import load_config, load_tokenizer
from rotquant.models.folders import GGUF, GGUF_MARK
from rotquant.models.generation import end_tokens, generation_config
from rotquant.models.gguf.header import library
from rotquant.models.gguf.network import SIZES, Place, paired_rows, places_of
from rotquant.models.gguf.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, WORDS, rules_of
from rotquant.models.limits import ModelLimits
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.weights.packing import Weight
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.storage import StoredTensors, read_manifest, read_quantized

#: Weights that share a scale in a block of GGUF.
BLOCK = 32
#: Most that rounding its scale to float16 may move a weight, in steps of its codes.
MOVED = 1 / 4
_REMEDY = "write dequantized numbers with --format gguf --dtype float16, or quantize otherwise"
#: Families by the names of llama.cpp's architectures. Llama's rotary embedding pairs neighbours there.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as GGUF has it: bytes, uint8 [out, bytes of a row], or numbers; kind is gguf's name of its type."""

    data: np.ndarray
    kind: str


@task("exporting")
def export_gguf(source: str | Path, output: str | Path, dtype: torch.dtype | None = None) -> str:
    """Write a file that llama.cpp loads.

    Args:
        source: a folder that `rotquant quantize` wrote.
        output: the file.
        dtype: write all weights dequantized in this type; None keeps quantized ones as blocks of integers.

    Returns:
        The type of the quantized weights, by gguf's name: Q4_0, Q4_1, Q8_0, F16, BF16 or F32.

    Raises:
        RecipeError: GGUF or llama.cpp cannot say the recipe or the model, or the package gguf is missing.
        CheckpointError: the tokenizer is of a kind that is not written here, or the source is damaged.
        ResultError: the output cannot be written, or the source is no quantized model.
    """
    source, output = Path(source), Path(output)
    check_output_file(output, GGUF, [source])
    recipe, config = read_manifest(source).recipe, load_config(source)
    check_gguf(recipe, config, dtype)
    words = _tokenizer(source)
    gguf = library()
    architecture = ARCHITECTURES[config.model_type]
    stored = read_quantized(source)
    shape = {"model_type": architecture, "head_dim": architecture_of(config).head_dim}  # of the family's name
    places = places_of({**stored.config.to_dict(), **shape})
    names = {own: theirs for theirs, place in places.items() for own in place.names}
    blocks, kind = _blocks(stored, places, dtype)
    with atomic_path(output) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        _describe(writer, gguf, config, kind)
        for key, values in words.items():
            getattr(writer, f"add_{key}")(values)
        for own, block in sorted(blocks.items()):
            writer.add_tensor(names[own], block.data, raw_dtype=getattr(gguf.GGMLQuantizationType, block.kind))
        if (factors := _rope_factors(config)) is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return kind


def check_tokenizer(source: Path) -> None:
    """Raise `CheckpointError` where a model's tokenizer is not written as GGUF here."""
    _tokenizer(source)


def check_gguf(recipe: Recipe, config: Any, dtype: torch.dtype | None = None) -> None:
    """Refuse what GGUF or llama.cpp cannot say, from the recipe and the configuration alone.

    Args:
        dtype: of dequantized weights; None of integers.

    Raises:
        RecipeError: naming what cannot be said, and what would do.
    """
    check_undone(recipe, "GGUF cannot say")
    check_methods(recipe, "GGUF cannot say: evaluate the quantized folder itself, or quantize without this method")
    if config.model_type not in ARCHITECTURES:
        raise RecipeError(
            f"{config.model_type} models are not written as GGUF here, only {', '.join(ARCHITECTURES)}: export with "
            "--format plain, and let llama.cpp convert it."
        )
    if ModelLimits.of(config).window is not None:
        raise RecipeError(
            f"the attention of this model has a sliding window, which llama.cpp has not for its architecture "
            f"{ARCHITECTURES[config.model_type]}: export with --format plain."
        )
    if getattr(config, "mlp_bias", False):
        raise RecipeError("the MLP has biases, which llama.cpp does not add: export with --format plain.")
    kind = config.rope_parameters["rope_type"]
    if kind not in ("default", "llama3"):
        raise RecipeError(
            f"rotary embeddings of type {kind} are not written as GGUF here: export with --format plain, and let "
            "llama.cpp convert it."
        )
    if dtype is None and recipe.weights is not None:
        _check_integers(recipe, recipe.weights.scheme, architecture_of(config))


def _check_integers(recipe: Recipe, scheme: QuantizationScheme, architecture: Architecture) -> None:
    """Refuse quantized weights that blocks of GGUF do not hold."""
    for method in recipe.methods.values():
        stored = method.stored_as if "rounding" in method.roles else "integers"
        if stored != "integers" or "selection" in method.roles:
            raise RecipeError(
                f"the method {method.name} stores no matrix of integers with scales alone, as blocks of GGUF are: "
                f"{_REMEDY}."
            )
        if method.reorders(recipe):
            raise RecipeError(
                f"the method {method.name} forms groups of reordered columns, which GGUF cannot say: {_REMEDY}."
            )
    if scheme.type == "float":
        raise RecipeError(f"the weights are {scheme.bits}-bit floats, which no type of GGUF is written for: {_REMEDY}.")
    if scheme.bits > (8 if scheme.symmetric else 4):
        kind = "symmetric" if scheme.symmetric else "asymmetric"
        raise RecipeError(
            f"the weights have {kind} codes of {scheme.bits} bits, which no type of GGUF holds: {_REMEDY}."
        )
    if scheme.group_size and scheme.group_size % BLOCK:
        raise RecipeError(
            f"the weights have groups of {scheme.group_size}, and blocks of GGUF hold {BLOCK}: {_REMEDY}."
        )
    for site in architecture.sites:
        if site.features % BLOCK:
            raise RecipeError(f"{site.name} has {site.features} features, and blocks of GGUF hold {BLOCK}: {_REMEDY}.")


def _blocks(
    stored: StoredTensors, places: Mapping[str, Place], dtype: torch.dtype | None
) -> tuple[dict[str, GGUFTensor], str]:
    """All tensors by their own names, rows in llama.cpp's order, and the type of the quantized weights."""
    kind, heads = "F32", {name: place.heads for place in places.values() for name in place.names}

    def order(name: str, rows: int) -> Tensor:
        return paired_rows(rows, heads[name]) if heads.get(name) else torch.arange(rows)

    blocks = {}
    for name, tensor in stored.floats.items():
        kept = tensor if dtype is None or tensor.dim() < 2 else tensor.to(dtype)
        blocks[name] = _floats(kept[order(name, len(kept))], exact=tensor.dim() < 2)
    while stored.weights:  # one at a time in both forms
        name, weight = stored.weights.popitem()
        rows = order(name, weight.shape[0])
        if dtype is None:
            blocks[name] = integers(name, weight, rows)
        else:
            blocks[name] = _floats(weight.dequantize(dtype)[rows])
        kind = blocks[name].kind
    return blocks, kind


def _floats(tensor: Tensor, exact: bool = False) -> GGUFTensor:
    """Floating-point numbers in their type; of vectors, `exact`, in float32, as llama.cpp asks."""
    if exact or tensor.dtype in (torch.float32, torch.float64):
        return GGUFTensor(tensor.float().numpy(), "F32")
    if tensor.dtype == torch.float16:
        return GGUFTensor(tensor.numpy(), "F16")
    return GGUFTensor(tensor.contiguous().view(torch.uint8).numpy(), "BF16")


def integers(name: str, weight: Weight, rows: Tensor) -> GGUFTensor:
    """A weight of integers, as `check_gguf` has them, as GGUF's blocks, its rows in the order `rows`.

    Raises:
        RecipeError: float16 does not hold its scales.
    """
    if not isinstance(weight, QuantizedWeight) or weight.outlier_values is not None:
        raise RecipeError(f"{name} is no matrix of integers with scales alone, as blocks of GGUF are: {_REMEDY}.")
    codes, scheme = weight.codes, weight.scheme
    if weight.columns is not None:  # of one group a row, so that the order means nothing
        codes = torch.empty_like(codes).index_copy_(1, weight.columns, codes)
    scale, zero = (
        None if part is None else _by_block(part, codes.shape, scheme.group_size)[rows]
        for part in (weight.qparams.scale, weight.qparams.zero_point)
    )
    return _packed(name, codes[rows].unflatten(1, (-1, BLOCK)), scale, zero, scheme.bits)


def _by_block(part: Tensor, shape: torch.Size, group_size: int | None) -> Tensor:
    """Scales or zero points of any granularity as one for each block: float32 [out, in / 32].

    The last of a row's groups may be smaller than the others.
    """
    rows, columns = shape
    groups = part.float().expand(rows, 1) if part.dim() == 0 else part.float().reshape(rows, -1)
    return groups.repeat_interleave((group_size or columns) // BLOCK, dim=1)[:, : columns // BLOCK]


def _packed(name: str, codes: Tensor, scale: Any, zero: Tensor | None, bits: int) -> GGUFTensor:
    """Blocks of codes [out, blocks, 32] and scales [out, blocks] as bytes."""
    halves = [scale.to(torch.float16)]
    moved = (halves[0].float() - scale).abs() * 2 ** (bits - (zero is None))  # the weight of the largest code, at most
    if zero is not None:  # the value of code 0
        halves.append((-zero * scale).to(torch.float16))
        moved += (halves[1].float() + zero * scale).abs()
    if not bool((moved <= MOVED * scale).all()):
        raise RecipeError(
            f"{name} has scales that float16, in which blocks of GGUF have them, does not hold to a fourth of a step "
            "of its weights: write dequantized numbers with --dtype float32."
        )
    if bits > 4:
        body = codes.to(torch.int8).view(torch.uint8)
    else:  # the first half of a block in the low, the second in the high halves of bytes
        unsigned = (codes.to(torch.int16) + (8 if zero is None else 0)).to(torch.uint8)
        body = unsigned[..., : BLOCK // 2] | unsigned[..., BLOCK // 2 :] << 4
    heads = [half.contiguous().view(torch.uint8).unflatten(1, (-1, 2)) for half in halves]
    data = torch.cat([*heads, body], dim=-1).flatten(1)
    return GGUFTensor(data.contiguous().numpy(), "Q8_0" if bits > 4 else "Q4_0" if zero is None else "Q4_1")


def _describe(writer: Any, gguf: Any, config: Any, kind: str) -> None:
    """What llama.cpp asks of the model's shape."""
    architecture = architecture_of(config)
    files = {"Q4_0": "MOSTLY_Q4_0", "Q4_1": "MOSTLY_Q4_1", "Q8_0": "MOSTLY_Q8_0", "F16": "MOSTLY_F16"}
    files |= {"BF16": "MOSTLY_BF16", "F32": "ALL_F32"}
    writer.add_string(GGUF_MARK.decode(), __version__)
    writer.add_file_type(getattr(gguf.LlamaFileType, files[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    for theirs, ours in SIZES.items():
        writer.add_uint32(f"{writer.arch}.{theirs}", getattr(config, ours))
    writer.add_head_count(architecture.num_heads)
    writer.add_head_count_kv(architecture.num_kv_heads)
    writer.add_key_length(architecture.head_dim)
    writer.add_value_length(architecture.head_dim)
    writer.add_rope_dimension_count(architecture.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))


def _rope_factors(config: Any) -> np.ndarray | None:
    """What llama.cpp divides the rotary frequencies by, float32 [head_dim / 2]; None where they are the usual ones."""
    if config.rope_parameters["rope_type"] == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    count = len(scaled)
    usual = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(count, dtype=torch.float32) / count)
    return (usual / scaled).numpy()


def _tokenizer(source: Path) -> dict[str, Any]:
    """Arguments of gguf's `add_...` functions for a byte-level BPE tokenizer.

    Raises:
        CheckpointError: it is of another kind.
    """
    tokenizer: Any = load_tokenizer(source)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # which those written in Python have not
    content = _NO_TOKENIZER if backend is None else json.loads(backend.to_str())
    model, rules = content["model"], rules_of(content["pre_tokenizer"])
    if (
        model.get("type") != "BPE"
        or "merges" not in model
        or rules is None
        or content["normalizer"] not in (None, {"type": "NFC"})
    ):
        raise CheckpointError(
            f"the tokenizer of {source} is not byte-level BPE with words as one of {', '.join(WORDS)} has, and no "
            "other is written as GGUF here: export with --format plain, and let llama.cpp convert it."
        )
    size = load_config(source).vocab_size
    tokens = {number: text for text, number in tokenizer.get_vocab().items()}
    added = {one["id"]: one["special"] for one in content["added_tokens"]}
    found: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": rules,
        "token_list": [tokens.get(number, f"[PAD{number}]") for number in range(size)],
        "token_types": [_token_type(number, tokens, added) for number in range(size)],
        "token_merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "add_bos_token": tokenizer.bos_token_id is not None,
    }
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            found[f"{name}_token_id"] = number
    further = [one for one in end_tokens(generation_config(source), tokenizer) if one != tokenizer.eos_token_id]
    if further:  # which GGUF has one place for; llama.cpp knows common others by their text
        found["eot_token_id"] = further[0]
    if isinstance(tokenizer.chat_template, str):
        found["chat_template"] = tokenizer.chat_template
    return found


#: What stands for a tokenizer that has no description as JSON.
_NO_TOKENIZER: dict[str, Any] = {"model": {}, "pre_tokenizer": None, "normalizer": None}


def _token_type(number: int, tokens: dict[int, str], added: dict[int, bool]) -> int:
    """gguf's `TokenType`."""
    if number in added:
        return CONTROL if added[number] else USER_DEFINED
    return NORMAL if number in tokens else UNUSED
