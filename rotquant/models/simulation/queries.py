"""Queries quantized after RoPE, as OmniQuant's authors do: attention gets them through a function of its own.

Keys and values are the cache's (`kv_cache`), which never sees queries; no other method here quantizes them.
"""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, config_of, decoder_layers
from rotquant.models.simulation.kv_cache import KVQuantizer
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme

#: The attention function's name in transformers. Without a mask function of the same name a batch would have no mask.
NAME = "rotquant_quantized_queries"
#: Where an attention module keeps its quantizer.
_QUANTIZER = "_rotquant_queries"


def attend(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention of quantized queries [batch, heads, tokens, head_dim], as transformers calls it."""
    return sdpa_attention_forward(module, getattr(module, _QUANTIZER)(query), *args, **kwargs)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _quantized(quantizer: KVQuantizer, query: Tensor) -> Tensor:
    """Queries as the quantizer gives keys."""
    return quantizer.fake(query, query)[0]


class QuantizedQueries:
    """Quantizes the queries of a model, each token and head by itself, until it is removed.

    With a rotation that has R3 they pass it before, and come out turned back, as keys do. Training sees how the scales
    follow what is quantized, as OmniQuant's does.

    Raises:
        RecipeError: the model computes attention by another function than torch's scaled dot product.
    """

    def __init__(self, model: nn.Module, scheme: QuantizationScheme, rotation: RotationScheme | None = None) -> None:
        self._config, path = cast(Any, config_of(model)), architecture_of(model).attention
        if self._config._attn_implementation != "sdpa":
            raise RecipeError("queries are quantized in models with sdpa attention: load the model with it.")
        self._modules = [layer.get_submodule(path) for layer in decoder_layers(model)]
        quantizer = KVQuantizer(scheme, None, rotation, scale_gradients=True)
        for module in self._modules:
            object.__setattr__(module, _QUANTIZER, partial(_quantized, quantizer))
        self._config._attn_implementation = NAME

    def remove(self) -> None:
        """Restore the model exactly."""
        self._config._attn_implementation = "sdpa"
        for module in self._modules:
            object.__delattr__(module, _QUANTIZER)
