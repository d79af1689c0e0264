"""Estimates of what a self-distillation will need, before any weight is loaded: memory of each process, and time.

Counted from the model's configuration, and for the time from what a large matrix product takes on the device at hand.
Memory is that of tensors that must exist together; what libraries take in addition to them is a constant.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import decoder_layers
from rotquant.models.batches import kept_bytes
from rotquant.qat.loss import logits_at_once
from rotquant.qat.method import SelfDistillation
from rotquant.qat.training import KEPT_BYTES
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.devices import of_device

#: A parameter in training: itself, its gradient and two moments, in float32.
_TRAINED = 16
#: Parameters that a group of weights has at most.
_LEARNED = 4
#: Tensors of the size of a chunk's logits that the loss holds together.
_LOGITS = 6
#: What libraries and a CUDA context take.
_LIBRARIES = 2**30
#: Share of a large matrix product's rate that training reaches; the rest are quantizers, norms, attention.
_SHARE = 0.4


@dataclass(frozen=True)
class TrainingEstimate:
    """Estimated memory and time of a training.

    needed, free: bytes on each process's device, and how many there are now. seconds: of all steps, roughly.
    """

    parameters: int
    steps: int
    tokens: int
    processes: int
    needed: int
    free: int
    seconds: float

    def check(self) -> None:
        """Raise `RecipeError` where memory does not suffice, saying how much is missing."""
        if self.needed > self.free:
            missing = (self.needed - self.free) / 2**30
            raise RecipeError(
                f"training takes {self.needed / 2**30:.1f} GiB on each device, and {self.free / 2**30:.1f} GiB are "
                f"free: {missing:.1f} GiB are missing; take more GPUs, a smaller --batch-size or shorter sequences."
            )

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:,.1f} M parameters, {self.steps:,} steps of {self.tokens:,} tokens on "
            f"{self.processes} {'process' if self.processes == 1 else 'processes'}: about "
            f"{self.needed / 2**30:.1f} GiB on each device ({self.free / 2**30:.1f} GiB free) and {_time(self.seconds)}"
        )


def estimate(
    config: Any,
    recipe: Recipe,
    settings: SelfDistillation,
    device: torch.device,
    dtype: torch.dtype,
    processes: int = 1,
    at_once: int | None = None,
) -> TrainingEstimate:
    """Estimate a training on equal devices.

    Args:
        config: of the model. dtype: in which it is loaded.
        at_once: sequences that pass the model together.
    """
    model = _empty(config)
    layers, rest, widest = _parameters(model)
    own = -(-settings.batch_size // processes)
    tokens = min(own, at_once or own) * settings.text.sequence_length
    memory = Memory(model, device, dtype, processes, tokens)
    size = recipe.rounded.scheme.group_size or config.hidden_size
    groups = layers // size if "quantizer_lr" in type(settings).model_fields else 0
    needed = memory.parameters(layers + _LEARNED * groups, rest, widest) + memory.activations(widest)
    passes = 4 if memory.recomputes else 3  # forward, backward twice as much, and forward once more
    flops = 2 * (layers + rest) * (passes + 1) * own * settings.text.sequence_length
    seconds = settings.steps * flops / (_SHARE * _rate(device, dtype))
    every = settings.batch_size * settings.text.sequence_length
    return TrainingEstimate(layers + rest, settings.steps, every, processes, needed, free_memory(device), seconds)


@dataclass(frozen=True)
class Memory:
    """Bytes of a process whose model passes `tokens` at once."""

    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    processes: int
    tokens: int

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return kept_bytes(self.model, self.tokens) > of_device(KEPT_BYTES, self.device)

    def parameters(self, layers: int, rest: int, widest: int) -> int:
        """Parameters of student and teacher: numbers of parameters in all decoder layers, outside of them, and in one
        layer."""
        trained = _TRAINED * (layers + rest) // self.processes
        teacher = self.dtype.itemsize * (layers // self.processes + rest)
        # embedding and head with their gradients, two layers of the student and two of the teacher are whole meanwhile
        whole = 8 * rest + (2 * 8 + 2 * self.dtype.itemsize) * widest if self.processes > 1 else 0
        return trained + teacher + whole

    def activations(self, widest: int) -> int:
        """Bytes kept for the backward pass: a layer's quantized weights with what their gradient needs, and the
        loss."""
        config: Any = self.model.config
        kept, hidden = kept_bytes(self.model, self.tokens), 4 * self.tokens * config.hidden_size
        layers = kept // config.num_hidden_layers + config.num_hidden_layers * hidden if self.recomputes else kept
        quantized = 12 * widest * (1 if self.recomputes else config.num_hidden_layers)
        chunk = min(logits_at_once(self.device), self.tokens * config.vocab_size)
        loss = 4 * _LOGITS * chunk + 4 * config.vocab_size * config.hidden_size + 2 * hidden
        return layers + quantized + loss + _LIBRARIES


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def _empty(config: Any) -> nn.Module:
    """The model without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _parameters(model: nn.Module) -> tuple[int, int, int]:
    """Numbers of parameters in all decoder layers, outside of them, and in the largest layer."""
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    return sum(layers), sum(parameter.numel() for parameter in model.parameters()) - sum(layers), max(layers)


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations in a second of a large matrix product."""
    gpu = device.type == "cuda"
    size, kind = (8192, torch.bfloat16 if dtype.itemsize == 2 else torch.float32) if gpu else (768, torch.float32)
    x = torch.ones(size, size, dtype=kind, device=device)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        torch.mm(x, x)
        if gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / median(times[1:])


def _time(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
