"""Where each model family keeps its projections, norms, heads and embeddings: the one adapter between papers and code.

Everything above speaks of sites (places where activations are quantized) and projections (q, k, v, gate, up and the
rest); a new family is one entry of `FAMILIES`. Nothing here computes on weights or imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from rotquant.foundation.errors import UnsupportedArchitectureError
from rotquant.models.families import next_step
from rotquant.recipes.traits import Trait
from rotquant.recipes.transforms import SiteName

if TYPE_CHECKING:
    from torch import Tensor, nn

    class RMSNorm(nn.Module):
        """Interface that the families' norms share: to torch's types any attribute is a tensor or a module."""

        weight: nn.Parameter

    class RotaryEmbedding(nn.Module):
        """Interface that the families' rotary embeddings share."""

        inv_freq: Tensor
        attention_scaling: float

        def __init__(self, config: Any) -> None: ...

    class DecoderModel(nn.Module):
        """Interface that the families' models share, without their language-model heads."""

        embed_tokens: nn.Embedding
        layers: nn.ModuleList
        norm: RMSNorm
        rotary_emb: RotaryEmbedding


@dataclass(frozen=True)
class Projection:
    """A projection inside a linear layer: `name` relative to the decoder layer, and which of its output rows.

    rows: [start, stop) in a fused linear layer (Phi-3), None where the linear layer holds nothing else.
    """

    name: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Site:
    """An activation that linear layers read: it is quantized once for all of them.

    linears: names, relative to the decoder layer, of the linear layers that read it.
    norm: name of the RMSNorm that produces it; None for the `*_output` sites, and where the residual stream is read.
    features: its width.
    experts: whether each linear layer is an expert's and reads the tokens that are routed to it.
    router: name of what reads it to choose experts; its weight is never quantized.
    """

    name: SiteName
    linears: tuple[str, ...]
    norm: str | None
    features: int
    experts: bool = False
    router: str | None = None

    @property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """The linear layers, those together that read one input: each expert reads its own tokens."""
        return tuple((name,) for name in self.linears) if self.experts else (self.linears,)

    @property
    def readers(self) -> tuple[str, ...]:
        """All that multiplies it by a weight: the linear layers and the router."""
        return (*self.linears, *filter(None, [self.router]))


@dataclass(frozen=True)
class Architecture:
    """Shape and layout of a decoder-only model. Names are relative to one decoder layer; sites in execution order.

    In `attention_output` and `mlp_output` stand the names of the linear layers o_proj and down_proj. Where there are
    experts, `intermediate_size` is the width of one, and gate, up and `mlp_output` are the first one's.

    norms: names of all RMSNorms of a layer. norm_offset: what they add to their weight before they multiply by it.
    head_norms: whether queries and keys have an RMSNorm before RoPE, of each `head` or of `all` together;
        head_norm_names: the norms.
    traits: what the layers have and Llama's have not.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sites: tuple[Site, ...]
    query: Projection
    key: Projection
    value: Projection
    gate: Projection
    up: Projection
    attention_output: str
    mlp_output: str
    attention: str = "self_attn"
    norms: tuple[str, ...] = ()
    norm_offset: float = 0.0
    head_norms: Literal["head", "all"] | None = None
    head_norm_names: tuple[str, ...] = ()
    traits: frozenset[Trait] = frozenset()

    def site(self, name: str) -> Site:
        """The site called `name`."""
        return next(site for site in self.sites if site.name == name)

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers of a decoder layer, in execution order."""
        return tuple(name for site in self.sites for name in site.linears)

    @property
    def mlp_readers(self) -> tuple[Projection, ...]:
        """All that reads the input of the MLP: gate and up, or those of every expert and the router."""
        site = self.site("mlp_input")
        return tuple(map(Projection, site.readers)) if site.experts else (self.gate, self.up)

    def up_of(self, down: str) -> Projection:
        """The rows of up_proj whose products a down_proj reads, by its name: of experts, the same one's."""
        return replace(self.up, name=f"{down.rpartition('.')[0]}.{self.up.name.rpartition('.')[2]}")


def check_family(config: Mapping[str, Any]) -> None:
    """Refuse the content of a config.json whose family has no adapter, and say what to do next.

    Raises:
        UnsupportedArchitectureError: naming the family, the known ones, and an entry to write or a model to take; or
            what the layers of a known family have in this model and no adapter describes.
    """
    family = config.get("model_type")
    if family == "mistral" and "layer_types" in config:
        family = "ministral"  # as transformers reads it
    if not isinstance(family, str) or family not in FAMILIES:
        known = f"no adapter describes the model family {family!r}; known families: {', '.join(sorted(FAMILIES))}"
        raise UnsupportedArchitectureError(f"{known}. {next_step(family, config)}.")
    if FAMILIES[family].experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise UnsupportedArchitectureError(
            f"this {family} model has experts in some layers and none in others, and the adapter describes layers that "
            "are alike: take one with experts in all."
        )


def architecture_of(model_or_config: nn.Module | Any) -> Architecture:
    """Describe a transformers causal language model, or its configuration.

    Raises:
        UnsupportedArchitectureError: no adapter knows this family; the sentence names it and the known ones.
    """
    config: Any = getattr(model_or_config, "config", model_or_config)
    family = getattr(config, "model_type", type(config).__name__)
    check_family({"model_type": family} | (config.to_dict() if hasattr(config, "to_dict") else {}))
    entry = FAMILIES[family]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = 0 if entry.experts is None else int(getattr(config, entry.experts.count))
    width = config.intermediate_size if entry.experts is None else int(getattr(config, entry.experts.width))
    projections = entry.projections(heads * head_dim, kv_heads * head_dim, width)
    attention_output, downs = "self_attn.o_proj", entry.experts_of("down_proj", experts) or ("mlp.down_proj",)
    qkv = _names(projections["query"], projections["key"], projections["value"])
    gate_up = entry.experts_of("gate_up_proj", experts) or _names(projections["gate"], projections["up"])
    attention_norm, mlp_norm = entry.norms
    capped: frozenset[Trait] = frozenset(["capped_logits"] if getattr(config, "final_logit_softcapping", None) else ())
    return Architecture(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sites=(
            Site("attention_input", qkv, attention_norm, config.hidden_size),
            Site("attention_output", (attention_output,), None, heads * head_dim),
            Site("mlp_input", gate_up, mlp_norm, config.hidden_size, experts > 0, "mlp.gate" if experts else None),
            Site("mlp_output", downs, None, width, experts > 0),
        ),
        attention_output=attention_output,
        mlp_output=downs[0],
        norms=tuple(filter(None, (*entry.norms, *entry.post_norms, *entry.head_norm_names))),
        norm_offset=entry.norm_offset,
        head_norms=entry.head_norms,
        head_norm_names=entry.head_norm_names,
        traits=entry.traits | capped,
        **projections,
    )


def config_of(model: nn.Module) -> Any:
    """The transformers configuration of a model."""
    return model.config


def base_model(model: nn.Module) -> DecoderModel:
    """The model without its language-model head: the module whose forward runs the decoder layers."""
    return cast("DecoderModel", getattr(model, getattr(model, "base_model_prefix", "model"), model))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, first to last; of experts, each has its linear layers (`rotquant.models.experts`)."""
    layers = base_model(model).layers
    entry = FAMILIES.get(getattr(config_of(model), "model_type", ""))
    if entry is not None and entry.experts is not None:
        from rotquant.models.experts import open_experts

        open_experts(layers)
    return layers


def embedding(model: nn.Module) -> nn.Embedding:
    """The token embedding, weight [vocabulary, hidden]."""
    return base_model(model).embed_tokens


def final_norm(model: nn.Module) -> RMSNorm:
    """The RMSNorm before the language-model head."""
    return base_model(model).norm


def lm_head(model: nn.Module) -> nn.Linear:
    """The language-model head, weight [vocabulary, hidden]."""
    return cast("nn.Linear", model.lm_head)


def logit_cap(model: nn.Module) -> float | None:
    """c of a model whose logits are c tanh(x / c), x what the head gives (Gemma 2); None for every other."""
    return getattr(config_of(model), "final_logit_softcapping", None)


def capped(model: nn.Module, logits: Tensor) -> Tensor:
    """What a model makes of what its head gives: c tanh(x / c) where its configuration has a cap c (Gemma 2)."""
    cap = logit_cap(model)
    return logits if cap is None else cap * (logits / cap).tanh()


def rotary(model: nn.Module) -> RotaryEmbedding:
    """The module that computes the rotary position embeddings (cos, sin)."""
    return base_model(model).rotary_emb


def linear_of(layer: nn.Module, name: str) -> nn.Linear:
    """A linear layer of a decoder layer, weight [out, in]; `name` as in `Site.linears` and `Projection.name`."""
    return cast("nn.Linear", layer.get_submodule(name))


def norm_of(layer: nn.Module, site: Site) -> RMSNorm:
    """The RMSNorm of a decoder layer that produces what a site's linear layers read, where there is one."""
    return cast("RMSNorm", layer.get_submodule(cast(str, site.norm)))


def epsilon_of(norm: nn.Module) -> float:
    """What an RMSNorm adds to the mean square."""
    module = cast(Any, norm)
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def short_rope_tokens(model: nn.Module) -> int | None:
    """Longest text of the short frequencies in a model with LongRoPE (Phi-3-128k), which has others for longer texts.

    Keys cached under one set of frequencies mean nothing under the other. None for every other model.
    """
    rope = config_of(model).rope_parameters
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def attention_implementation(config: Any) -> str | None:
    """The attention function that a model needs: torch's own has no cap on scores. None leaves it to transformers."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _names(*projections: Projection) -> tuple[str, ...]:
    """Names of the linear layers of some projections, each once."""
    return tuple(dict.fromkeys(projection.name for projection in projections))


class _Projections(TypedDict):
    query: Projection
    key: Projection
    value: Projection
    gate: Projection
    up: Projection


def _separate(query_rows: int, kv_rows: int, intermediate_size: int) -> _Projections:
    """Llama's layout: one linear layer for each projection."""
    return {
        "query": Projection("self_attn.q_proj"),
        "key": Projection("self_attn.k_proj"),
        "value": Projection("self_attn.v_proj"),
        "gate": Projection("mlp.gate_proj"),
        "up": Projection("mlp.up_proj"),
    }


def _fused(query_rows: int, kv_rows: int, intermediate_size: int) -> _Projections:
    """Phi-3's layout: rows q, k, v in one linear layer and gate, up in another."""
    return {
        "query": Projection("self_attn.qkv_proj", (0, query_rows)),
        "key": Projection("self_attn.qkv_proj", (query_rows, query_rows + kv_rows)),
        "value": Projection("self_attn.qkv_proj", (query_rows + kv_rows, query_rows + 2 * kv_rows)),
        "gate": Projection("mlp.gate_up_proj", (0, intermediate_size)),
        "up": Projection("mlp.gate_up_proj", (intermediate_size, 2 * intermediate_size)),
    }


def _experts(query_rows: int, kv_rows: int, width: int) -> _Projections:
    """Mixtral's layout as transformers has it: Llama's attention, and gate above up in one linear layer an expert."""
    return {
        **_separate(query_rows, kv_rows, width),
        "gate": Projection("mlp.experts.0.gate_up_proj", (0, width)),
        "up": Projection("mlp.experts.0.gate_up_proj", (width, 2 * width)),
    }


@dataclass(frozen=True)
class Experts:
    """Fields of a configuration that say how many experts a layer has, and how wide one is."""

    count: str
    width: str


@dataclass(frozen=True)
class Family:
    """What is special about the layers of a family; the defaults are Llama's.

    norms: the RMSNorms before attention and MLP, None where these read the residual stream as it is.
    post_norms: RMSNorms between a block's output and the residual stream.
    head_norms: whether queries and keys have an RMSNorm of their own before RoPE: of each `head`, or of `all` together.
    norm_offset: as in `Architecture`.
    """

    projections: Callable[[int, int, int], _Projections] = _separate
    norms: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, ...] = ()
    head_norms: Literal["head", "all"] | None = None
    norm_offset: float = 0.0
    experts: Experts | None = None

    @property
    def traits(self) -> frozenset[Trait]:
        """What the layers have and Llama's have not."""
        found: dict[Trait, bool] = {
            "head_norms": self.head_norms is not None,
            "experts": self.experts is not None,
            "post_norms": bool(self.post_norms),
            "bare_inputs": None in self.norms,
            "offset_gains": self.norm_offset != 0.0,
        }
        return frozenset(trait for trait, there in found.items() if there)

    @property
    def head_norm_names(self) -> tuple[str, ...]:
        """Names of the RMSNorms of queries and keys."""
        return ("self_attn.q_norm", "self_attn.k_norm") if self.head_norms else ()

    def experts_of(self, name: str, count: int) -> tuple[str, ...]:
        """Names of one linear layer of every expert."""
        return tuple(f"mlp.experts.{index}.{name}" for index in range(count))


_GEMMA2 = Family(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norm_offset=1.0,
)

#: Known families by the `model_type` of their configuration.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms="head"),
    "phi3": Family(_fused),
    "mixtral": Family(_experts, experts=Experts("num_local_experts", "intermediate_size")),
    "qwen3_moe": Family(_experts, head_norms="head", experts=Experts("num_experts", "moe_intermediate_size")),
    "olmo2": Family(
        norms=(None, None), post_norms=("post_attention_layernorm", "post_feedforward_layernorm"), head_norms="all"
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, head_norms="head"),
}
