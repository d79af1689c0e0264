"""Random-weight models of the papers' shapes made where they will run, or on the host by a GPU's random numbers.

A stage that moves one layer at a time needs its model on the host; learning rotations needs the whole model on one GPU,
or layer by layer on several (SpinQuant Sec. 3.2, Table 15). Enough for time and memory, never for accuracy.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from reproduction.benchmarks.shapes import SHAPES
from rotquant.foundation.errors import lookup
from rotquant.models.architectures import decoder_layers
from rotquant.models.placement import device_map, size_in_bytes

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

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
