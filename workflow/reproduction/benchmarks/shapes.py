"""The papers' models as shapes: enough to measure time and memory with random weights, never accuracy."""

from typing import Any

from rotquant.decoder.config import DecoderConfig
from rotquant.foundation.errors import lookup


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


#: LlamaConfig arguments as published in the models' config files: Llama-2 (Touvron et al. 2023), Llama-3 and 3.2
#: (Grattafiori et al. 2024), Mistral-7B-v0.3, a Llama since it has no window. CodeLlama-7B, and thus RCP's
#: WizardCoder-7B, has llama-2-7b's layers.
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, vocab_size=128256),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, vocab_size=128256),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, vocab_size=128256),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, vocab_size=128256),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, vocab_size=32768),
}


def decoder_config(shape: str, **fields: Any) -> DecoderConfig:
    """The decoder of a shape's name; `fields` override.

    Raises:
        ConfigError: an unknown shape.
    """
    return DecoderConfig.from_shape(lookup(SHAPES, shape, "unknown shape"), **fields)
