"""Samples in random order for methods that train: every one comes once before any comes again. It holds no samples."""

import torch
from torch import Tensor


def shuffled_batches(samples: int, batch_size: int, steps: int, seed: int) -> list[Tensor]:
    """Indices of the samples of each step, int64 [min(batch_size, samples)]; equal seeds give equal batches."""
    generator = torch.Generator().manual_seed(seed)
    size, order, batches = min(batch_size, samples), torch.empty(0, dtype=torch.long), []
    for _ in range(steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(samples, generator=generator)])
        batches.append(order[:size])
        order = order[size:]
    return batches
