"""Processes that share a model by FSDP2 train on the same loop as one: its interface knows nothing of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rotquant.training.loop import GradientStep, train
from rotquant.training.state import Checkpoint, Record
from tests.helpers.processes import run_together

WHOLE = StateDictOptions(full_state_dict=True)
STEPS = 5


class Model:
    """A sharded model's state, gathered from all processes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model, options=WHOLE)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state, options=WHOLE)


class Moments:
    """And its optimizer's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.of = (model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(*self.of, options=WHOLE)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(*self.of, state, options=WHOLE)


def learn(rank: int, world: int, path: Path, dies_at: int | None = None) -> tuple[list[Record], dict[str, Tensor]]:
    """The history of a small network's training, and its weights."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(64, 16, generator=generator)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(part: Tensor) -> dict[str, Tensor]:
        own = (model(part) - part.flip(-1)).square().sum() / data.numel() * world  # FSDP takes the gradients' mean
        whole = own.detach() / world
        if world > 1:
            dist.all_reduce(whole)
        return {"loss": own, "whole": whole}

    gradient = GradientStep(
        lambda step: data.roll(step, 0).chunk(world)[rank].split(8),
        loss,
        [optimizer],
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )

    def step(number: int) -> Record:
        if number == dies_at:
            raise InterruptedError
        return {"loss": gradient(number)["whole"]}

    parts = {"model": Model(model), "optimizer": Moments(model, optimizer)}
    checkpoint = Checkpoint(path, "this", every=2, writes=rank == 0)
    return train(step, STEPS, "tuning", parts=parts, checkpoint=checkpoint), Model(model).state_dict()


def process(rank: int, folder: Path) -> None:
    """One of two."""
    history, weights = learn(rank, 2, folder / "straight")
    with pytest.raises(InterruptedError):
        learn(rank, 2, folder / "killed", dies_at=3)
    dist.barrier()
    again, resumed = learn(rank, 2, folder / "killed")
    assert again == history
    assert all(torch.equal(weight, resumed[name]) for name, weight in weights.items())
    if rank == 0:
        _, alone = learn(0, 1, folder / "alone")
        # Sums over half batches: AdamW's steps of 0.01 differ by float32's rounding of the gradients.
        assert all(torch.allclose(weight, alone[name], atol=1e-5) for name, weight in weights.items())


@pytest.mark.unflipped
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_continue_with_equal_bits_and_train_as_one_does(tmp_path: Path) -> None:
    run_together(tmp_path, process)
    assert not list(tmp_path.glob(".tmp-*"))
