"""One step of a self-distillation (RCP Eq. 3): gradients of the parts of a batch, cut and applied, and its record.

Also the parameters of the step with the least loss on samples that are not trained on. The training itself is
`qat.training`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.models.masks import recordable
from rotquant.qat.engine import Engine, local
from rotquant.qat.method import SelfDistillation
from rotquant.qat.quantizers import TrainableQuantizer
from rotquant.qat.student import Distillation
from rotquant.tensors.devices import of_device
from rotquant.tensors.partition import partitions
from rotquant.training.loop import GradientStep, shuffled_batches
from rotquant.training.offload import host_tensors
from rotquant.training.replay import Replay
from rotquant.training.state import Record

#: Tokens that pass a model at once where no gradient is asked for.
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}


class BestParameters:
    """A student's parameters, of those this process has, when its loss on samples that are not trained on was least.

    They lie on the host. A part of a training's state: `loss` is None before the first measurement.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.loss: float | None = None
        self.best: dict[str, Tensor] = {}

    @torch.no_grad()
    def measured(self, loss: float) -> None:
        """Keep the parameters where this loss, of now, is less than all before."""
        if self.loss is None or loss < self.loss:
            self.loss = loss
            self._keep(dict(self._own()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the parameters that were kept into the model."""
        for name, own in self._own():
            own.copy_(self.best[name])

    def state_dict(self) -> dict[str, Any]:
        """The loss and the parameters."""
        return {"loss": self.loss, "kept": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state_dict` gave."""
        self.loss = state["loss"]
        if self.loss is not None:
            self._keep(state["kept"])

    def _keep(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of the parameters into memory that is there from the first time on."""
        if not self.best:
            own = dict(self._own())
            hosts = host_tensors(own.values(), next(iter(own.values())).device)
            self.best = dict(zip(own, hosts, strict=True))
        for name, kept in self.best.items():
            kept.copy_(values[name])

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, local(parameter.detach())) for name, parameter in self.model.named_parameters())


@dataclass
class OptimizerStep:
    """A step of the training; call it with its number, while its `replay` is open.

    ids, validation: samples that are trained on, and that are not, int64 [samples, tokens]. seed: of their order.
    states: the teacher's last hidden states of `ids`, or None. weights, learned: the student's parameters, and those of
        its quantizers, which are also given by layer. best: None where the last step counts.
    """

    settings: SelfDistillation
    engine: Engine
    seed: int
    ids: Tensor
    validation: Tensor
    quantizers: Mapping[tuple[int, str], TrainableQuantizer]
    distillation: Distillation
    states: Tensor | None
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    weights: list[nn.Parameter]
    learned: list[nn.Parameter]
    best: BestParameters | None

    def __post_init__(self) -> None:
        self.batches = shuffled_batches(len(self.ids), self.settings.batch_size, self.settings.steps, self.seed)
        parameters = [*self.weights, *self.learned]
        self.replay = Replay(parameters, self.settings.steps, pure=self._recordable())
        self.gradient = GradientStep(self._parts, self._loss, [self.optimizer], replay=self.replay)

    def __call__(self, number: int) -> Record:
        """Take the step: nothing is changed where loss or gradient is not finite."""
        parts = self.gradient.accumulate(self._parts(number))
        names = [*parts[0]]
        sums = self.engine.total(torch.stack([torch.stack([part[name] for part in parts]).sum() for name in names]))
        norms = {
            f"{what}_gradient": self.engine.norm([p.grad for p in group if p.grad is not None])
            for what, group in (("weight", self.weights), ("quantizer", self.learned))
            if group
        }
        found = torch.stack([*(sums / self.engine.processes).unbind(), *(norm.to(sums) for norm in norms.values())])
        record = dict(zip([*names, *norms], found.tolist(), strict=True))
        bad = next((value for value in record.values() if not math.isfinite(value)), None)
        if bad is not None:
            return {"loss": bad}
        self._cut(math.hypot(*(record[name] for name in norms)))
        self.gradient.apply()
        self.schedule.step()
        return record | self._validated(number + 1) | self._quantizers()

    @torch.no_grad()
    def _cut(self, norm: float) -> None:
        """Shorten gradients whose norm together is above what the settings allow."""
        most = self.settings.gradient_norm
        if most is not None and norm > most:
            every = (parameter.grad for parameter in (*self.weights, *self.learned))
            gradients = [local(gradient) for gradient in every if gradient is not None]
            torch._foreach_mul_(gradients, most / norm)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def _validated(self, taken: int) -> Record:
        """The loss on samples that are not trained on, after so many steps; empty where it is not asked for."""
        settings, ids = self.settings, self.validation
        if self.best is None or (taken % settings.validate_every and taken < settings.steps):
            return {}
        # All processes pass all samples, since a sharded model computes in all of them at once.
        own, many = len(self.engine.own(self.batches[0])), of_device(TOKENS_AT_ONCE, self.engine.device) // ids.shape[1]
        parts = ids.split(self.engine.at_once or max(own, many))
        losses = [self.distillation(part.to(self.engine.device)).loss.double() * len(part) for part in parts]
        loss = torch.stack(losses).sum().item() / len(ids)
        self.engine.settle(self.distillation)
        self.best.measured(loss)
        return {"validation_loss": loss}

    def _parts(self, number: int) -> Iterator[tuple[Tensor, ...]]:
        """The samples of this process in a step's batch [n, tokens], in parts that pass the model one after the other;
        with each the teacher's states [n, tokens, hidden], where they are known."""
        own, device = self.engine.own(self.batches[number]), self.engine.device
        for rows in own.split(self.engine.at_once or len(own)):
            ids = self.ids[rows].to(device)
            yield (ids,) if self.states is None else (ids, self.states[rows.to(device)])

    def _loss(self, part: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        found = self.distillation(*part)
        share = len(part[0]) * self.engine.processes / len(self.batches[0])  # gradients become their processes' mean
        return {name: value * share for name, value in found._asdict().items()}

    def _recordable(self) -> bool:
        """Whether a graph can hold a part. Parts of another shape would need the graph's memory once more."""
        engine, own = self.engine, len(self.engine.own(self.batches[0]))
        alone = engine.processes == 1 and not engine.offloads
        return alone and own % min(own, engine.at_once or own) == 0 and recordable(self.distillation.student)

    @torch.no_grad()
    def _quantizers(self) -> Record:
        """Where the clips and partitions of all groups are in the mean."""
        learned: dict[str, list[Tensor]] = {}
        for quantizer in self.quantizers.values():
            for name, parameter in quantizer.named_parameters():
                learned.setdefault(name, []).append(local(parameter.detach()).flatten())
        if not learned:
            return {}
        found = _shape_of({name: torch.cat(parts) for name, parts in learned.items()})
        sums = [
            torch.stack([values.double().sum(), values.new_tensor(len(values)).double()]) for values in found.values()
        ]
        means = self.engine.total(torch.stack(sums))
        return dict(zip(found, (means[:, 0] / means[:, 1]).tolist(), strict=True))


def _shape_of(learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Summary of quantizers' parameters, [groups] by their names: the shares of the range at which clips and partitions
    are, and how far the partition that left a third most is from it."""
    ends = {"clip_high": "gamma", "clip_low": "beta"}
    found = {end: learned[name].sigmoid() for end, name in ends.items() if name in learned}
    if "s2" in learned:
        shares = partitions(learned["s1"].unsqueeze(-1), learned["s2"].unsqueeze(-1))
        found |= {f"partition_{place + 1}": shares[:, place] for place in range(3)}
        found["from_uniform"] = (shares - 1 / 3).abs().amax(-1)
    elif "s1" in learned:
        found["centre"] = learned["s1"].sigmoid()
    return found
