"""How much of what lies in memory at a time: bounds by which work is cut up, and bytes of models and of activations.

The work and `rotquant plan` (`costs.memory`) both ask here. A bound is by kind of device (`tensors.devices.of_device`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture, architecture_of, embedding

#: Share of a GPU's memory that tensors may take; the rest is lost between them.
USABLE = 0.92
#: Bytes of a GPU that torch's context and libraries take.
LIBRARIES = 2**30
#: Layers of the host that a GPU has at a time: the one that runs, the next one, and one whose memory is not free yet.
ON_THEIR_WAY = 3
#: Tokens that pass a layer at once when the caller does not say.
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}
#: Share of a GPU's free memory that hidden states may take; beyond it they stay on the host.
SHARE_OF_HIDDEN = 0.25
#: Inputs of o_proj and down_proj up to this size are kept until their layer is done, so that nothing is computed twice.
RECORD_BYTES = {"cpu": 2**30, "cuda": 8 * 2**30}
#: Bytes of activations that may be kept for the backward pass; beyond it layers are computed again.
KEPT_BYTES = {"cpu": 2**31, "cuda": 2**34}
#: Logits of a network that learns held at once; training holds about three float32 tensors of this size.
LOGITS_AT_ONCE = {"cpu": 2**23, "cuda": 2**30}
#: Weights that are changed row by row are handled in blocks of about this many elements (512 MiB in float64).
BLOCK_ELEMENTS = 2**26


def kept_width(shape: Architecture) -> int:
    """Roughly how many numbers a layer keeps of a token for the backward pass."""
    return 12 * shape.hidden_size + 12 * shape.num_heads * shape.head_dim + 8 * shape.intermediate_size


def kept_bytes(model: nn.Module, tokens: int) -> int:
    """Roughly what a forward pass keeps for the backward pass, in bytes, without computing layers again.

    Counted in tensors of the widths of the residual stream, of the heads and of the MLP, for each layer.
    """
    shape = architecture_of(model)
    return tokens * kept_width(shape) * shape.num_layers * embedding(model).weight.element_size()


def size_in_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters; those that share memory count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def keep(store: dict[Any, Tensor], key: object, value: Tensor, most: int) -> Tensor:
    """Put a computed value into a store of at most so many bytes and return it; a full store is emptied first.

    A value that is larger than all of the store is kept alone.
    """
    if sum(other.nbytes for other in store.values()) + value.nbytes > most:
        store.clear()
    store[key] = value
    return value
