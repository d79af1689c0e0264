"""Tiny random-weight models of every supported family, awkward where real ones are: see `tiny_model`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rotquant.models.architectures import decoder_layers

FAMILIES = ("llama", "mistral", "qwen2", "phi3")
VOCABULARY = 96

#: A decoder's shape as the benchmarks' shapes write it: grouped queries, a head size that the KV kernels have.
TINY_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}

#: As awkward as real models: arguments of `tiny_model` that keep what is special about each family's shapes.
AWKWARD: dict[str, dict[str, object]] = {
    # Llama-2-13B: 20 heads, hidden size 20 * 2^k, FFN width 108 * 2^k.
    "llama-2": {"family": "llama", "hidden_size": 160, "num_heads": 20, "num_kv_heads": 20, "intermediate_size": 108},
    # Llama-3.2: tied embeddings, 24 heads, wider together than the hidden size, 3 to a key-value head; Llama-3's FFN
    # width 28 * 2^k and RoPE.
    "llama-3": {
        "family": "llama",
        "hidden_size": 192,
        "num_heads": 24,
        "num_kv_heads": 8,
        "head_dim": 16,
        "intermediate_size": 112,
        "tied": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    # Mistral: a sliding window, here shorter than any text.
    "mistral": {"family": "mistral", "hidden_size": 96, "num_heads": 8, "intermediate_size": 56, "sliding_window": 6},
    # Qwen2-7B: biases at q, k and v, 28 heads, FFN width 148 * 2^k; layers with and without a sliding window.
    "qwen2": {
        "family": "qwen2",
        "hidden_size": 112,
        "num_heads": 28,
        "num_kv_heads": 4,
        "intermediate_size": 148,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    # Phi-3-mini: fused projections, head size and hidden size 12 * 2^k, a key-value head for each query head.
    "phi-3": {"family": "phi3", "hidden_size": 96, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 256},
    # Phi-3-medium and Phi-4-mini: grouped queries, RoPE on part of each head, and other frequencies for texts longer
    # than those of the first training, here 4 tokens.
    "phi-3-longrope": {
        "family": "phi3",
        "hidden_size": 80,
        "num_heads": 4,
        "num_kv_heads": 2,
        "sliding_window": 10,
        "original_max_position_embeddings": 4,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.8,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + 0.5 * i for i in range(8)],
        },
    },
}


def checkpointed_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a model that trains with gradient checkpointing from now on, after a backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss


def tiny_model(
    family: str = "llama",
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 96,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: object,
) -> PreTrainedModel:
    """A model in evaluation mode whose every parameter is drawn from `seed`; equal arguments give equal models.

    Norm weights lie around one but are not one (else fusing them would not be tested), biases around zero (Qwen2's q, k
    and v have them; Llama's with `attention_bias` and `mlp_bias`). Two q heads share a kv head; 96 = 12 * 8 needs a
    Hadamard matrix that is not a power of two. head_dim: default hidden_size // num_heads; others only where the family
    allows (Llama, Mistral). Further arguments go into the configuration.
    """
    config_class, model_class = _CLASSES[family]
    if head_dim is not None:
        config["head_dim"] = head_dim
    settings = config_class(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        tie_word_embeddings=tied,
        **{"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **config},
    )
    with torch.random.fork_rng():  # transformers initialises from the global generator, which tests must not disturb
        model = model_class(settings)
    _randomise(model, torch.Generator().manual_seed(seed))
    return model.to(dtype).eval()


@torch.no_grad()
def outlier_model(**arguments: Any) -> PreTrainedModel:
    """A tiny model in which a few channels of every norm's output are far larger than the others."""
    model = tiny_model(**arguments)
    for layer in decoder_layers(model):
        layer.input_layernorm.weight[[3, 17]] *= 20
        layer.post_attention_layernorm.weight[[5, 40]] *= 20
    return model


def tiny_tokens(batch: int = 2, tokens: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, tokens], none of them the padding token."""
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def logits_elsewhere(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits that another process has of a stored quantized model, which it loads."""
    code = (
        "import sys, torch\n"
        "from rotquant.weights.storage import load_quantized\n"
        "from rotquant.weights.build import quantized_forward\n"
        "model, _, state = load_quantized(sys.argv[1])\n"
        "with torch.no_grad(), quantized_forward(model, state.recipe, state):\n"
        f"    torch.save(model(torch.tensor({tokens.tolist()}), use_cache=False).logits, sys.argv[2])\n"
    )
    place = folder.with_name("logits")
    subprocess.run([sys.executable, "-c", code, str(folder), str(place)], check=True)
    return torch.load(place, weights_only=True)


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    # A tied embedding is also lm_head: of the size of other linear layers, lest logits grow with the hidden size.
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            parameter.copy_(noise if "embed" in name and not tied else noise / parameter.shape[1] ** 0.5)
        elif "norm" in name:
            parameter.copy_(1.0 + 0.3 * noise)
        else:
            parameter.copy_(0.5 * noise)
