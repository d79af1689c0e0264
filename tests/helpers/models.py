"""Tiny random-weight models of every supported family, awkward where real ones are: see `tiny_model`."""

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.initialization import no_init_weights

from rotquant.models.architectures import architecture_of, attention_implementation, decoder_layers

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

#: Families whose layers have more than Llama's, and models of known types with special sizes; as `AWKWARD`.
FURTHER: dict[str, dict[str, object]] = {
    # Qwen3: norms of each head of queries and keys, heads that together are wider than the hidden size.
    "qwen3": {"family": "qwen3", "hidden_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "tied": True},
    # Llama-3.1: the RoPE of Llama-3.2, untied.
    "llama-3.1": {
        **AWKWARD["llama-3"],
        "hidden_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
        "tied": False,
    },
    # SmolLM-135M and 360M: 9 and 15 heads, which have no Hadamard matrix, 3 to a key-value head.
    "smollm-135m": {
        "family": "llama",
        "hidden_size": 144,
        "num_heads": 9,
        "num_kv_heads": 3,
        "intermediate_size": 96,
        "tied": True,
    },
    "smollm-360m": {
        "family": "llama",
        "hidden_size": 240,
        "num_heads": 15,
        "num_kv_heads": 5,
        "intermediate_size": 160,
        "tied": True,
    },
    # Phi-4: 40 heads, 4 to a key-value head, FFN width 140 * 2^k.
    "phi-4": {
        "family": "phi3",
        "hidden_size": 320,
        "num_heads": 40,
        "num_kv_heads": 10,
        "intermediate_size": 140,
        "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    },
    # Four experts a layer, of which a token sees two.
    "mixtral": {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 48},
    "qwen3-moe": {
        "family": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    # Norms after attention and MLP, none before, and one of all queries and one of all keys.
    "olmo2": {"family": "olmo2", "hidden_size": 96, "num_heads": 8},
    # Norms before and after, gains 1 + w, scaled embeddings, a window in every other layer. Gemma 2: caps on scores and
    # logits; Gemma 3: norms of each head, two RoPEs.
    "gemma2": {
        "family": "gemma2",
        "head_dim": 32,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "tied": True,
    },
    "gemma3": {
        "family": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "tied": True,
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
    allows. Further arguments go into the configuration.
    """
    config_class = CONFIG_MAPPING[family]
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
    if implementation := attention_implementation(settings):
        settings._attn_implementation = implementation
    with no_init_weights():  # transformers would draw from the global generator, which tests must not disturb
        model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class](settings)
    model.tie_weights()
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


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    # A tied embedding is also lm_head: of the size of other linear layers, lest logits grow with the hidden size.
    tied, offset = model.config.tie_word_embeddings, architecture_of(model).norm_offset
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise if "embed" in name and not tied else noise / parameter.shape[-1] ** 0.5)
        elif "norm" in name:
            parameter.copy_(1.0 - offset + 0.3 * noise)
        else:
            parameter.copy_(0.5 * noise)
