"""Quantization of queries in attention: after RoPE, as OmniQuant's authors do, in addition to keys and values.

Keys and values are the cache's (`kv_cache`), which never sees queries. Attention gets all three through a function of
its own, and only one such can act at a time.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, config_of, decoder_layers
from rotquant.models.simulation.kv_cache import KVQuantizer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Transform, at

#: Names in transformers of attention functions that stand in for others. Without a mask function of the same name a
#: batch would have no mask.
_NAMES = {"sdpa": "rotquant_queries", "eager": "rotquant_queries_eager"}
#: Where an attention module keeps what is done to its queries.
_FUNCTION = "_rotquant_queries"


class ScoreRule(NamedTuple):
    """What a layer makes of q k^T before the softmax.

    scaling: factor. cap: c of c tanh(score / c), if any (Gemma 2). window: how many keys a query sees, itself one of
        them; None for all before it.
    """

    scaling: float
    cap: float | None = None
    window: int | None = None


#: Given queries [batch, heads, tokens, head_dim], keys and values [batch, kv heads, tokens seen, head_dim] as they come
#: out of the cache, and what the layer makes of scores, what attention takes for queries.
Queries = Callable[[Tensor, Tensor, Tensor, ScoreRule], Tensor]


def _changed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """What the module's function makes of queries."""
    scores = ScoreRule(kwargs["scaling"], kwargs.get("softcap"), kwargs.get("sliding_window"))
    return getattr(module, _FUNCTION)(query, key, value, scores)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention, as transformers calls it, of what the module's function makes of queries."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, _changed(module, query, key, value, kwargs), key, value, *args, **kwargs)


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The same by the family's own function, which has a cap on scores where torch's has none."""
    eager = cast(Any, sys.modules[type(module).__module__]).eager_attention_forward
    return eager(module, _changed(module, query, key, value, kwargs), key, value, *args, **kwargs)


def _register() -> None:
    """Make the functions known to transformers, whose models take a second to import."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(_NAMES["sdpa"], attend)
    AttentionMaskInterface.register(_NAMES["sdpa"], sdpa_mask)
    AttentionInterface.register(_NAMES["eager"], attend_eagerly)
    AttentionMaskInterface.register(_NAMES["eager"], eager_mask)


class ChangedQueries:
    """Lets a function see queries, keys and values of every layer, and change queries, until it is removed.

    Raises:
        RecipeError: the model computes attention by another function than torch's scaled dot product or its own.
    """

    def __init__(self, model: nn.Module, function: Queries) -> None:
        self._config, path = cast(Any, config_of(model)), architecture_of(model).attention
        self._before = self._config._attn_implementation
        if self._before not in _NAMES:
            raise RecipeError("queries are changed in models with sdpa or eager attention: load the model with one.")
        _register()
        self._modules = [layer.get_submodule(path) for layer in decoder_layers(model)]
        for module in self._modules:
            object.__setattr__(module, _FUNCTION, function)
        self._config._attn_implementation = _NAMES[self._before]

    def remove(self) -> None:
        """Restore the model exactly."""
        self._config._attn_implementation = self._before
        for module in self._modules:
            object.__delattr__(module, _FUNCTION)

    def __enter__(self) -> "ChangedQueries":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def quantized_queries(
    model: nn.Module, scheme: QuantizationScheme, transforms: tuple[Transform, ...] = ()
) -> ChangedQueries:
    """Quantize queries, each token and head by itself; training sees how scales follow what is quantized.

    They pass R3 before, and come out turned back, as keys do.

    Raises:
        RecipeError: keys have a transform of tensors, of which queries would need the inverse.
    """
    if any(one.tensors for one in at(transforms, "queries_keys", online=True)):
        raise RecipeError("queries are quantized after a Hadamard transform alone: give keys no other one.")
    quantizer = KVQuantizer(scheme, None, transforms, scale_gradients=True)

    def quantize(query: Tensor, _key: Tensor, _value: Tensor, _scores: ScoreRule) -> Tensor:
        return quantizer.fake(query, query, 0)[0]

    return ChangedQueries(model, quantize)


def observed_queries(model: nn.Module, receive: Callable[[Tensor, Tensor, Tensor, ScoreRule], None]) -> ChangedQueries:
    """Let `receive` see queries, keys and values, and what becomes of scores; nothing changes."""

    def look(query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
        receive(query, key, value, scores)
        return query

    return ChangedQueries(model, look)
