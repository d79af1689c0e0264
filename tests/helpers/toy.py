"""A toy training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.tensors.stiefel import CayleySGD
from rotquant.training.loop import GradientStep, train
from rotquant.training.state import Checkpoint

STEPS = 7


def adamw(weight: nn.Parameter, bias: nn.Parameter) -> torch.optim.Optimizer:
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))


OPTIMIZERS: dict[str, Callable[[nn.Parameter, nn.Parameter], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "SGD": lambda *parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Cayley": lambda weight, _: CayleySGD([weight], 0.5, momentum=0.9, reorthogonalize=3),
}


class Toy:
    """A regression whose every state is used: momenta, a schedule, and a generator that each step draws from."""

    def __init__(self, optimizer: str) -> None:
        self.generator = torch.Generator().manual_seed(0)
        start = torch.linalg.qr(torch.randn(5, 5, generator=self.generator)).Q
        self.weight, self.bias = nn.Parameter(start.contiguous()), nn.Parameter(torch.zeros(5))
        self.optimizer = OPTIMIZERS[optimizer](self.weight, self.bias)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.gradient = GradientStep(self.batch, self.loss, [self.optimizer], [self.schedule])
        self.die: Callable[[str, int], None] = lambda place, step: None
        self.now = 0

    def batch(self, step: int) -> Iterator[Tensor]:
        self.now = step
        for _ in range(2):
            yield torch.randn(4, 5, generator=self.generator)
            self.die("between parts", step)

    def loss(self, x: Tensor) -> dict[str, Tensor]:
        error = (x @ self.weight + self.bias - x.flip(-1)).square().mean() / 2
        return {"loss": error, "half": error / 2}

    def step(self, step: int) -> dict[str, Any]:
        values = self.gradient(step)
        self.die("after the step", step)
        return {**values, "rates": [group["lr"] for group in self.optimizer.param_groups]}

    def train(self, path: Path | None = None, identity: str = "this", **settings: Any) -> list[dict[str, Any]]:
        parts = {name: getattr(self, name) for name in ("weight", "bias", "optimizer", "schedule", "generator")}
        checkpoint = None if path is None else Checkpoint(path, identity, every=2)
        return train(
            self.step,
            STEPS,
            "toy",
            parts=parts,
            checkpoint=checkpoint,
            on_step=lambda record: self.die("listening", record["step"]),
            **settings,
        )

    def same(self, other: "Toy") -> bool:
        pairs = ((self.weight, other.weight), (self.bias, other.bias), (self._state(), other._state()))
        return all(torch.equal(*pair) for pair in pairs)

    def _state(self) -> Tensor:
        return self.generator.get_state()
