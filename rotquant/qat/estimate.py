"""Estimates of what a self-distillation will need, before any weight is loaded: memory of each process, and time.

Counted from the model's configuration, and for the time from what a large matrix product takes on the device at hand.
Memory is that of tensors that must exist together; what libraries take in addition to them is a constant.

The budget of RCP at Llama-2-7B's shape, 8 sequences of 1,024 tokens at once, in GiB:

                                                      on one GPU      with offloading
    weights and gradients, float32                          50.2                 50.2
    quantizers of groups of 128, with gradients              1.5                  1.5
    AdamW's moments of both                                 51.7     0.4 (host: 51.7)
    the teacher, bfloat16                                   12.9     1.6 (host: 12.1)
    activations, a layer's quantized weights, loss          15.2                 15.2
    held-out samples, next to a recorded step                3.8
                                                           135.4                 68.9

On an H200 with offloading: 57.6 allocated and 68.8 reserved at most, 98 on the host, 3.5 s a step (the clips' search
apart). At 2 layers, where both ways fit, losses are equal to the last bit, and a step takes 0.25 s in place of 0.14.
The step's best parameters so far, 25 GiB, lie on the host in any case. Offloading (`training.offload`,
`models.placement`) changes no number, so it is no setting: one GPU takes it where the other way does not fit.
Optimizer states of 8 bits would take 12.9 GiB of the GPU and change the numbers; weights of 16 bits, rounded at random,
would save 25.1 and add noise larger than RCP's steps of 1e-6.
"""

import copy
import time
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.memory import KEPT_BYTES, LIBRARIES, ON_THEIR_WAY, USABLE, free_memory, kept_bytes
from rotquant.qat.loss import logits_at_once
from rotquant.qat.method import SelfDistillation
from rotquant.qat.steps import TOKENS_AT_ONCE
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.devices import of_device

#: Bytes of a parameter in training: itself, its gradient and two moments, in float32. Of these the moments.
_TRAINED, _MOMENTS = 16, 8
#: Bytes that offloading holds of moments on the device.
_TILES = 6 * 4 * 2**24
#: Parameters that a group of weights has at most.
_LEARNED = 4
#: Tensors of the size of a chunk's logits that the loss holds together.
_LOGITS = 6
#: Tensors of the MLP's width in float32 that a layer holds together where no gradient is asked for.
_PASSING = 4
#: Share of a large matrix product's rate that training reaches; the rest are quantizers, norms, attention.
_SHARE = 0.4


@dataclass(frozen=True)
class TrainingEstimate:
    """Estimated memory and time of a training.

    needed, free: bytes on each process's device, and how many there are now. seconds: of all steps, roughly.
    at_once: sequences that pass the model together, None for all of a batch. offloaded: whether moments and teacher lie
        on the host. host: bytes there.
    """

    parameters: int
    steps: int
    tokens: int
    processes: int
    needed: int
    free: int
    seconds: float
    at_once: int | None
    offloaded: bool
    host: int

    def check(self) -> None:
        """Raise `RecipeError` where memory of the device or the host does not suffice, saying how much is missing."""
        if self.needed > self.free:
            missing = (self.needed - self.free) / 2**30
            raise RecipeError(
                f"training takes {self.needed / 2**30:.1f} GiB on each device, and {self.free / 2**30:.1f} GiB are "
                f"free: {missing:.1f} GiB are missing; take more GPUs, a smaller --batch-size or shorter sequences."
            )
        available = free_memory(torch.device("cpu"))
        if self.offloaded and self.host > available:
            missing = (self.host - available) / 2**30
            raise RecipeError(
                f"training on one GPU of this size keeps {self.host / 2**30:.1f} GiB on the host, of which "
                f"{missing:.1f} GiB are missing: take more GPUs."
            )

    def __str__(self) -> str:
        host = f", {self.host / 2**30:.1f} GiB of the host" if self.offloaded else ""
        return (
            f"{self.parameters / 1e6:,.1f} M parameters, {self.steps:,} steps of {self.tokens:,} tokens on "
            f"{self.processes} {'process' if self.processes == 1 else 'processes'}: about "
            f"{self.needed / 2**30:.1f} GiB on each device ({self.free / 2**30:.1f} GiB free){host} and "
            f"{_time(self.seconds)}"
        )


@dataclass(frozen=True)
class Way:
    """A way in which a process can train, and what it holds, in bytes of its device unless stated otherwise.

    at_once: sequences that pass the model together, None for all of a batch; tokens: of these.
    offloaded: whether moments and the teacher's layers lie on the host. processes: that share a training.
    layers, learned, rest, widest: parameters of all decoder layers, of their quantizers, outside of both, and of the
        largest layer. teacher: bytes of one of the teacher's.
    validated: whether the step's best parameters so far are kept.
    """

    model: nn.Module
    device: torch.device
    at_once: int | None
    tokens: int
    offloaded: bool
    processes: int
    layers: int
    learned: int
    rest: int
    widest: int
    teacher: int
    validated: bool

    @property
    def needed(self) -> int:
        """All together."""
        return self.networks + self.quantizers + self.activations + LIBRARIES

    @property
    def networks(self) -> int:
        """Student, gradients, moments and teacher."""
        return self._trained(self.layers)

    @property
    def quantizers(self) -> int:
        """What the quantizers' parameters add to it."""
        return self._trained(self.layers + self.learned) - self.networks

    @property
    def moments(self) -> int:
        """AdamW's moments on the host."""
        return _MOMENTS * (self.layers + self.learned + self.rest) if self.offloaded else 0

    @property
    def best(self) -> int:
        """The step's best parameters so far, on the host."""
        return 4 * (self.layers + self.learned + self.rest) if self.validated else 0

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return kept_bytes(self.model, self.tokens) > of_device(KEPT_BYTES, self.device)

    @property
    def recorded(self) -> bool:
        """Whether steps may be recorded as a CUDA graph, which keeps its memory from one step to the next."""
        return self.device.type == "cuda" and self.processes == 1 and not self.offloaded

    @property
    def activations(self) -> int:
        """Kept for the backward pass, a layer's quantized weights with what their gradient needs, and the loss; also a
        pass of held-out samples, where a graph's memory is not free for it."""
        config: Any = self.model.config
        kept, hidden = kept_bytes(self.model, self.tokens), 4 * self.tokens * config.hidden_size
        layers = kept // config.num_hidden_layers + config.num_hidden_layers * hidden if self.recomputes else kept
        quantized = 12 * self.widest * (1 if self.recomputes else config.num_hidden_layers)
        step = layers + quantized + self._loss(self.tokens) + 4 * config.vocab_size * config.hidden_size
        return step + (self._held_out if self.validated and self.recorded else 0)

    @property
    def _held_out(self) -> int:
        """A pass of held-out samples: what a layer holds, its quantized weights, and the loss."""
        tokens = self.tokens if self.at_once else max(self.tokens, of_device(TOKENS_AT_ONCE, self.device))
        width = architecture_of(self.model).intermediate_size
        return 4 * (_PASSING * tokens * width + self.widest) + self._loss(tokens)

    def _loss(self, tokens: int) -> int:
        """The loss of so many tokens: a chunk's logits, and hidden states of student and teacher."""
        config: Any = self.model.config
        chunk = min(logits_at_once(self.device), tokens * config.vocab_size)
        return 4 * _LOGITS * chunk + 2 * 4 * tokens * config.hidden_size

    def _trained(self, layers: int) -> int:
        """Student and teacher with so many parameters in all decoder layers."""
        if self.offloaded:
            teacher = self.teacher * (self.rest + ON_THEIR_WAY * self.widest)
            return (_TRAINED - _MOMENTS) * (layers + self.rest) + _TILES + teacher
        trained = _TRAINED * (layers + self.rest) // self.processes
        teacher = self.teacher * (layers // self.processes + self.rest)
        # embedding and head with their gradients, two layers of the student and two of the teacher are whole meanwhile
        whole = 8 * self.rest + (2 * 8 + 2 * self.teacher) * self.widest if self.processes > 1 else 0
        return trained + teacher + whole


def chosen_way(
    model: nn.Module,
    recipe: Recipe,
    settings: SelfDistillation,
    device: torch.device,
    dtype: torch.dtype,
    memory: int | None,
    processes: int = 1,
    at_once: int | None = None,
    untied: int = 0,
) -> Way:
    """The first way of a training that fits so much memory of each device, else the last; without a bound the first.

    Ways are: as asked; then, where `at_once` is None, fewer and fewer sequences together; then the same with
    offloading, by one process.

    Args:
        model: without weights. dtype: in which it is loaded.
        memory: all of a GPU's, not what is free of it, so that a training continues in the way in which it began.
        at_once: sequences that pass the model together.
        untied: parameters that a training has in addition, as embedding and head become two.
    """
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    layers, every = sum(counts), sum(parameter.numel() for parameter in model.parameters())
    own, gpu = -(-settings.batch_size // processes), device.type == "cuda"
    size = recipe.rounded.scheme.group_size or cast(Any, model).config.hidden_size
    learned = _LEARNED * (layers // size) if "quantizer_lr" in type(settings).model_fields else 0
    sizes = [at_once]
    while at_once is None and gpu and (smaller := (sizes[-1] or own) // 2):
        sizes.append(smaller)
    ways = [
        Way(
            *(model, device, together, min(own, together or own) * settings.text.sequence_length, offloaded, processes),
            *(layers, learned, every - layers + untied, max(counts), dtype.itemsize, settings.validated > 0),
        )
        for offloaded in ((False, True) if processes == 1 and gpu else (False,))
        for together in sizes
    ]
    return next((way for way in ways if memory is None or way.needed <= USABLE * memory), ways[-1])


def estimate(
    config: Any,
    recipe: Recipe,
    settings: SelfDistillation,
    device: torch.device,
    dtype: torch.dtype,
    processes: int = 1,
    at_once: int | None = None,
) -> TrainingEstimate:
    """Estimate a training on equal devices, in its `chosen_way`.

    Args:
        config: of the model. dtype: in which it is loaded.
        at_once: sequences that pass the model together.
    """
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    way = chosen_way(_empty(config), recipe, settings, device, dtype, memory, processes, at_once)
    own, length, parameters = -(-settings.batch_size // processes), settings.text.sequence_length, way.layers + way.rest
    passes = 4 if way.recomputes else 3  # forward, backward twice as much, and forward once more
    flops = 2 * parameters * (passes + 1) * own * length
    return TrainingEstimate(
        parameters=parameters,
        steps=settings.steps,
        tokens=settings.batch_size * length,
        processes=processes,
        needed=way.needed,
        free=free_memory(device),
        seconds=settings.steps * flops / (_SHARE * _rate(device, dtype)),
        at_once=way.at_once,
        offloaded=way.offloaded,
        host=way.moments + way.best + dtype.itemsize * way.layers if way.offloaded else 0,
    )


def _empty(config: Any) -> nn.Module:
    """The model without weights. transformers writes the type into the configuration that it makes a model of."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)


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
