"""The running half of a recipe: online transforms and quantizers, put into a model by forward hooks, and taken out.

Inputs of linear layers are quantized where they arise, once for all linear layers that read them (QuaRot Sec. 4, stage
2b); online transforms (R4, heads, R3) come before the quantizers. Weights and module types are never touched.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.models.architectures import (
    Architecture,
    Site,
    architecture_of,
    base_model,
    config_of,
    decoder_layers,
    short_rope_tokens,
)
from rotquant.models.fitting import check_transforms
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.kv_cache import (
    KVQuantizer,
    QuantizedCache,
    TransientCache,
    check_cache_scheme,
    kept_mask,
)
from rotquant.models.simulation.prefix import Prefix, PrefixMark, check_prefix
from rotquant.models.transforms import Chain, check_tensors, of_layer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Transform, at_site
from rotquant.tensors.quantization import (
    ColumnSplit,
    QParams,
    Texts,
    check_groups,
    choose_qparams,
    fake_quantize,
    fake_quantize_split,
    fake_quantize_texts,
)

if TYPE_CHECKING:

    class Removable(Protocol):
        """A change of a model that can be undone: torch's hooks, and what a method attaches."""

        def remove(self) -> None: ...


__all__ = [
    "ColumnSplit",
    "Handle",
    "RuntimeQuantization",
    "SiteKey",
    "check_quantization",
    "scales_by_text",
    "wrap",
]

#: Index of a decoder layer and name of a site in it.
SiteKey = tuple[int, str]


@dataclass(frozen=True)
class RuntimeQuantization:
    """Quantizers and transforms that act while the model runs. Every field is optional; an empty one changes nothing.

    transforms: of them the online ones act; the weights must have the inverses, and what is fused.
    activations: quantizer of every site, the input of every linear layer but lm_head.
    keys, values: quantizers of the KV cache.
    outliers: sites whose features are split into normal ones and outliers.
    tensors: what online transforms are made of, by name, stacked over layers.
    static: scales of sites, and of `keys` and `values`, by (layer, name), read where `activations`, `keys` or `values`
        are not dynamic.
    scale_gradients: whether training differentiates dynamic scales too (OmniQuant's code) or takes them as constants.
    attention_output: quantizer of o_proj's input in place of `activations`: one scale for each head (SpinQuant, which
        has no transform across heads). Granularity `head`, dynamic.
    prefix: what stands in the KV cache before every text.
    exact: sites by (layer, site) whose input is not quantized.
    clips: clip ratios of sites by (layer, site) where they are not their quantizer's own.
    """

    transforms: tuple[Transform, ...] = ()
    activations: QuantizationScheme | None = None
    keys: QuantizationScheme | None = None
    values: QuantizationScheme | None = None
    outliers: Mapping[SiteKey, ColumnSplit] = field(default_factory=dict)
    static: Mapping[SiteKey, QParams] = field(default_factory=dict)
    scale_gradients: bool = False
    attention_output: QuantizationScheme | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    prefix: Prefix | None = None
    exact: frozenset[SiteKey] = frozenset()
    clips: Mapping[SiteKey, float] = field(default_factory=dict)

    def scheme_of(self, site: Site, head_dim: int) -> QuantizationScheme | None:
        """The quantizer of a site; `head` becomes groups of `head_dim` features."""
        if site.name != "attention_output" or self.attention_output is None:
            return self.activations
        return self.attention_output.model_copy(update={"granularity": "group", "group_size": head_dim})

    def with_transforms(self, transforms: Iterable[Transform], tensors: Mapping[str, Tensor]) -> "RuntimeQuantization":
        """Add transforms, which act after the others at their locations, and what they are made of."""
        return replace(self, transforms=(*self.transforms, *transforms), tensors={**self.tensors, **tensors})

    def cache(self, **schemes: QuantizationScheme | None) -> KVQuantizer:
        """The quantizer of keys and values; schemes: of `keys` and `values`, in place of its own."""
        chosen = {"keys": self.keys, "values": self.values, **schemes}
        return KVQuantizer(
            **chosen,
            transforms=self.transforms,
            scale_gradients=self.scale_gradients,
            prefix=self.prefix,
            static=self.static,
            tensors=self.tensors,
        )


class Handle:
    """Removes what `wrap` installed; also a context manager. Removing twice does nothing."""

    def __init__(self) -> None:
        self._hooks: list[Removable] = []

    def add(self, hook: "Removable") -> None:
        """Remember a hook to remove."""
        self._hooks.append(hook)

    def remove(self) -> None:
        """Restore the model exactly."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def wrap(
    model: nn.Module, quantization: RuntimeQuantization, observe: Callable[[Site, Tensor], object] | None = None
) -> Handle:
    """Install `quantization` into a supported transformers causal language model.

    At each site the online transforms and the quantizer are separate hooks, in this order; hooks that the caller adds
    to a linear layer afterwards see its input after both. Of `transforms` alone: rotated, unquantized inputs.

    Args:
        observe: gets the input of every site, [..., features], after the transforms and before the quantizer.

    Raises:
        RecipeError: a group size or a transform does not fit, a Hadamard matrix is not known, or tensors or static
            scales are missing; the model is untouched then.
    """
    architecture = architecture_of(model)
    check_quantization(architecture, quantization)
    if quantization.prefix is not None:
        check_prefix(model, quantization.prefix)
    handle, texts = Handle(), _Texts()
    if quantization.prefix is not None:
        handle.add(PrefixMark(model, quantization.prefix))
    for index, layer in enumerate(decoder_layers(model)):
        tensors = of_layer(quantization.tensors, index)
        for site in architecture.sites:
            chain = Chain(at_site(quantization.transforms, site.name), tensors, architecture.num_heads)
            hook_site(handle, layer, site, chain or None)
            hook_site(handle, layer, site, observe and partial(_observed, observe, site))
            hook_site(handle, layer, site, _quantizer(index, site, quantization, architecture.head_dim, texts))
    if texts.needed:
        texts.watch(handle, model)
    if any(part is not None for part in (quantization.keys, quantization.values, quantization.prefix)):
        _wrap_cache(handle, model, architecture, quantization.cache())
    return handle


def check_quantization(architecture: Architecture, quantization: RuntimeQuantization) -> None:
    """Raise `RecipeError` for anything in `quantization` that does not fit the model."""
    check_transforms(architecture, quantization.transforms)
    check_tensors(architecture, quantization.transforms, quantization.tensors)
    for what in ("keys", "values"):
        check_cache_scheme(getattr(quantization, what), architecture.head_dim, what)
    if quantization.attention_output is not None and quantization.attention_output.granularity != "head":
        raise RecipeError(f"attention_output takes granularity head, not {quantization.attention_output.granularity}.")
    for index in range(architecture.num_layers):
        for site in architecture.sites:
            scheme = quantization.scheme_of(site, architecture.head_dim)
            if scheme is None or (index, site.name) in quantization.exact:
                continue
            split = quantization.outliers.get((index, site.name))
            normal = site.features - (split.outliers if split else 0)
            where = f"layer {index}'s {' and '.join(site.linears)}" + (" that are not outliers" if split else "")
            check_groups(normal, scheme, where)
            if not scheme.dynamic:
                _check_static(quantization, index, site.name)
        for what in ("keys", "values"):
            scheme = getattr(quantization, what)
            if scheme is not None and not scheme.dynamic:
                _check_static(quantization, index, what)


def _check_static(quantization: RuntimeQuantization, index: int, name: str) -> None:
    """Raise `RecipeError` where a layer's static scales of a site, or of `keys` or `values`, are missing."""
    if (index, name) not in quantization.static:
        raise RecipeError(f"static scales are missing for layer {index}, {name}: calibrate them.")


def hook_site(handle: Handle, layer: nn.Module, site: Site, function: Callable[[Tensor], Tensor] | None) -> None:
    """Apply `function` to what the linear layers of a site read: at the norm before them, or else at the one layer."""
    if function is None:
        return
    if site.norm is not None:
        norm = layer.get_submodule(site.norm)
        handle.add(
            norm.register_forward_hook(
                lambda _module, _inputs, output: function(output)  # pyright: ignore[reportArgumentType]  # no kwargs
            )
        )
    else:
        for name in site.linears:
            linear = layer.get_submodule(name)
            own = function.of_expert(linear) if site.experts and isinstance(function, _Quantizer) else function
            handle.add(linear.register_forward_pre_hook(partial(_changed_input, own)))


def _changed_input(
    function: Callable[[Tensor], Tensor], _module: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (function(inputs[0]), *inputs[1:])


def _observed(observe: Callable[[Site, Tensor], object], site: Site, x: Tensor) -> Tensor:
    observe(site, x)
    return x


def scales_by_text(model: nn.Module) -> bool:
    """Whether inputs of a model have one dynamic scale for each text, so that it must know which tokens are one.

    Each row is a text then, but for the tokens that its `attention_mask` [batch, tokens] hides.
    """
    return hasattr(base_model(model), _BY_TEXT)


#: Where a base model says that its inputs' scales are those of texts.
_BY_TEXT = "_rotquant_scales_by_text"


class _Texts:
    """The texts of the pass that runs, for quantizers with one dynamic scale for each.

    A text is what a row holds, or one of several that its positions count from the start. The tokens of a pass that
    begins texts share each text's scale; after it each token has its own, as it is decoded alone.
    """

    def __init__(self) -> None:
        self.needed = False
        self.current: Texts | None = None
        self._shape = (0, 0)
        self._model: nn.Module

    def of(self, x: Tensor, routed: Tensor | None = None) -> Texts | None:
        """The texts of x [batch, tokens, features], or of an expert's tokens [routed, features]; None: of rows."""
        if routed is None:
            return self.current
        return (self.current or Texts.of_rows(self._shape, x.device)).at(routed)

    def watch(self, handle: Handle, model: nn.Module) -> None:
        """See every pass of a model, and of its decoder layers where these run by themselves."""
        self._model = base_model(model)
        setattr(self._model, _BY_TEXT, True)
        handle.add(self)
        handle.add(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        handle.add(self._model.register_forward_hook(self._end, always_call=True))
        for layer in decoder_layers(model):
            handle.add(layer.register_forward_pre_hook(self._enter))

    def remove(self) -> None:
        """The model's inputs have no scales of texts any more."""
        delattr(self._model, _BY_TEXT)

    def _enter(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._shape = tuple(args[0].shape[:2])

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, given = named(module, args, kwargs)
        kept = given.get("use_cache")
        self.current = _texts_of(given, cast(Any, module).config.use_cache if kept is None else kept)

    def _end(self, *_: Any) -> None:
        self.current = None


def _texts_of(kwargs: dict[str, Any], kept: bool) -> Texts | None:
    """The texts of a pass of a base model; None where each row is one.

    Args:
        kept: whether the pass keeps a cache.

    Raises:
        RotquantError: a text's later tokens come several at a time, or the mask is of pairs of tokens.
    """
    text, mask, cache = _text(kwargs), kwargs.get("attention_mask"), kwargs.get("past_key_values")
    batch, new = text.shape[:2]
    if new > 1 and cache is not None and cache.get_seq_length():
        raise RotquantError(
            "inputs have one dynamic scale for each text, which pieces of it would change: pass a text at once, and "
            "after it one token at a time."
        )
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        raise RotquantError(
            "inputs have one dynamic scale for each text, and a mask of pairs does not say which tokens are one: pass "
            "attention_mask [batch, tokens], a text in each row."
        )
    numbers, texts = torch.zeros(batch, new, dtype=torch.long, device=text.device), 1
    if mask is None:
        packed = None if kept else packed_texts(kwargs.get("position_ids"), cache)
        if packed is None:
            return None
        numbers, texts = packed.to(text.device).expand(batch, new), int(packed.max()) + 1
    else:
        numbers = numbers.masked_fill(mask[:, -new:].to(text.device) == 0, texts)
    rows = torch.arange(batch, device=text.device)[:, None] * (texts + 1)
    return Texts(rows + numbers, batch * (texts + 1))


def packed_texts(positions: Tensor | None, cache: Any) -> Tensor | None:
    """Which text of its row each token belongs to, int64 [rows, tokens], where positions begin anew within rows.

    As transformers finds them, where there is neither mask nor cache. None: each row is one text.
    """
    if positions is None or positions.ndim != 2 or (cache is not None and not isinstance(cache, TransientCache)):
        return None
    numbers = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return numbers if bool(numbers[:, -1].any()) else None


def _quantizer(
    index: int, site: Site, quantization: RuntimeQuantization, head_dim: int, texts: _Texts
) -> Callable[[Tensor], Tensor] | None:
    """The quantizer of one site of layer `index`."""
    scheme = quantization.scheme_of(site, head_dim)
    if scheme is None or (index, site.name) in quantization.exact:
        return None
    if (clip := quantization.clips.get((index, site.name))) is not None:
        scheme = scheme.model_copy(update={"clip_ratio": clip})
    static = None if scheme.dynamic else quantization.static[index, site.name]
    split = quantization.outliers.get((index, site.name))
    by_text = scheme.dynamic and scheme.granularity == "tensor"
    texts.needed |= by_text
    return _Quantizer(scheme, split, static, quantization.scale_gradients, texts if by_text else None)


@dataclass
class _Quantizer:
    """The quantizer of a site, whose tensors follow the activations from device to device (layers stream).

    texts: of the pass that runs, where each has its own scale. expert: the linear layer whose input is quantized, which
    reads the tokens that are routed to it.
    """

    scheme: QuantizationScheme
    split: ColumnSplit | None
    static: QParams | None
    scale_gradients: bool
    texts: _Texts | None
    expert: Any = None

    def of_expert(self, linear: nn.Module) -> "_Quantizer":
        """The same for one expert's linear layer."""
        return replace(self, expert=linear)

    def __call__(self, x: Tensor) -> Tensor:
        if self.static is not None and self.static.scale.device != x.device:
            self.static = self.static.to(x.device)
        texts = self.texts and self.texts.of(x, self.expert and self.expert.routed)
        if self.split is None:
            if self.static is not None:
                whole = self.static
                static = choose_qparams(x, self.scheme, global_scale=whole.scale) if self.scheme.fp4 else whole
                return fake_quantize(x, self.scheme, static)
            return fake_quantize_texts(x, self.scheme, self.scale_gradients, texts)
        if self.split.permutation.device != x.device:
            self.split = self.split.to(x.device)
        if self.texts and texts is None:
            texts = Texts.of_rows(x.shape[:2], x.device)
        return fake_quantize_split(x, self.scheme, self.split, self.static, texts)


def _wrap_cache(handle: Handle, model: nn.Module, architecture: Architecture, quantizer: KVQuantizer) -> None:
    """Make attention read keys and values through `quantizer`, whether or not the caller keeps a cache.

    Two levels: the base model is given a `QuantizedCache` where a cache is kept; attention without one (evaluation,
    training, gradient checkpointing, a decoder layer called by itself) gets a `TransientCache`.
    """

    limits = ModelLimits.of(cast(Any, model).config)
    attention = config_of(model)._attn_implementation
    if any(quantizer.kept) and not attention.startswith(("sdpa", "eager", "rotquant_")):
        raise RecipeError("tokens are kept in models with sdpa or eager attention: load the model with one.")

    def at_base(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = named(module, args, kwargs)
        cache, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
        if use_cache is None:
            use_cache = cast(Any, module.config).use_cache
        prefix = quantizer.prefix
        if cache is None and not use_cache and prefix is None:
            return args, kwargs
        _check_rope(module, kwargs, 0 if prefix is None else prefix.tokens)
        if prefix is not None and prefix.tokens:
            known = 0 if cache is None else cache.get_seq_length()  # padding too: a window counts places
            limits.check_prefix(prefix.tokens, known + _text(kwargs).shape[1])
        kept = cache is not None or use_cache
        cache = _own_cache(cache, quantizer) if kept else TransientCache(quantizer, prefix, any(quantizer.kept))
        shifted = {} if prefix is None else _after_prefix(prefix, kwargs, cache, next(module.parameters()).dtype)
        return args, {**kwargs, **shifted, "past_key_values": cache}

    def at_attention(
        index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = TransientCache(quantizer, quantizer.prefix, any(quantizer.kept))
        else:
            cache = _own_cache(cache, quantizer, replace=False)
        if any(quantizer.kept):
            args, kwargs = named(module, args, kwargs)
            hidden = kwargs["hidden_states"]
            queries, tokens = hidden.shape[1], cache.get_seq_length(index) + hidden.shape[1]
            kwargs["attention_mask"] = kept_mask(
                kwargs.get("attention_mask"), queries, tokens, quantizer.kept, hidden.device
            )
        return args, {**kwargs, "past_key_values": cache}

    handle.add(base_model(model).register_forward_pre_hook(at_base, with_kwargs=True))
    handle.add(base_model(model).register_forward_hook(_without_transient))
    for index, layer in enumerate(decoder_layers(model)):
        attention = layer.get_submodule(architecture.attention)
        handle.add(attention.register_forward_pre_hook(partial(at_attention, index), with_kwargs=True))


def _without_transient(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    """The output of a base model as without a cache, where it had one that stores nothing."""
    if not isinstance(getattr(output, "past_key_values", None), TransientCache):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "past_key_values"})


def _after_prefix(prefix: Prefix, kwargs: dict[str, Any], cache: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Positions and mask of a text, by which the model sees it after the prefix, and all of its tokens see that.

    A mask [batch, tokens] or one of every pair [batch, heads, tokens, tokens seen] is the caller's, of the text alone:
    the latter true or, of floating-point numbers, which are added to scores, zero where a token is seen.
    """
    mask, positions, text = kwargs.get("attention_mask"), kwargs.get("position_ids"), _text(kwargs)
    packed = packed_texts(positions, cache) if mask is None else None
    if positions is None:
        positions = torch.arange(text.shape[1], device=text.device)[None] + cache.get_seq_length()
    if packed is not None:
        seen = (packed[:, :, None] == packed[:, None, :]).tril().expand(len(text), -1, -1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=text.device)
        mask = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
    if mask is not None:
        seen = mask.new_zeros if mask.is_floating_point() and mask.ndim == 4 else mask.new_ones
        mask = torch.cat([seen(*mask.shape[:-1], prefix.tokens), mask], dim=-1)
    return {"position_ids": positions + prefix.tokens, "attention_mask": mask}


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """The arguments of a module's forward by their names."""
    return (), {**dict(zip(signature(module.forward).parameters, args, strict=False)), **kwargs}


def _text(kwargs: dict[str, Any]) -> Tensor:
    """The input of a base model, [batch, tokens] or [batch, tokens, hidden]."""
    return next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)


def _check_rope(module: nn.Module, kwargs: dict[str, Any], prefix: int) -> None:
    """Raise one clear error where a cached text grows past the point at which LongRoPE changes its frequencies.

    transformers' generate() drops the cache there, without computing it anew, and its continuation is nonsense.
    """
    limit = short_rope_tokens(module)
    if limit is None:
        return
    new = _text(kwargs).shape[1]
    positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
    if positions is not None:
        before = int(positions.max()) + 1 - new
    else:
        before = cache.get_seq_length() if cache is not None else 0
    if 0 < before + prefix <= limit < before + prefix + new:
        ways = "pass a longer text at once, stop before, or set use_cache=False"
        raise RotquantError(
            f"this model's LongRoPE has other frequencies for texts of more than {limit} tokens, for which cached keys "
            f"are wrong: {f'use texts of at most {limit - prefix} tokens after the prefix' if prefix else ways}."
        )


def _own_cache(cache: Any, quantizer: KVQuantizer, replace: bool = True) -> Any:
    """`cache` if `quantizer` made it, a new one in place of none, or an empty one of another kind, which becomes one;
    else an error."""
    if isinstance(cache, QuantizedCache | TransientCache) and cache.quantizer == quantizer:
        return cache
    if replace and cache is None:
        return QuantizedCache(quantizer)
    if replace and isinstance(cache, Cache) and cache.get_seq_length() == 0:
        return QuantizedCache.made_of(cache, quantizer)
    raise RotquantError(
        f"the model quantizes its KV cache, but was given a {type(cache).__name__} filled by something else; "
        "pass past_key_values=None and keep the cache that the first call returns."
    )
