"""Where a training runs: what one process does alone, or several share."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.training.state import Checkpoint, Part


class Engine:
    """One process with one device.

    device: where its part of the work is done. processes, rank: how many share the work, and which this is.
    at_once: sequences that pass the model together; None for all that a process has of a batch.
    """

    processes = 1
    rank = 0

    def __init__(self, device: torch.device, at_once: int | None = None) -> None:
        self.device = device
        self.at_once = at_once

    def own(self, batch: Tensor) -> Tensor:
        """This process's samples of a batch [n, ...]."""
        return batch.tensor_split(self.processes)[self.rank]

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes, known to all."""
        return values

    def shard(self, distillation: nn.Module) -> None:
        """Place a `Distillation`: every process has its part of each decoder layer's parameters."""

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients together, known to all processes."""
        return nn.utils.get_total_norm(gradients)

    def parts(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """What a checkpoint keeps of a student and its optimizer."""
        return {"model": model, "optimizer": optimizer}

    def checkpoint(self, checkpoint: Checkpoint | None) -> Any:
        """How the state of a training is kept."""
        return checkpoint

    def gather(self, model: nn.Module) -> None:
        """Bring a student's parameters together, in place, in every process that goes on with them."""
