"""The network of a GGUF file: transformers' configuration, and where each tensor goes.

A setting or a tensor that is not understood is refused, since a network without it would be another one. What GGUF
does not say of an architecture is what llama.cpp computes for it. Nothing here loads torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rotquant.foundation.errors import CheckpointError, UnsupportedArchitectureError
from rotquant.models.architectures import FAMILIES, Family
from rotquant.models.gguf.header import Header, library

if TYPE_CHECKING:
    import numpy as np
    import torch

#: Families by llama.cpp's names of architectures.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
#: Sizes of a network: the names of GGUF's settings, and of transformers'.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
}
#: Settings of an architecture that change nothing: what tensors say too, and what only describes.
_SILENT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"})
#: Tensors that settings are made of.
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
#: Layers of the largest Gemma 2 and 3, which scale scores by the hidden size over the heads.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
#: Most that a frequency may be off where Llama 3's scaling is told from its factors.
_FACTORS_AGREE = 1e-4


@dataclass(frozen=True)
class Place:
    """Where a tensor goes.

    names: in files of transformers; of experts one for each, the tensor's first dimension.
    shape: as torch has it. heads: of a projection whose rows are in llama.cpp's order, else 0.
    offset: what is taken away from it: norms of gain 1 + w are stored as this.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0
    offset: float = 0.0


@dataclass(frozen=True)
class GGUFNetwork:
    """config: of config.json, without what transformers adds. places: by the tensors' names in the file."""

    config: Mapping[str, Any]
    places: Mapping[str, Place]


class _Settings:
    """The settings of a file's architecture, each of which has to be asked for."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self.architecture = header, architecture
        self.left = {key for key in header.fields if key.startswith(f"{architecture}.")}

    def get(self, name: str, usual: Any = None) -> Any:
        key = f"{self.architecture}.{name}"
        self.left.discard(key)
        return self.header.fields.get(key, usual)

    def size(self, name: str, usual: int | None = None) -> int:
        """A whole number above zero."""
        found = self.get(name, usual)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self._refuse(name, found, "a whole number above zero")
        return found

    def number(self, name: str, usual: float | None = None) -> float:
        """A number above zero."""
        found = self.get(name, usual)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            self._refuse(name, found, "a number above zero")
        return float(found)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse another value than those that a network of transformers has."""
        if (found := self.get(name, allowed[0])) not in allowed:
            self._refuse(name, found, " or ".join(str(one) for one in allowed))

    def _refuse(self, name: str, found: Any, wanted: str) -> None:
        said = "does not say" if found is None else f"says {str(found)[:80]} for"
        raise CheckpointError(f"{self.header.path} {said} {self.architecture}.{name}, which has to be {wanted} here.")

    def check_read(self) -> None:
        """Refuse settings that nobody asked for."""
        if left := sorted(self.left - {f"{self.architecture}.{name}" for name in _SILENT}):
            raise CheckpointError(
                f"{self.header.path} has the setting {left[0]}, which is not understood here, so the network would be "
                "another one: convert the model's own folder instead."
            )


def network_of(header: Header) -> GGUFNetwork:
    """The configuration and the places of all tensors.

    Raises:
        UnsupportedArchitectureError: no family of this architecture is known here.
        CheckpointError: a setting or a tensor is missing, of another shape, or not understood.
    """
    fields, path = header.fields, header.path
    parts = fields.get("split.count", 0)
    if parts and parts != 1:
        raise CheckpointError(f"{path} is one of {parts} parts of a model: join them by `llama-gguf-split --merge`.")
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{path} is of the architecture {architecture!r}, and those that are read are {', '.join(ARCHITECTURES)}."
        )
    said = _Settings(header, architecture)
    family = ARCHITECTURES[architecture]
    if family == "llama" and said.get("expert_count", 0):
        family = "mixtral"
    config = _common(said, family)
    config |= _own(said, family, config)
    config["rope_parameters"] = _rope(said, family, config)
    said.check_read()
    for layer in range(config["num_hidden_layers"]):
        if f"blk.{layer}.attn_output.weight" not in header.tensors:  # before as many as a damaged number says
            raise CheckpointError(f"{path} is incomplete: it has no tensor blk.{layer}.attn_output.weight.")
    places = places_of(config)
    _check_tensors(header, places)
    return GGUFNetwork(config, places)


def _common(said: _Settings, family: str) -> dict[str, Any]:
    """What all families have."""
    tensors, heads = said.header.tensors, said.size("attention.head_count")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{said.header.path} has no token embedding (token_embd.weight).")
    sizes = {ours: said.size(theirs) for theirs, ours in SIZES.items()}
    head = said.size("attention.key_length", max(sizes["hidden_size"] // heads, 1))
    said.only("attention.value_length", head)
    return {
        "model_type": family,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": said.size("attention.head_count_kv", heads),
        "head_dim": head,
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _own(said: _Settings, family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a family has of its own."""
    tensors, hidden, heads = said.header.tensors, config["hidden_size"], config["num_attention_heads"]
    if family == "llama":
        biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
        said.only("expert_used_count", 0)
        return biases
    if family == "mixtral":
        return {"num_local_experts": _experts(said), "num_experts_per_tok": said.size("expert_used_count")}
    if family == "qwen3_moe":
        return {
            "num_experts": _experts(said),
            "num_experts_per_tok": said.size("expert_used_count"),
            "moe_intermediate_size": said.size("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if family == "phi3":
        window = said.size("attention.sliding_window") if said.get("attention.sliding_window") else None
        original = said.size("rope.scaling.original_context_length", config["max_position_embeddings"])
        return {"sliding_window": window, "original_max_position_embeddings": original}
    if family in _LARGEST_GEMMA:
        largest = config["num_hidden_layers"] == _LARGEST_GEMMA[family]
        own: dict[str, Any] = {
            "query_pre_attn_scalar": hidden // heads if largest else config["head_dim"],
            "sliding_window": said.size("attention.sliding_window"),
            "hidden_activation": "gelu_pytorch_tanh",
        }
        if family == "gemma2":
            own["attn_logit_softcapping"] = said.number("attn_logit_softcapping", 50.0)
            own["final_logit_softcapping"] = said.number("final_logit_softcapping", 30.0)
        said.only("attention.sliding_window_pattern", 2 if family == "gemma2" else 6)
        return own
    return {}


def _experts(said: _Settings) -> int:
    """Experts of a layer, as many as its router has: a damaged number would be names without end."""
    count, router = said.size("expert_count"), said.header.tensors.get("blk.0.ffn_gate_inp.weight")
    if router is None or router.shape[0] != count:
        raise CheckpointError(f"{said.header.path} says {count} experts, and its first layer's router has others.")
    return count


def _rope(said: _Settings, family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings, as transformers has them."""
    import numpy as np

    head, base = config["head_dim"], said.number("rope.freq_base", 10000.0)
    turned, tensors = said.size("rope.dimension_count", head), said.header.tensors
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    kind = said.get("rope.scaling.type", "none")
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": said.number("rope.scaling.factor")}
    elif family == "phi3":
        said.only("rope.scaling.type", "none", "longrope")
    else:
        said.only("rope.scaling.type", "none")
    if family == "phi3":
        if turned != head:
            found["partial_rotary_factor"] = turned / head
        if "rope_factors_long.weight" in tensors:
            short, long = (_factors(said.header, f"rope_factors_{name}.weight", turned) for name in ("short", "long"))
            found |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
            found["attention_factor"] = said.number("rope.scaling.attn_factor", 1.0)
    elif turned != head:
        said.only("rope.dimension_count", head)
    if "rope_freqs.weight" in tensors:
        factors = np.array(_factors(said.header, "rope_freqs.weight", turned))
        found |= _llama3(factors, base, said.header) if np.any(factors != 1.0) else {}
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": said.number("rope.freq_base_swa", 10000.0)}
        return {"full_attention": found, "sliding_attention": local}
    return found


def _factors(header: Header, name: str, turned: int) -> list[float]:
    """What frequencies are divided by, one for each pair of features that is turned."""
    stored = header.tensors.get(name)
    if stored is None or stored.shape != (turned // 2,) or stored.kind != "F32":
        raise CheckpointError(f"{header.path} has no {turned // 2} factors of frequencies of type F32 in {name}.")
    return [float(str(one)) for one in header.values(name)]


def _llama3(factors: "np.ndarray", base: float, header: Header) -> dict[str, Any]:
    """Llama 3's scaling, from the factors f that it divides frequencies by.

    Between two wavelengths 1 / f is linear in the inverse wavelength 1 / w: 1 / f = 1 / F + (1 - 1 / F) s with
    s = (L / w - low) / (high - low). Scaling L, low and high together changes nothing, so low is 1.
    """
    import numpy as np

    count, largest = len(factors), float(factors.max())
    waves = 2 * np.pi * base ** (np.arange(count) / count)
    share = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = (share > _FACTORS_AGREE) & (share < 1 - _FACTORS_AGREE)
    length, high = 8192.0, 4.0  # of every Llama 3
    if between.sum() == 1:
        length = float((waves * (share * (high - 1) + 1))[between][0])
    elif between.any():
        slope, start = np.polyfit(1 / waves[between], share[between], 1)
        high = round(float(1 - 1 / start), 3)
        length = float(slope) * (high - 1)
    found = {"factor": round(largest, 4), "low_freq_factor": 1.0, "high_freq_factor": high}
    found["original_max_position_embeddings"] = round(length)
    smooth = np.clip((round(length) / waves - 1) / (high - 1), 0, 1)
    again = 1 / ((1 - smooth) / largest + smooth)
    if high <= 1 or length < 1 or not np.allclose(again, factors, rtol=_FACTORS_AGREE):
        raise CheckpointError(
            f"{header.path} divides rotary frequencies by factors (rope_freqs.weight) that are not Llama 3's scaling, "
            "and no other is read from them."
        )
    return {"rope_type": "llama3", **found}


def places_of(config: Mapping[str, Any]) -> dict[str, Place]:
    """Every tensor of a network by its name in a GGUF file; `config` is that of config.json."""
    family = FAMILIES[config["model_type"]]
    hidden, offset = config["hidden_size"], family.norm_offset
    table = (config["vocab_size"], hidden)
    found = {"token_embd.weight": Place(("model.embed_tokens.weight",), table)}
    found["output_norm.weight"] = Place(("model.norm.weight",), (hidden,), offset=offset)
    if not config["tie_word_embeddings"]:
        found["output.weight"] = Place(("lm_head.weight",), table)
    for layer in range(config["num_hidden_layers"]):
        places = {**_attention(config, family), **_mlp(config), **_norms(config, family)}
        for name, place in places.items():
            names = tuple(f"model.layers.{layer}.{one}" for one in place.names)
            found[f"blk.{layer}.{name}"] = Place(names, place.shape, place.heads, place.offset)
    return found


def _attention(config: Mapping[str, Any], family: Family) -> dict[str, Place]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    outputs = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head, "output": hidden}
    paired = {"q": heads, "k": kv_heads} if config["model_type"] in ("llama", "mixtral") else {}
    biased = config.get("attention_bias", False), config["model_type"] == "qwen2"
    found = {}
    if config["model_type"] == "phi3":
        rows = outputs["q"] + outputs["k"] + outputs["v"]
        found["attn_qkv.weight"] = Place(("self_attn.qkv_proj.weight",), (rows, hidden))
        outputs = {"output": hidden}
    for name, rows in outputs.items():
        own, columns = f"self_attn.{name[0]}_proj", heads * head if name == "output" else hidden
        found[f"attn_{name}.weight"] = Place((f"{own}.weight",), (rows, columns), paired.get(name, 0))
        if biased[0] or (biased[1] and name != "output"):
            found[f"attn_{name}.bias"] = Place((f"{own}.bias",), (rows,), paired.get(name, 0))
    if family.head_norms:
        for name, count in (("q", heads), ("k", kv_heads)):
            width = head if family.head_norms == "head" else count * head
            place = Place((f"self_attn.{name}_norm.weight",), (width,), offset=family.norm_offset)
            found[f"attn_{name}_norm.weight"] = place
    return found


def _mlp(config: Mapping[str, Any]) -> dict[str, Place]:
    hidden, width, family = config["hidden_size"], config["intermediate_size"], config["model_type"]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if family in ("mixtral", "qwen3_moe"):
        mixtral = family == "mixtral"
        count = config["num_local_experts" if mixtral else "num_experts"]
        width = width if mixtral else config["moe_intermediate_size"]
        room = "block_sparse_moe" if mixtral else "mlp"
        own = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {name: f"{name}_proj" for name in shapes}
        found = {"ffn_gate_inp.weight": Place((f"{room}.gate.weight",), (count, hidden))}
        for name, theirs in own.items():
            shape = (count, hidden, width) if name == "down" else (count, width, hidden)
            names = tuple(f"{room}.experts.{index}.{theirs}.weight" for index in range(count))
            found[f"ffn_{name}_exps.weight"] = Place(names, shape)
        return found
    if family == "phi3":
        shapes = {"up": (2 * width, hidden), "down": (hidden, width)}
    found = {}
    for name, shape in shapes.items():
        own = "mlp.gate_up_proj" if family == "phi3" and name == "up" else f"mlp.{name}_proj"
        found[f"ffn_{name}.weight"] = Place((f"{own}.weight",), shape)
        if config.get("mlp_bias"):
            found[f"ffn_{name}.bias"] = Place((f"{own}.bias",), shape[:1])
    return found


def _norms(config: Mapping[str, Any], family: Family) -> dict[str, Place]:
    post = zip(("post_attention_norm", "post_ffw_norm"), family.post_norms, strict=False)
    named = [*zip(("attn_norm", "ffn_norm"), family.norms, strict=True), *post]
    return {
        f"{theirs}.weight": Place((f"{own}.weight",), (config["hidden_size"],), offset=family.norm_offset)
        for theirs, own in named
        if own is not None
    }


def _check_tensors(header: Header, places: Mapping[str, Place]) -> None:
    """Refuse tensors that are missing, of another shape, of a type that has no numbers, or that have no place."""
    import numpy as np

    tensors, gguf = header.tensors, library()
    for name, place in places.items():
        if name not in tensors:
            raise CheckpointError(f"{header.path} is incomplete: it has no tensor {name}.")
        if tensors[name].shape != place.shape:
            raise CheckpointError(
                f"{header.path}: {name} has shape {list(tensors[name].shape)}, and its settings ask for "
                f"{list(place.shape)}."
            )
    if unknown := sorted(tensors.keys() - places.keys() - {*_FACTORS}):
        raise CheckpointError(
            f"{header.path} has the tensor {unknown[0]}, which has no place in transformers' network of this family."
        )
    for kind in sorted({one.kind for one in tensors.values()}):
        known = gguf.GGMLQuantizationType[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[known][1]), np.uint8), known)
        except NotImplementedError:
            raise CheckpointError(
                f"{header.path} has tensors of type {kind}, which the package gguf does not dequantize: take a file of "
                "another type."
            ) from None


def paired_rows(rows: int, heads: int) -> "torch.Tensor":
    """Rows of a q or k projection, int64 [rows], in the order in which the two features of a rotation are neighbours.

    transformers rotates feature i of a head with feature i + head_dim / 2, llama.cpp 2 i with 2 i + 1.
    """
    import torch

    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()
