"""Batches for methods that train: samples in random order, and what a model keeps of them. It holds no samples."""

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture, architecture_of, embedding

#: Bytes of activations that may be kept for the backward pass; beyond it layers are computed again.
KEPT_BYTES = {"cpu": 2**31, "cuda": 2**34}


def shuffled_batches(samples: int, batch_size: int, steps: int, seed: int) -> list[Tensor]:
    """Indices of the samples of each step, int64 [min(batch_size, samples)]; equal seeds give equal batches.

    Every sample comes once before any comes again.
    """
    generator = torch.Generator().manual_seed(seed)
    size, order, batches = min(batch_size, samples), torch.empty(0, dtype=torch.long), []
    for _ in range(steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(samples, generator=generator)])
        batches.append(order[:size])
        order = order[size:]
    return batches


def kept_bytes(model: nn.Module, tokens: int) -> int:
    """Roughly what a forward pass keeps for the backward pass, in bytes, without computing layers again.

    Counted in tensors of the widths of the residual stream, of the heads and of the MLP, for each layer.
    """
    shape = architecture_of(model)
    return tokens * kept_width(shape) * shape.num_layers * embedding(model).weight.element_size()


def kept_width(shape: Architecture) -> int:
    """Roughly how many numbers a layer keeps of a token for the backward pass."""
    return 12 * shape.hidden_size + 12 * shape.num_heads * shape.head_dim + 8 * shape.intermediate_size
