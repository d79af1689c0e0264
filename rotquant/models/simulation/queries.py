"""Quantization of queries in attention: after RoPE, as OmniQuant's authors do, in addition to keys and values.

Keys and values are the cache's (`kv_cache`), which never sees queries. Attention gets all three through a function of
its own, and only one such can act at a time.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, config_of, decoder_layers
from rotquant.models.simulation.kv_cache import KVQuantizer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Transform, at

#: The attention function's name in transformers. Without a mask function of the same name a batch would have no mask.
NAME = "rotquant_queries"
#: Where an attention module keeps what is done to its queries.
_FUNCTION = "_rotquant_queries"

#: Given queries [batch, heads, tokens, head_dim], keys and values [batch, kv heads, tokens seen, head_dim] as they come
#: out of the cache, what attention takes for queries.
Queries = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention, as transformers calls it, of what the module's function makes of queries."""
    return sdpa_attention_forward(module, getattr(module, _FUNCTION)(query, key, value), key, value, *args, **kwargs)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


class ChangedQueries:
    """Lets a function see queries, keys and values of every layer, and change queries, until it is removed.

    Raises:
        RecipeError: the model computes attention by another function than torch's scaled dot product.
    """

    def __init__(self, model: nn.Module, function: Queries) -> None:
        self._config, path = cast(Any, config_of(model)), architecture_of(model).attention
        if self._config._attn_implementation != "sdpa":
            raise RecipeError("queries are changed in models with sdpa attention: load the model with it.")
        self._modules = [layer.get_submodule(path) for layer in decoder_layers(model)]
        for module in self._modules:
            object.__setattr__(module, _FUNCTION, function)
        self._config._attn_implementation = NAME

    def remove(self) -> None:
        """Restore the model exactly."""
        self._config._attn_implementation = "sdpa"
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

    def quantize(query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
        return quantizer.fake(query, query, 0)[0]

    return ChangedQueries(model, quantize)


def observed_queries(model: nn.Module, receive: Callable[[Tensor, Tensor, Tensor], None]) -> ChangedQueries:
    """Let `receive` see queries, keys and values; nothing changes."""

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        receive(query, key, value)
        return query

    return ChangedQueries(model, look)
