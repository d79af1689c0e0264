"""Convert a fake-quantized model to a decoder that computes with its integers: what `rotquant convert` does.

The codes and scales, or 2-bit codes and tables, are those that the weights stage stored, so no number is quantized
again. What the kernels cannot compute is refused, one sentence naming the setting; nothing is approximated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rotquant.decoder.config import LINEARS, CacheScheme, DecoderConfig, InputScheme, LinearName, Precision
from rotquant.decoder.linear import PackedLinear
from rotquant.decoder.model import Decoder
from rotquant.foundation.errors import RecipeError
from rotquant.kernels.products.linear import GROUP_SIZE, PackedWeight
from rotquant.kernels.products.lut import LutWeight, spread_weight
from rotquant.kernels.products.w4a16 import HalfWeight
from rotquant.models.architectures import FAMILIES, Architecture, Site, architecture_of, rotary
from rotquant.models.checkpoints import load_config
from rotquant.models.integrity import check_changed
from rotquant.models.limits import ModelLimits
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from rotquant.recipes.traits import TRAITS
from rotquant.tensors.codebook import CodebookWeight
from rotquant.tensors.quantization import QParams
from rotquant.weights.build import runtime_quantization
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.storage import StoredModel, StoredTensors, read_manifest, read_quantized

#: What the decoder's layers may have that Llama's have not.
_TRAITS = frozenset({"head_norms", "post_norms", "bare_inputs", "offset_gains"})
#: transformers' names of the decoder's activations.
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
#: Families that multiply embeddings by the root of their width.
_SCALED_EMBEDDINGS = ("gemma2", "gemma3_text")
#: transformers' name of layers whose attention has a window, and may have a rotary embedding of its own.
_LOCAL = "sliding_attention"
#: Stored weights that kernels multiply: codes into tables, and integers with scales.
_KINDS = (CodebookWeight, QuantizedWeight)
_POST_NORMS = ("attention_post_norm", "mlp_post_norm")
#: Rotary embeddings whose frequencies do not depend on the length of the text.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def convert(source: str | Path | StoredModel, *, dtype: str = "float16", device: torch.device | str = "cpu") -> Decoder:
    """A decoder with the integers of a quantized model.

    Args:
        source: a folder that `rotquant quantize` wrote, or the result of `build_weights`.
        dtype: of what stays floating point: float16, bfloat16 or float32.

    Raises:
        RecipeError: the recipe or the architecture asks for what the kernels do not compute.
        CheckpointError, ResultError: a missing or damaged folder, or numbers too large for `dtype`.
    """
    if isinstance(source, StoredModel):
        precision = _checked(source.manifest.recipe, source.model.config, dtype)
        stored = StoredTensors(source.model.config, source.model.state_dict(), source.weights, source.state)
    else:
        precision = _checked(read_manifest(source).recipe, load_config(Path(source)), dtype)
        stored = read_quantized(source)
    decoder = _Conversion(stored, precision).decoder(device)
    check_changed(decoder, f"conversion to {dtype}")
    return decoder


def check_convertible(recipe: Recipe, config: Any) -> None:
    """Say whether what a recipe will make of a model can be converted, by its transformers configuration.

    Raises:
        RecipeError: the kernels do not compute it.
    """
    precision = _checked(recipe, config)
    kind = next((one.stored_as for one in recipe.methods.values() if "rounding" in one.roles), "integers")
    _check_kind(precision, tables=kind == "codebook", integers=kind == "integers")


def _checked(recipe: Recipe, config: Any, dtype: str = "float16") -> Precision:
    """The precision of a decoder of a recipe and a configuration, whatever kind its weights are stored as."""
    check_config(config)
    precision = precision_of(recipe, dtype)
    size = precision.table_group if precision.weights == "lut2" else GROUP_SIZE
    if size is not None and precision.weights in ("int4-grouped", "lut2"):
        for site in architecture_of(config).sites:
            _refuse(
                bool(site.features % size),
                f"{site.features} features of {site.name} for groups of {size} weights",
                "the kernels' groups are whole ones",
            )
    return precision


def precision_of(recipe: Recipe, dtype: str = "float16") -> Precision:
    """The precision that computes what a recipe simulates.

    Raises:
        RecipeError: the kernels do not compute it.
    """
    _refuse(recipe.weights is None, "unquantized weights", "the decoder's weights are integers")
    for method in recipe.methods.values():
        unknown = method.acts_at_run_time and method.roles != {"prefix"}
        _refuse(unknown, method.title, "the kernels know nothing of what this method does at run time")
        ordered = f"groups of columns that {method.title} has reordered"
        _refuse(method.reorders(recipe), ordered, "the kernels' groups are of neighbours")
    _refuse(recipe.attention_output is not None, "o_proj inputs of their own", "the kernels quantize every input alike")
    weights, inputs = cast(WeightQuantization, recipe.weights).scheme, recipe.activations
    online = tuple(one for one in recipe.transforms if one.online)
    for one in online:
        _refuse(one.size is not None, f"{one.name} in blocks", "the kernels transform whole inputs of linear layers")
    _check_weights(weights)
    if inputs is not None:
        _check_inputs(inputs, (4,) if weights.bits == 2 else (4, 8))
    return Precision(
        dtype=dtype,  # pyright: ignore[reportArgumentType]  # checked at run time
        weights="lut2" if weights.bits == 2 else "int4-grouped" if weights.granularity == "group" else "int4",
        table_group=weights.group_size if weights.bits == 2 else GROUP_SIZE,
        inputs=inputs
        and InputScheme(bits=cast(Any, inputs.bits), clip_ratio=inputs.clip_ratio, static=not inputs.dynamic),
        cache=_cache_scheme(recipe.keys, recipe.values),
        transforms=online,
    )


def _check_weights(scheme: QuantizationScheme) -> None:
    """Raise `RecipeError` for weights that no kernel multiplies."""
    _refuse(scheme.type == "float", f"weights that are {scheme.bits}-bit floats", "the kernels multiply integers")
    _refuse(
        scheme.bits not in (2, 4),
        f"{scheme.bits}-bit weights",
        "the kernels multiply 4-bit weights, and 2-bit codes into tables; others are simulated",
    )
    if scheme.bits == 2:
        _refuse(scheme.granularity == "tensor", "2-bit weights per tensor", "each output feature has tables of its own")
        return
    _refuse(not scheme.symmetric, "asymmetric weights", "the kernels' 4-bit weights have no zero points")
    _refuse(
        scheme.granularity == "group" and scheme.group_size != GROUP_SIZE,
        f"groups of {scheme.group_size} weights",
        f"the kernels scale each output feature, or groups of {GROUP_SIZE}",
    )


def _check_kind(precision: Precision, *, tables: bool, integers: bool) -> None:
    """Raise `RecipeError` for weights of another kind than the kernel's."""
    if precision.weights == "lut2":
        _refuse(not tables, "2-bit weights without tables", "the kernels multiply 2-bit codes into tables")
    else:
        _refuse(not integers, "4-bit weights without scales", "the kernels multiply integers and scale the sums")


def _check_inputs(scheme: QuantizationScheme, bits: tuple[int, ...]) -> None:
    """Raise `RecipeError` for inputs of linear layers that no kernel takes with the weights."""
    why = f"with these weights the kernels take {' or '.join(map(str, bits))} bits"
    _refuse(scheme.bits not in bits, f"{scheme.bits}-bit inputs", why)
    _refuse(not scheme.symmetric, "asymmetric inputs", "the kernels' inputs have no zero points")
    full = scheme.dynamic and scheme.scale == "full"
    _refuse(full, "input scales over all steps", "the kernels' scales are the largest value over the largest code")
    expected = "token" if scheme.dynamic else "tensor"
    _refuse(
        scheme.granularity != expected,
        f"{'dynamic' if scheme.dynamic else 'static'} input scales per {scheme.granularity}",
        "the kernels take dynamic scales per token or static ones per tensor",
    )


def check_config(config: Any) -> None:
    """Raise `RecipeError` for what a transformers configuration asks for and the decoder does not compute."""
    unknown = sorted(architecture_of(config).traits - _TRAITS)
    has = " and ".join(TRAITS[trait] for trait in unknown)
    _refuse(bool(unknown), has, "no kernel computes that")
    capped = bool(getattr(config, "attn_logit_softcapping", None))
    _refuse(capped, "a cap on attention's scores", "the kernels' attention has none")
    both = bool(getattr(config, "use_bidirectional_attention", None))
    _refuse(both, "attention in both directions", "the kernels' attention is causal")
    activation = _activation(config)
    _refuse(
        activation not in _ACTIVATIONS, f"the activation {activation}", "the decoder's MLP has SiLU or GELU by tanh"
    )
    for rope in _ropes(config).values():
        _refuse(
            rope["rope_type"] not in _ROPE_TYPES,
            f"{rope['rope_type']} rotary embeddings",
            "their frequencies change with the length of the text",
        )
        _refuse(rope.get("partial_rotary_factor", 1.0) != 1.0, "partly rotated heads", "the kernels rotate whole heads")


def _activation(config: Any) -> str:
    """transformers' name of the activation of the gate."""
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Parameters of the rotary embeddings by the type of layers that have them, "" where all have one."""
    rope = config.rope_parameters
    return {"": rope} if "rope_type" in rope else {kind: rope[kind] for kind in sorted(set(config.layer_types))}


def _cache_scheme(keys: QuantizationScheme | None, values: QuantizationScheme | None) -> CacheScheme | None:
    if keys is None and values is None:
        return None
    why = "the kernels' cache is 4-bit, asymmetric with dynamic scales or symmetric with static ones, or 16-bit"
    if keys is None or values is None:
        raise _refusal("a cache that is half quantized", why)
    _refuse(keys.dynamic != values.dynamic, "a cache whose scales are half static", why)
    for scheme in (keys, values):
        _refuse(scheme.bits != 4, f"a {scheme.bits}-bit cache", why)
        _refuse(scheme.rule != "own", "a cache by vLLM's rule", why)
        _refuse(any(scheme.kept), "a cache that keeps tokens in full precision", why)
        _refuse(scheme.dynamic and scheme.symmetric, "a symmetric cache with dynamic scales", why)
        _refuse(not scheme.dynamic and not scheme.symmetric, "an asymmetric cache with static scales", why)
        _refuse(
            scheme.zero_point != "whole",
            "a cache with exact zero points",
            "the kernels' zero points are whole, since they multiply codes",
        )
        _refuse(
            not scheme.dynamic and (scheme.granularity not in ("head", "tensor") or scheme.group_size is not None),
            f"static scales of a cache per {scheme.granularity}",
            "the kernels take one for each head, or for all",
        )
    if not keys.dynamic:
        return CacheScheme(static=True)
    _refuse(keys.group_size != values.group_size, "groups of different size for keys and values", why)
    return CacheScheme(key_clip=keys.clip_ratio, value_clip=values.clip_ratio, group_size=keys.group_size)


def _refuse(condition: bool, what: str, why: str) -> None:
    if condition:
        raise _refusal(what, why)


def _refusal(what: str, why: str) -> RecipeError:
    return RecipeError(f"the model has {what}, which cannot be converted: {why}.")


class _Conversion:
    """State of one call of `convert`: the stored tensors, and where they go."""

    def __init__(self, stored: StoredTensors, precision: Precision) -> None:
        self.stored, self.precision = stored, precision
        self.dtype = getattr(torch, precision.dtype)
        self.architecture: Architecture = architecture_of(stored.config)
        self.root = "model"
        self.prefix = runtime_quantization(stored.state.recipe, stored.state).prefix

    def decoder(self, device: torch.device | str) -> Decoder:
        """The decoder, filled, on `device`; weights are packed one linear layer at a time."""
        decoder = Decoder(self.config(), self.precision, "meta")
        tensors = {"embedding": self._float(f"{self.root}.embed_tokens.weight")}
        if not decoder.config.tied:
            tensors["head"] = self._float("lm_head.weight")
        if decoder.norm is not None:
            tensors["norm"] = self._gain(f"{self.root}.norm.weight")
        for index, layer in enumerate(decoder.layers):
            tensors |= {f"layers.{index}.{name}": tensor for name, tensor in self._layer(index, layer).items()}
        decoder.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
        return decoder.eval()

    def config(self) -> DecoderConfig:
        """The decoder's shape, from the transformers configuration."""
        config, shape = self.stored.config, self.architecture
        (frequencies, rope_scale), *others = _rotary_frequencies(config)
        local = [index for index, kind in enumerate(config.layer_types) if kind == _LOCAL] if others else []
        window = ModelLimits.of(config).window
        return DecoderConfig(
            vocabulary=config.vocab_size,
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            layers=shape.num_layers,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            norm_eps=config.rms_norm_eps,
            inverse_frequencies=tuple(frequencies),
            rope_scale=rope_scale,
            max_positions=min(config.max_position_embeddings, window or config.max_position_embeddings),
            input_norms="bare_inputs" not in shape.traits,
            post_norms="post_norms" in shape.traits,
            head_norms="all" if FAMILIES[shape.family].head_norms == "all" else "head_norms" in shape.traits,
            activation=_ACTIVATIONS[_activation(config)],
            embedding_scale=shape.hidden_size**0.5 if shape.family in _SCALED_EMBEDDINGS else 1.0,
            local_layers=tuple(local),
            local_frequencies=tuple(others[0][0]) if others else (),
            window=window,
            biases=tuple(name for name, site in self._sites() if self._bias(0, site) is not None),
            norm_gains=not self.stored.state.recipe.fuses_norms,
            tied="lm_head.weight" not in self.stored.floats or config.tie_word_embeddings,
            prefix=0 if self.prefix is None else self.prefix.tokens,
            prefix_ids=() if self.prefix is None else self.prefix.ids,
        )

    def _sites(self) -> list[tuple[LinearName, Site]]:
        """The decoder's linear layers and the sites they stand at; both are in order of execution."""
        return list(zip(LINEARS, self.architecture.sites, strict=True))

    def _layer(self, index: int, layer: nn.Module) -> dict[str, Tensor]:
        """The tensors of one decoder layer by the decoder's names."""
        tensors = {}
        for name, site in self._sites():
            linear: PackedLinear = getattr(layer, name)
            names = [self._name(index, part, "weight") for part in site.linears]
            packed = _packed({weight: self.stored.weights[weight] for weight in names}, self.precision)
            tensors |= {f"{name}.{buffer}": tensor for buffer, tensor in packed.items()}
            if linear.bias is not None:
                tensors[f"{name}.bias"] = self._bias(index, site)
            if linear.inputs.static_scale is not None:
                qparams: QParams = self.stored.state.static[index, site.name]
                tensors[f"{name}.inputs.static_scale"] = qparams.scale.float().reshape(1)
            if site.norm is not None and not self.stored.state.recipe.fuses_norms:
                gain = {"qkv": "attention_norm", "gate_up": "mlp_norm"}[name]
                tensors[gain] = self._gain(self._name(index, site.norm, "weight"))
            if linear.inputs.matrix is not None:
                tensors[f"{name}.inputs.matrix"] = self.stored.state.rotations[site.name][index].to(self.dtype)
        if layer.query_norm is not None:
            # Scores are scaled by 1 / sqrt(head_dim) here, and by 1 / sqrt(query_pre_attn_scalar) in Gemma.
            scale = self.architecture.head_dim / getattr(
                self.stored.config, "query_pre_attn_scalar", self.architecture.head_dim
            )
            for name, norm, factor in (("query_norm", "q_norm", scale**0.5), ("key_norm", "k_norm", 1.0)):
                place = self._name(index, f"{self.architecture.attention}.{norm}", "weight")
                tensors[name] = self._gain(place, factor)
        for name, norm in zip(_POST_NORMS, FAMILIES[self.architecture.family].post_norms, strict=False):
            tensors[name] = self._gain(self._name(index, norm, "weight"))
        if self.prefix is not None:
            tensors["prefix_keys"] = self.prefix.keys[index].to(self.dtype)
            tensors["prefix_values"] = self.prefix.values[index].to(self.dtype)
        if self.precision.cache is not None and self.precision.cache.static:
            for name, what in (("key_scale", "keys"), ("value_scale", "values")):
                scale = self.stored.state.static[index, what].scale  # of each head, or one for all
                tensors[name] = scale.float().reshape(-1).expand(self.architecture.num_kv_heads).contiguous()
        return tensors

    def _bias(self, index: int, site: Site) -> Tensor | None:
        """The biases of a site's linear layers, one after another, zeros where only some have one; or None."""
        floats, weights = self.stored.floats, self.stored.weights
        found = [floats.get(self._name(index, part, "bias")) for part in site.linears]
        if all(bias is None for bias in found):
            return None
        rows = [weights[self._name(index, part, "weight")].shape[0] for part in site.linears]
        parts = [torch.zeros(n) if bias is None else bias for bias, n in zip(found, rows, strict=True)]
        return torch.cat([part.to(self.dtype) for part in parts])

    def _float(self, name: str) -> Tensor:
        return self.stored.floats[name].detach().to(self.dtype)

    def _gain(self, name: str, factor: float = 1.0) -> Tensor:
        """What a norm multiplies by, times a factor."""
        weight = self.stored.floats[name].detach().double()
        return (factor * (weight + self.architecture.norm_offset)).to(self.dtype)

    def _name(self, index: int, part: str, what: str) -> str:
        return f"{self.root}.layers.{index}.{part}.{what}"


def _packed(parts: Mapping[str, Any], precision: Precision) -> dict[str, Tensor]:
    """Stored weights that read one input, by name, as the buffers of the linear layer that they are together.

    Raises:
        RecipeError: weights of another kind than the layer's.
    """
    tables, integers = (all(isinstance(part, kind) for part in parts.values()) for kind in _KINDS)
    _check_kind(precision, tables=tables, integers=integers)
    if precision.weights == "lut2":
        lut = pack_tables(parts)
        return {"codes": lut.codes, "table": lut.table}
    kind = HalfWeight if precision.inputs is None else PackedWeight
    packed = kind.pack(*joined(list(parts.values())))
    return {"codes": packed.codes, "scale": packed.scale}


def pack_tables(parts: Mapping[str, CodebookWeight]) -> LutWeight:
    """2-bit weights that read the same input, by name, as one: their rows one after another.

    Raises:
        RecipeError: levels that float16, the type of the kernel's tables, does not hold.
    """
    for name, part in parts.items():
        exact = torch.equal(part.levels.to(torch.float16).to(part.levels.dtype), part.levels)
        _refuse(not exact, f"levels in {name} that are no float16 numbers", "the kernels' tables are float16")
    codes, levels = (torch.cat([getattr(part, what) for part in parts.values()]) for what in ("codes", "levels"))
    return LutWeight.pack(*spread_weight(codes, levels))


def joined(parts: list[QuantizedWeight]) -> tuple[Tensor, Tensor]:
    """Codes [out, in] and scales [out, groups] of several weights that read the same input, their rows in order."""
    codes = torch.cat([part.codes for part in parts])
    if parts[0].scheme.granularity == "group":
        scale = torch.cat([part.qparams.scale.squeeze(-1) for part in parts])  # [out, groups]
    else:  # one scale per row, or one for a whole weight
        scale = torch.cat([part.qparams.scale.reshape(-1, 1).expand(len(part.codes), 1) for part in parts])
    return codes, scale.float()


def _rotary_frequencies(config: Any) -> list[tuple[list[float], float]]:
    """Inverse frequencies of transformers' rotary embeddings for a configuration, and their scales of cos and sin; of
    two, those of local layers come last."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    with torch.device("meta"):
        module = rotary(cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config))
    real = type(module)(config=config)
    names = [f"{kind}_" if kind else "" for kind in sorted(_ropes(config), key=lambda kind: kind == _LOCAL)]
    return [
        (getattr(real, f"{name}inv_freq").tolist(), float(getattr(real, f"{name}attention_scaling"))) for name in names
    ]
