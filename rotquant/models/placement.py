"""A model on one accelerator or, where it does not fit, spread layer by layer over all GPUs (by accelerate).

For work that needs the whole model at once, as learning through all layers does; what goes layer by layer needs one
GPU only (`rotquant.models.stream`). Nothing here computes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.stream import on_device

#: Share of each GPU's free memory that weights may take; the rest is for activations and gradients.
_SHARE_OF_FREE_MEMORY = 0.7


@contextmanager
def placed(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Hold a model on a device, or on all GPUs, while the block runs; then return it to where it was.

    Spread over GPUs, inputs go to the embedding's device and each layer moves what it is given to its own.

    Raises:
        RecipeError: the model's weights do not fit all GPUs together.
    """
    device = torch.device(device)
    memory = _free_memory() if device.type == "cuda" else {}
    if device.type != "cuda" or size_in_bytes(model) <= memory[device.index or torch.cuda.current_device()]:
        with on_device(model, device):
            yield
        return
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    home = next(model.parameters()).device
    dispatch_model(model, cast("dict[str, str | int | torch.device]", device_map(model, memory)))
    try:
        yield
    finally:
        remove_hook_from_submodules(model)
        model.to(home)


def device_map(model: nn.Module, memory: Mapping[int, int]) -> dict[str, int]:
    """Assign each part of a model to a GPU, decoder layers whole, in the order of the layers.

    Args:
        memory: bytes that weights may take on each GPU.

    Raises:
        RecipeError: the weights do not fit.
    """
    from accelerate import infer_auto_device_map

    places = infer_auto_device_map(
        model,
        cast("dict[int | str, int | str]", dict(memory)),
        no_split_module_classes=list(cast("list[str]", model._no_split_modules)),
    )
    if not set(places.values()) <= set(memory):
        needed, found = size_in_bytes(model) / 2**30, sum(memory.values()) / 2**30
        raise RecipeError(
            f"the model's weights take {needed:.0f} GiB, and {len(memory)} GPUs have {found:.0f} GiB for them: "
            "take more GPUs or a smaller dtype."
        )
    return cast("dict[str, int]", places)


def size_in_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters; those that share memory count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _free_memory() -> dict[int, int]:
    """Bytes that weights may take on each GPU."""
    gpus = range(torch.cuda.device_count())
    return {index: int(_SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(index)[0]) for index in gpus}
