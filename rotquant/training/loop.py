"""The one training loop: steps, history, checkpoints, progress; and the gradient step that most trainings take.

`train` repeats a function of the step's number, which does whatever a step is and says its values; a method composes it
from `GradientStep` and what is its own. A step depends on its number and on the parts of the state alone, so a training
that was killed continues from its checkpoint with equal bits. No optimizer, model or tracking server is known.

Where things lie is the caller's: optimizer states lie with their parameters, autocast belongs into the loss, and

    with placed(model, device), recomputed(model):
        train(step, steps, "tuning", parts={"model": model, "optimizer": optimizer}, checkpoint=checkpoint)

Tuning block by block calls `train` for each decoder layer while `LayerStream` holds it on the accelerator, with a
checkpoint file of its own: a finished block takes no step and is restored. Training under accelerate or FSDP2 gives
`GradientStep` the process's share of a batch, clipping and (accelerate) `backward`, records a loss that is reduced over
processes, and has parts whose `state_dict` gathers, of which one process `writes` (tests/test_training_distributed.py).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint

from rotquant.foundation.errors import RotquantError
from rotquant.foundation.progress import task, tell
from rotquant.tensors.faster import FasterKernels
from rotquant.training.replay import Replay
from rotquant.training.state import Checkpoint, Part, Record

_LOSS = MappingProxyType({"loss": ".3f"})


def train(
    step: Callable[[int], Record],
    steps: int,
    description: str,
    *,
    parts: Mapping[str, Part] = MappingProxyType({}),
    checkpoint: Checkpoint | None = None,
    on_step: Callable[[Record], None] | None = None,
    noted: Mapping[str, str] = _LOSS,
    not_finite: str = "the loss of {description} is {loss} at step {step}.",
) -> list[Record]:
    """Take steps, from the first or from a checkpoint's on.

    Args:
        step: takes the step of a number, counted from zero, and returns its values, JSON and few: scalars, or dicts of
            them. A step that returns none leaves no record.
        steps: how many there are.
        description: for the progress shown, and for whoever hears the steps (`rotquant.foundation.progress`).
        parts: by name all that a step changes and a later one reads. Restored in place, before the first step.
        checkpoint: where they are saved.
        on_step: called with each new record, after the checkpoint is written.
        noted: which values are shown next to the count, the latest of each, with their formats.
        not_finite: the sentence about a `loss` that is inf or nan, with fields description, loss and step.

    Returns:
        The history, one record per step that had values: `step` and these.

    Raises:
        ResultError: the checkpoint belongs to another training, is damaged or cannot be written.
        RotquantError: the loss is not finite.
    """
    first, history = (0, []) if checkpoint is None else checkpoint.load(parts)
    latest = {name: value for record in history for name, value in record.items()}
    saved = time.monotonic()
    with task(description, "step", steps, first) as under_way:
        for number in range(first, steps):
            values = step(number)
            if not math.isfinite(values.get("loss", 0.0)):
                raise RotquantError(not_finite.format(description=description, loss=values["loss"], step=number))
            if values:
                history.append({"step": number, **values})
            latest |= values
            under_way.advance(note=", ".join(f"{key} {latest[key]:{noted[key]}}" for key in noted if key in latest))
            done = number + 1
            if checkpoint is not None and (done == steps or checkpoint.due(done, time.monotonic() - saved)):
                checkpoint.save(done, parts, history)
                saved = time.monotonic()
            if values:
                tell(description, history[-1])
            if values and on_step is not None:
                on_step(history[-1])
    return history


@dataclass
class GradientStep:
    """A step of optimizers along the gradient of a batch's loss; call it with the number of the step.

    batch: the parts of a step's batch, which pass the model one after the other; a function of the step's number alone.
    loss: of one part, a scalar with gradient; or named scalars, `loss` among them. Those of all parts are added up, so
        each is its part's share of the batch's.
    schedules: of learning rates; they step after the optimizers.
    clip: called between the gradients and the optimizers.
    backward: how gradients are computed from a loss.
    replay: takes parts, tuples of tensors then, whose loss is a pure function of them, and may record that on a GPU.
    """

    batch: Callable[[int], Iterable[Any]]
    loss: Callable[[Any], Tensor | Mapping[str, Tensor]]
    optimizers: Sequence[Optimizer]
    schedules: Sequence[LRScheduler] = ()
    clip: Callable[[], object] | None = None
    backward: Callable[[Tensor], object] = Tensor.backward
    replay: Replay | None = None

    def __call__(self, step: int) -> Record:
        """Take the step; the sums of its named scalars."""
        values = self.accumulate(self.batch(step))
        self.apply()
        for schedule in self.schedules:
            schedule.step()
        return {name: sum(part[name].item() for part in values) for name in values[0]}

    def accumulate(self, parts: Iterable[Any]) -> list[dict[str, Tensor]]:
        """Compute the gradient of a batch, in place of an earlier one; the scalars of its parts, without waiting."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.replay is None:
            return [self._of_part(part) for part in parts]
        return [self.replay(self._of_part, part) for part in parts]

    def apply(self) -> None:
        """Let the optimizers follow the gradient."""
        if self.clip is not None:
            self.clip()
        for optimizer in self.optimizers:
            optimizer.step()

    def _of_part(self, part: Any) -> dict[str, Tensor]:
        with torch.enable_grad():
            found = self.loss(part)
            values = {"loss": found} if isinstance(found, Tensor) else found
            self.backward(values["loss"])
        return {name: value.detach() for name, value in values.items()}


@contextmanager
def recomputed(model: nn.Module, active: bool = True, **settings: Any) -> Iterator[None]:
    """While open, a transformers model keeps only each decoder layer's input for the backward pass, where `active`.

    The layer is computed again there. Afterwards everything is as it was; dropout is on or off as it was all the time.
    (`gradient_checkpointing_enable` would also make a frozen embedding's output ask for a gradient.) Both passes take
    `FasterKernels`, since torch suspends the caller's mode in the backward pass. Nothing in a layer is random.

    Args:
        settings: of `torch.utils.checkpoint.checkpoint`, for example `context_fn` for other modes of the two passes.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = ("gradient_checkpointing", "_gradient_checkpointing_func", "training")
    layers = [module for module in model.modules() if active and isinstance(module, GradientCheckpointingLayer)]
    before = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    settings = {"preserve_rng_state": False, "context_fn": lambda: (FasterKernels(), FasterKernels())} | settings
    recompute = partial(checkpoint, use_reentrant=False, **settings)
    for layer in layers:  # transformers acts in training alone; modules inside a layer keep their own mode
        vars(layer).update(zip(names, (True, recompute, True), strict=True))
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for name in names:
                vars(layer).pop(name, None)
            vars(layer).update(values)


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
