"""Where a training runs: what one process does alone, or several share by FSDP2, on the GPUs of one host or of several.

Torchrun starts the processes; they meet by `torch.distributed` (`make_engine`). Each has a part of every
parameter and its share of a batch, and writes its own part of the state, from which as many processes continue (on CPUs
with equal bits). What one process does alone is the same code with nothing to share.
"""

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.foundation.files import read_object, write_json
from rotquant.models.architectures import base_model, decoder_layers, lm_head
from rotquant.models.placement import offloaded
from rotquant.models.stream import on_device
from rotquant.training.offload import OffloadedAdamW
from rotquant.training.state import Checkpoint, Part, Record


class Engine:
    """Training engine of one process with one device.

    device: where its part of the work is done. processes, rank: how many share the work, and which this is.
    at_once: sequences that pass the model together; None for all that a process has of a batch.
    offloads: whether the optimizer's moments and the teacher's layers lie on the host, with equal results. Several
        processes share them instead.
    """

    processes = 1
    rank = 0

    def __init__(self, device: torch.device, at_once: int | None = None, offloads: bool = False) -> None:
        self.device = device
        self.at_once = at_once
        self.offloads = offloads

    def check_batch(self, size: int) -> None:
        """Raise `RecipeError` where processes would have unequal shares of a batch of so many samples."""

    def own(self, batch: Tensor) -> Tensor:
        """Select this process's samples of a batch [n, ...]."""
        return batch.tensor_split(self.processes)[self.rank]

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes, known to all."""
        return values

    def same(self, values: Tensor) -> Tensor:
        """Broadcast the first process's value, on the host."""
        return values

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """The norm of all tensors together, known to all processes."""
        norm = nn.utils.get_total_norm([local(tensor) for tensor in tensors])
        return self.total(norm.square()).sqrt()

    def student(self, model: nn.Module) -> nn.Module:
        """Wrap the model that is trained in the place of a model on the host: here the model itself."""
        return model

    @contextmanager
    def placed(self, distillation: Any) -> Iterator[None]:
        """While open, a `qat.student.Distillation` is where it is trained: here both models are on the device."""
        with on_device(distillation.teacher, self.device), on_device(distillation.student, self.device):
            yield

    @contextmanager
    def stepping(self, teacher: nn.Module) -> Iterator[None]:
        """While open, within `placed`, steps are taken: where the engine offloads, the teacher's layers come as they
        run."""
        if not self.offloads:
            yield
            return
        teacher.to("cpu")
        with offloaded(teacher, self.device):
            yield

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """AdamW without decay of weights."""
        kind = OffloadedAdamW if self.offloads else partial(torch.optim.AdamW, fused=True)
        return kind(groups, weight_decay=0.0)

    def settle(self, distillation: nn.Module) -> None:
        """Finish passes without a gradient: afterwards every process holds its part of each parameter."""

    def gather(self, student: nn.Module, model: nn.Module) -> None:
        """Bring what was trained into the model on the host."""

    def parts(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        """Parts of a student and its optimizer that a checkpoint saves."""
        return {"model": model, "optimizer": optimizer}

    def checkpoint(self, checkpoint: Checkpoint | None) -> "Checkpoint | ShardedCheckpoint | None":
        """The checkpoint of a training, for as many processes as share it."""
        return checkpoint


class Sharded(Engine):
    """A process among several: every parameter is spread over all of them along its first axis.

    A decoder layer is whole only while it computes. Embedding, last norm and head of the student are whole from one
    end of a step to the other, the teacher's always.
    """

    def __init__(self, device: torch.device, at_once: int | None = None) -> None:
        super().__init__(device, at_once)
        self.processes, self.rank = dist.get_world_size(), dist.get_rank()
        self.mesh = init_device_mesh(device.type, (self.processes,))

    def check_batch(self, size: int) -> None:
        if size % self.processes:
            raise RecipeError(
                f"{self.processes} processes cannot share batches of {size} samples evenly: choose a batch_size that "
                f"{self.processes} divides, or another number of processes."
            )

    def total(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    def same(self, values: Tensor) -> Tensor:
        return _broadcast(values.clone()).cpu()

    def student(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    @contextmanager
    def placed(self, distillation: Any) -> Iterator[None]:
        teacher, student = distillation.teacher, distillation.student
        for layer in (*decoder_layers(teacher), *decoder_layers(student)):
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=True)  # moves the layer to the device
        for whole in (base_model(teacher), distillation):
            fully_shard(whole, mesh=self.mesh, reshard_after_forward=False)
        lm_head(teacher).to(self.device)
        yield

    def settle(self, distillation: nn.Module) -> None:
        """Reshard after a forward pass what would stay whole until the backward one."""
        for module in distillation.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def gather(self, student: nn.Module, model: nn.Module) -> None:
        """Gather the student in the first process, the only one that has the result; quantizers, which are parts of the
        student, are whole in all."""
        mine = dict(model.named_parameters())
        for name, parameter in [*student.named_parameters()]:
            whole = cast(DTensor, parameter).full_tensor()
            if name not in mine:
                owner, _, own = name.rpartition(".")
                student.get_submodule(owner)._parameters[own] = nn.Parameter(whole)
            elif self.rank == 0:
                mine[name].data = whole.cpu()

    def parts(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
        return {"model": _Shards(model), "optimizer": _Moments(optimizer)}

    def checkpoint(self, checkpoint: Checkpoint | None) -> "Checkpoint | ShardedCheckpoint | None":
        return None if checkpoint is None else ShardedCheckpoint(checkpoint, self.processes, self.rank)


def make_engine(device: torch.device, at_once: int | None = None) -> Engine:
    """The engine of this process, which may have joined others."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Sharded(device, at_once) if together else Engine(device, at_once)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Shards:
    """This process's part of a sharded model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: local(parameter.detach()) for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            local(parameter.detach()).copy_(state[name])


class _Moments:
    """This process's part of the state of an optimizer of sharded parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        moments = {
            place: {name: local(value) if isinstance(value, Tensor) else value for name, value in values.items()}
            for place, values in state["state"].items()
        }
        return {**state, "state": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {
            place: {name: _spread_as(value, parameters[place]) for name, value in values.items()}
            for place, values in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": moments})


def _spread_as(value: Any, parameter: Tensor) -> Any:
    """A part of a tensor that is spread as a parameter is; the optimizer's count of steps stays."""
    if not (isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.ndim == parameter.ndim):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    value = value.to(local(parameter.detach()).device)
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class ShardedCheckpoint:
    """The state of a training that several processes share, as a folder: a file of each process, and one of them all.

    Each process writes its own part, as safetensors, into the folder of the step; once all have, one process names the
    step in `latest.json`, and older ones are deleted. So the state is that of one step whenever it ends. (torch's own
    format for this keeps its table of contents pickled.)
    """

    def __init__(self, checkpoint: Checkpoint, processes: int, rank: int) -> None:
        self.whole = checkpoint
        self.processes, self.rank = processes, rank

    @property
    def folder(self) -> Path:
        """Where all parts are."""
        return self.whole.path.with_name(f"{self.whole.path.name}.parts")

    @property
    def path(self) -> Path:
        """The file that is there once there is a state."""
        return self.folder / "latest.json"

    def of(self, part: str) -> Checkpoint:
        """Checkpoint of what is the same in all processes, written by one."""
        return replace(self.whole.of(part), writes=self.rank == 0)

    def due(self, step: int, waited: float) -> bool:
        """Whether the state is to be written, as the first process's clock has it."""
        due = torch.tensor([float(self.whole.due(step, waited))])
        return bool(_broadcast(due).item())

    def save(self, step: int, parts: dict[str, Part], history: list[Record]) -> None:
        """Write everything that a continued training needs.

        Raises:
            ResultError: the disk is full or cannot be written.
        """
        self._own(step).save(step, parts, history)
        dist.barrier()
        if self.rank == 0:
            write_json(self.path, {"step": step, "processes": self.processes})
            for path in self.folder.glob("step-*.rank-*"):
                if not path.name.startswith(f"step-{step}."):
                    path.unlink()
        dist.barrier()

    def load(self, parts: dict[str, Part]) -> tuple[int, list[Record]]:
        """Continue from the folder, if there is one: bring the parts to its state.

        Raises:
            ResultError: it was written by another number of processes, is damaged or belongs to another training.
        """
        if not self.path.is_file():
            return 0, []
        latest = read_object(self.path, "checkpoint of a training", remedy="delete it to learn from the start")
        processes, step = latest.get("processes"), latest.get("step")
        if processes != self.processes:
            raise ResultError(
                f"checkpoint {self.folder} is of {processes} processes, and these are {self.processes}: "
                "start as many, or delete it to learn from the start."
            )
        if not isinstance(step, int):
            raise ResultError(f"checkpoint {self.folder} is damaged (step); delete it to learn from the start.")
        own = self._own(step)
        if not own.path.is_file():
            raise ResultError(f"checkpoint {self.folder} lacks {own.path.name}; delete it to learn from the start.")
        return own.load(parts)

    def _own(self, step: int) -> Checkpoint:
        path = self.folder / f"step-{step}.rank-{self.rank}"
        return replace(self.whole, path=path, identity=f"{self.whole.identity} {self.rank} of {self.processes}")


def _broadcast(value: Tensor) -> Tensor:
    """Broadcast the first process's tensor."""
    if dist.get_backend() == "nccl":
        value = value.cuda()
    dist.broadcast(value, 0)
    return value


def launched() -> bool:
    """Whether torchrun, or another that tells processes of each other in the same way, has started this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def processes(device: str) -> Iterator[torch.device]:
    """While open, processes that were started together know of each other; the device of this one.

    Args:
        device: cpu, cuda or auto; a process of several on a host has the GPU of its number there.
    """
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    try:
        yield cast(torch.device, state.device)
    finally:
        state.destroy_process_group()
        PartialState._reset_state()
