"""A KV cache that stores integers: keys quantized after RoPE and R3, values at v_proj (QuaRot Sec. 4, stage 2c).

A token is quantized once, when it enters, by itself: prefill and decode see the same numbers. Keys come out rotated
back: scores are q (k_hat H^-1)^T = (q H) k_hat^T, those of QuaRot, and neither queries nor the attention implementation
change. Codes take one byte each; this simulates the arithmetic, not the memory saved.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rotquant.foundation.errors import RecipeError
from rotquant.models.simulation.prefix import Prefix
from rotquant.models.simulation.vllm_rotation import VllmRotation
from rotquant.models.transforms import Chain, of_layer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Location, Transform, at
from rotquant.tensors.quantization import QParams, check_groups, choose_qparams, dequantize, fake_quantize, quantize

if TYPE_CHECKING:

    class Quantizer(Protocol):
        """Interface of a quantizer that a cache without storage needs."""

        def fake(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]: ...


_VLLM_ROTATION = VllmRotation()
#: Where the transforms of a cache's keys and values are.
LOCATIONS: dict[str, Location] = {"keys": "queries_keys", "values": "values"}


@dataclass(frozen=True)
class KVQuantizer:
    """How keys and values [batch, kv heads, tokens, head_dim] are quantized; a None scheme leaves them as floats.

    transforms: the online ones of keys (R3) and values act before these are quantized, and are undone afterwards.
    tensors, scale_gradients: as in `RuntimeQuantization`.
    prefix: what stands in the cache before every text, in full precision.
    static: scales of static schemes by layer and `keys` or `values`, shaped as `static_shape`.
    """

    keys: QuantizationScheme | None
    values: QuantizationScheme | None
    transforms: tuple[Transform, ...] = ()
    scale_gradients: bool = False
    prefix: Prefix | None = None
    static: Mapping[tuple[int, str], QParams] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    _chains: dict[tuple[int, str], Chain] = field(default_factory=dict, init=False, compare=False)
    _placed: dict[tuple[int, str, torch.device], QParams] = field(default_factory=dict, init=False, compare=False)

    @property
    def kept(self) -> tuple[int, int]:
        """How many of the first and of the last tokens that a query sees it sees in full precision."""
        return next((scheme.kept for scheme in (self.keys, self.values) if scheme is not None), (0, 0))

    def __deepcopy__(self, _: dict[int, Any]) -> "KVQuantizer":
        """Itself: a copy of a cache, as of a prompt that several texts continue, is of the same quantizer."""
        return self

    def qparams(self, layer: int, what: str, device: torch.device) -> QParams | None:
        """A layer's static scales of `keys` or `values`, None where each token has its own."""
        scheme: QuantizationScheme | None = getattr(self, what)
        if scheme is None or scheme.dynamic:
            return None
        place = layer, what, device
        if place not in self._placed:
            self._placed[place] = self.static[layer, what].to(device)
        return self._placed[place]

    def chain(self, layer: int, what: str) -> Chain | VllmRotation:
        """A layer's transforms of `keys` or `values`; none where these are not quantized, since they would cancel."""
        scheme: QuantizationScheme | None = getattr(self, what)
        if scheme is not None and scheme.rule == "vllm":
            return _VLLM_ROTATION
        if (layer, what) not in self._chains:
            here = at(self.transforms, LOCATIONS[what], online=True) if getattr(self, what) is not None else ()
            tensors = of_layer(self.tensors, layer) if any(one.tensors for one in here) else {}
            self._chains[layer, what] = Chain(here, tensors)
        return self._chains[layer, what]

    def fake(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values as attention will see them, differentiable (straight-through); equal to encode and
        decode."""
        return self._fake(keys, self.keys, layer, "keys"), self._fake(values, self.values, layer, "values")

    def _fake(self, x: Tensor, scheme: QuantizationScheme | None, layer: int, what: str) -> Tensor:
        if scheme is None:
            return x
        chain, qparams = self.chain(layer, what), self.qparams(layer, what, x.device)
        return chain.inverse(fake_quantize(chain(x), scheme, qparams, self.scale_gradients))


def static_shape(scheme: QuantizationScheme, kv_heads: int) -> tuple[int, ...]:
    """The shape of static scales: of a cache one for each head, or one for all, as inputs have it."""
    return (kv_heads, 1, 1, 1) if scheme.granularity == "head" else ()


def static_qparams(x: Tensor, scheme: QuantizationScheme) -> QParams:
    """Static scales that cover keys (after R3) or values [batch, kv heads, tokens, head_dim]: see `static_shape`."""
    if scheme.granularity == "tensor":
        return choose_qparams(x, scheme)
    of_heads = choose_qparams(x.transpose(0, 1).flatten(1), scheme.model_copy(update={"granularity": "channel"}))
    return QParams(of_heads.scale.reshape(-1, 1, 1, 1))


def check_cache_scheme(scheme: QuantizationScheme | None, head_dim: int, what: str) -> None:
    """Raise `RecipeError` unless every token of every head can be quantized by itself with `scheme`."""
    if scheme is None:
        return
    if not scheme.dynamic:
        if scheme.granularity not in ("head", "tensor") or not scheme.symmetric:
            raise RecipeError(
                f"{what}: static scales of the KV cache are symmetric, with granularity 'head' or 'tensor'; choose "
                "these, or set dynamic: true."
            )
        return
    if scheme.granularity not in ("head", "group"):
        raise RecipeError(
            f"{what}: granularity {scheme.granularity!r} has no meaning in a cache that grows token by token; "
            "use 'head', or 'group' with a group_size of at most the head dimension."
        )
    check_groups(head_dim, scheme, f"an attention head ({what})")


def kept_mask(mask: Tensor | None, queries: int, tokens: int, kept: tuple[int, int], device: torch.device) -> Tensor:
    """The mask of attention to all tokens quantized, then to all in full precision: a query sees each token once.

    Args:
        mask: [batch, heads, queries, tokens], true or zero where a query sees a token; None: all before it and itself.
        kept: as `KVQuantizer.kept`.
        device: of the mask that stands in for None.

    Returns:
        [batch, heads, queries, 2 tokens], of the type of `mask`.
    """
    if mask is None:
        mask = torch.ones(1, 1, queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)
    seen = mask if mask.dtype == torch.bool else mask == 0
    place = seen.cumsum(-1)
    exact = (place <= kept[0]) | (place > place[..., -1:] - kept[1])
    both = torch.cat([seen & ~exact, seen & exact], dim=-1)
    if mask.dtype == torch.bool:
        return both
    return torch.zeros_like(both, dtype=mask.dtype).masked_fill_(~both, torch.finfo(mask.dtype).min)


class QuantizedCache(DynamicCache):
    """A transformers cache whose layers hold codes and scales. Grows without limit; works with generate().

    A prefix is in front of each layer's text and not part of its length; masks alone know of it.
    """

    def __init__(self, quantizer: KVQuantizer) -> None:
        super().__init__()
        self._begin(quantizer)

    @classmethod
    def made_of(cls, cache: Cache, quantizer: KVQuantizer) -> "QuantizedCache":
        """An empty cache of another kind, which becomes this one: who passed it keeps it, as with transformers."""
        cache.__class__ = cls
        made = cast(QuantizedCache, cache)
        made._begin(quantizer)
        return made

    def _begin(self, quantizer: KVQuantizer) -> None:
        self.quantizer, self.layers = quantizer, []
        self.layer_class_to_replicate = self._next_layer  # pyright: ignore[reportAttributeAccessIssue]  # only called

    def _next_layer(self) -> "QuantizedCacheLayer":
        return QuantizedCacheLayer(self.quantizer, len(self.layers))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """How many tokens stand before the next one."""
        return super().get_query_offset(layer_idx) + _tokens(self.quantizer.prefix)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens so many new ones will see, and where these begin."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length + _tokens(self.quantizer.prefix), offset


class TransientCache:
    """Stands in for a cache where none is kept: attention sees quantized keys and values, and nothing is stored."""

    def __init__(self, quantizer: "Quantizer", prefix: Prefix | None = None, keeps: bool = False) -> None:
        self.quantizer, self.prefix, self.keeps = quantizer, prefix, keeps

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of this call, quantized and dequantized, after the prefix; again as they are, where some are
        kept."""
        keys, values = self.quantizer.fake(key_states, value_states, layer_idx)
        if self.keeps:
            keys, values = _append(keys, key_states), _append(values, value_states)
        return (keys, values) if self.prefix is None else self.prefix.before(layer_idx, keys, values)

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """No text is stored."""
        return 0

    def get_query_offset(self, _layer_idx: int = 0) -> int:
        """How many tokens stand before a text."""
        return _tokens(self.prefix)

    def get_mask_sizes(self, query_length: int, _layer_idx: int) -> tuple[int, int]:
        """How many tokens a text sees, and where these begin."""
        return query_length + _tokens(self.prefix), 0


class QuantizedCacheLayer(DynamicLayer):
    """Quantized keys and values of one layer. `keys` and `values` are codes (floats where the scheme is None), [B, H,
    T, D].

    Next to them lie scales and zero points, [B, H, T, groups, 1], and where the quantizer keeps tokens all keys and
    values as they came, `exact`: batch first and tokens third in all of them.
    """

    is_croppable = True
    max_batch_size = max_cache_len = -1  # transformers asks before it takes a static cache again

    def __init__(self, quantizer: KVQuantizer, index: int = 0) -> None:
        super().__init__()
        self.quantizer, self.index = quantizer, index
        self.key_qparams: tuple[Tensor, ...] = ()
        self.value_qparams: tuple[Tensor, ...] = ()
        self.exact: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Quantize and store new tokens; return all tokens' keys and values, dequantized, of the incoming type, after
        the prefix; after them as they came, where the quantizer keeps tokens."""
        quantizer, device = self.quantizer, key_states.device
        static = {what: quantizer.qparams(self.index, what, device) for what in LOCATIONS}
        of_keys, of_values = (quantizer.chain(self.index, what) for what in LOCATIONS)
        keys, key_qparams = _encode(of_keys(key_states), quantizer.keys, static["keys"])
        values, value_qparams = _encode(of_values(value_states), quantizer.values, static["values"])
        exact = (key_states, value_states) if any(quantizer.kept) else ()
        if self.get_seq_length():
            exact = tuple(map(_append, self.exact, exact))
            keys, values = _append(cast(Tensor, self.keys), keys), _append(cast(Tensor, self.values), values)
            key_qparams = tuple(map(_append, self.key_qparams, key_qparams))
            value_qparams = tuple(map(_append, self.value_qparams, value_qparams))
        self.keys, self.key_qparams = keys, key_qparams
        self.values, self.value_qparams = values, value_qparams
        self.exact = exact
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        all_keys = _decode(keys, key_qparams, quantizer.keys, key_states.dtype, static["keys"])
        all_values = _decode(values, value_qparams, quantizer.values, value_states.dtype, static["values"])
        all_keys, all_values = of_keys.inverse(all_keys), of_values.inverse(all_values)
        if exact:
            all_keys, all_values = map(_append, (all_keys, all_values), exact)
        return (
            (all_keys, all_values)
            if quantizer.prefix is None
            else quantizer.prefix.before(self.index, all_keys, all_values)
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, their number given negative; a positive number is the length to keep."""
        length = self.get_seq_length()
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        self._change(lambda part: part[:, :, :keep])

    def reset(self) -> None:
        """Forget all tokens."""
        self._change(lambda part: part[:, :, :0])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` of the batch, in that order."""
        self._change(lambda part: part[indices.to(part.device)])

    def offload(self) -> None:
        """Move to the host."""
        self._change(lambda part: part.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back to the device of the last update."""
        self._change(lambda part: part.to(self.device, non_blocking=True))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply one change to every stored tensor."""
        if not self.is_initialized:
            return
        self.keys, self.values = change(cast(Tensor, self.keys)), change(cast(Tensor, self.values))
        self.key_qparams = tuple(map(change, self.key_qparams))
        self.value_qparams = tuple(map(change, self.value_qparams))
        self.exact = tuple(map(change, self.exact))


def _tokens(prefix: Prefix | None) -> int:
    return 0 if prefix is None else prefix.tokens


def _append(old: Tensor, new: Tensor) -> Tensor:
    """Concatenate along the token axis."""
    return torch.cat([old, new], dim=2)


def _encode(x: Tensor, scheme: QuantizationScheme | None, static: QParams | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Codes, and each token's (scale,) or (scale, zero_point) unless these are static; `x` itself without a scheme."""
    if scheme is None:
        return x, ()
    if static is not None:
        return quantize(x, static, scheme), ()
    qparams = choose_qparams(x, scheme)
    codes = quantize(x, qparams, scheme)
    return codes, (qparams.scale,) if qparams.zero_point is None else (qparams.scale, qparams.zero_point)


def _decode(
    codes: Tensor,
    qparams: tuple[Tensor, ...],
    scheme: QuantizationScheme | None,
    dtype: torch.dtype,
    static: QParams | None,
) -> Tensor:
    return codes if scheme is None else dequantize(codes, static or QParams(*qparams), scheme, dtype)
