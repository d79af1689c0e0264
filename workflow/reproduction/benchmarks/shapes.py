"""The papers' models as shapes, with random weights: enough to measure time and memory, never accuracy.

Models are made where they will run, or on the host by a GPU's random numbers. A stage that moves one layer at a time
needs its model on the host; learning rotations needs the whole model on one GPU, or layer by layer on several
(SpinQuant Sec. 3.2, Table 15).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rotquant.decoder.config import DecoderConfig
from rotquant.foundation.errors import lookup
from rotquant.models.architectures import decoder_layers
from rotquant.models.memory import size_in_bytes
from rotquant.models.placement import device_map

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM


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


_DEVIATION = 0.02


def shape_config(shape: str, layers: int | None = None) -> "LlamaConfig":
    """The configuration of a shape, with fewer layers if asked.

    Raises:
        ConfigError: an unknown shape.
    """
    from transformers import LlamaConfig

    fields: dict[str, Any] = {"vocab_size": 32000} | lookup(SHAPES, shape, "unknown shape")
    config = LlamaConfig(**fields, max_position_embeddings=4096, rms_norm_eps=1e-5)
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


def random_model_on(
    devices: Sequence[torch.device],
    config: "LlamaConfig",
    dtype: torch.dtype,
    seed: int = 0,
    *,
    host: torch.device | None = None,
) -> "LlamaForCausalLM":
    """A model whose weights are normal with standard deviation 0.02, on one device or spread over several.

    Spread, decoder layers stay whole and lie in order, as `sharding.placed` has them, and each moves what it is given
    to its own device.

    Args:
        host: where the weights are kept instead, for a model that its one device only draws: 7 billion random numbers
            take minutes on a CPU.
    """
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
    places = {"": devices[0]} if len(devices) == 1 else _spread(model, devices)
    _fill(model, places, dtype, seed, host)
    # Buffers (the rotary frequencies) are not parameters: they come with a module made the ordinary way.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(host or _place("model.rotary_emb", places))
    if len(devices) > 1:
        from accelerate import dispatch_model

        dispatch_model(
            model, cast("dict[str, str | int | torch.device]", places), main_device=devices[0], force_hooks=True
        )
    return model.eval()


def _spread(model: nn.Module, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Where each part goes: an equal share of the weights to each device, up to two layers more to the first ones."""
    layers = decoder_layers(model)
    share = size_in_bytes(model) // len(devices) + 2 * size_in_bytes(layers[0])
    return {
        name: devices[index] for name, index in device_map(model, dict.fromkeys(range(len(devices)), share)).items()
    }


@torch.no_grad()
def _fill(
    model: nn.Module, places: Mapping[str, torch.device], dtype: torch.dtype, seed: int, host: torch.device | None
) -> None:
    """Parameters in place of those without memory: ones for vectors, which are norms' gains, else random."""
    generators = {device: torch.Generator(device).manual_seed(seed) for device in places.values()}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            device = _place(f"{path}.{name}", places)
            drawn = torch.ones(parameter.shape, dtype=dtype, device=device)
            if parameter.ndim > 1:
                drawn.normal_(0.0, _DEVIATION, generator=generators[device])
            setattr(module, name, nn.Parameter(drawn.to(host or device), requires_grad=False))


def _place(name: str, places: Mapping[str, torch.device]) -> torch.device:
    """The device of the longest prefix of a parameter's name that has one."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next(places[prefix] for prefix in prefixes if prefix in places)
