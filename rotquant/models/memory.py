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
#: Of these, bytes that torch allocates for cuBLAS's products, 32 MiB on Hopper.
WORKSPACE = 2**25
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
#: Elements of all candidates of a search for clip ratios: what a CPU core's cache holds, and what keeps a GPU busy.
CANDIDATES_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
#: Weights that are changed row by row are handled in blocks of about this many elements (512 MiB in float64).
BLOCK_ELEMENTS = 2**26
#: Bytes of keys and values of sequences that a model writes side by side, on any device, since it decides the text.
_WRITTEN_BYTES = 2**34
#: Sequences that are written side by side at most.
_MOST_WRITTEN = 256


def cache_bytes(shape: Architecture, tokens: int, itemsize: int) -> int:
    """Bytes of a sequence's keys and values in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * tokens * itemsize


def sequences_at_once(shape: Architecture, tokens: int, itemsize: int) -> int:
    """How many sequences of so many tokens a model writes side by side."""
    return min(_MOST_WRITTEN, max(1, _WRITTEN_BYTES // cache_bytes(shape, tokens, itemsize)))


def attention_bytes(shape: Architecture, sequences: int, length: int, itemsize: int, device: torch.device) -> int:
    """Roughly what a layer holds while a batch passes its attention: hidden states, queries, repeated keys, values.

    On a GPU torch has no fused attention for float64: there it holds the scores of all pairs of tokens before and after
    the softmax.
    """
    width = 2 * shape.hidden_size + 5 * shape.num_heads * shape.head_dim
    scores = 0 if itemsize < 8 or device.type == "cpu" else 2 * shape.num_heads * length
    return sequences * length * (width + scores) * itemsize


def kept_width(shape: Architecture, constants: bool = False) -> int:
    """Roughly how many numbers a layer keeps of a token for the backward pass.

    constants: weights and what quantization adds have no gradient, so that linear layers keep nothing that they read:
    SpinQuant's network of SmolLM2 in bfloat16 keeps 10,450 numbers, and 13,632 are counted.
    """
    stream, heads, mlp = (8, 5, 4) if constants else (12, 12, 8)
    return stream * shape.hidden_size + heads * shape.num_heads * shape.head_dim + mlp * shape.intermediate_size


def kept_bytes(model: nn.Module, tokens: int, constants: bool = False) -> int:
    """Roughly what a forward pass keeps for the backward pass, in bytes, without computing layers again.

    Counted in tensors of the widths of the residual stream, of the heads and of the MLP, for each layer.
    """
    shape = architecture_of(model)
    return tokens * kept_width(shape, constants) * shape.num_layers * embedding(model).weight.element_size()


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
