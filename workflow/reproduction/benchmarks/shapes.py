"""The papers' models as shapes with random weights: enough to measure time and memory, never accuracy."""

from typing import TYPE_CHECKING, Any, cast

import torch

from rotquant.foundation.errors import RecipeError, nearest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

#: LlamaConfig arguments as published in the models' config files: Llama-2 (Touvron et al. 2023), Llama-3 and 3.2
#: (Grattafiori et al. 2024). CodeLlama-7B, and thus RCP's WizardCoder-7B, has llama-2-7b's layers.
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama-2-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def random_model(
    shape: str, *, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu", num_layers: int | None = None
) -> "LlamaForCausalLM":
    """A model of the named shape on the host, its weights normal with standard deviation 0.02.

    Args:
        device: the device that draws the random numbers; 7 billion of them take minutes on a CPU.
        num_layers: a smaller number of layers, for a quick trial.

    Raises:
        RecipeError: for an unknown shape.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise RecipeError(f"unknown shape {shape!r}{nearest(shape, list(SHAPES))}.")
    config = LlamaConfig(
        **cast("dict[str, Any]", {"vocab_size": 32000} | SHAPES[shape]),
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
    generator = torch.Generator(device=device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            drawn = torch.ones(parameter.shape, dtype=dtype, device=device)
            if parameter.ndim > 1:
                drawn.normal_(0.0, 0.02, generator=generator)
            setattr(module, name, torch.nn.Parameter(drawn.cpu(), requires_grad=False))
    # Buffers (the rotary frequencies) are not parameters: take them from a one-layer model that is built normally.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()
