"""Benchmarks of learning rotations and quantizing weights (SpinQuant Table 15, PrefixQuant Table 10, RCP Table 8)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from reproduction.benchmarks import Size
from rotquant.foundation.data import Frozen


def _ascending(two: tuple[int, int]) -> tuple[int, int]:
    if two[0] >= two[1]:
        raise ValueError("give a number and a larger one")
    return two


Two = Annotated[tuple[Size, Size], AfterValidator(_ascending)]
"""The fewer and the more of what is measured, whose difference gives the rest."""


class LearnRotationsArguments(Frozen):
    """Learning a model's rotations with random weights, on as many GPUs.

    steps: of the whole learning; batch_size: sequences in each, `tokens` long.
    taken: steps that are taken and timed, where not all of them are; the first warms up, so three at least.
    """

    shape: str
    steps: Size = 100
    batch_size: Size = 8
    tokens: Size = 2048
    taken: Size | None = None
    gpus: Size = 1

    @model_validator(mode="after")
    def _a_step_can_be_timed(self) -> "LearnRotationsArguments":
        if not 3 <= (self.taken or self.steps) <= self.steps:
            raise ValueError("taken must be at least 3 steps, and no more than there are")
        return self


class CalibrateArguments(Frozen):
    """GPTQ of a model with random weights on one GPU.

    samples: calibration texts of `tokens` tokens. layers: the fewer and the more layers of two shortened models whose
    times give those of all layers; None quantizes the whole model.
    """

    shape: str
    samples: Size = 128
    tokens: Size = 2048
    layers: Two | None = None


class PrefixQuantArguments(Frozen):
    """A part of PrefixQuant W4A4KV4 on a model with random weights on one GPU, as its method's settings say.

    part: `prefix`, finding the tokens; `grid`, both grid searches; `tuning`, of all blocks, grid searches with it.
    samples: of `tokens` tokens, of the calibration text or, of `tuning`, of its own.
    epochs: of `tuning`. taken: the fewer and the more epochs of two shortened tunings whose times give those of all.
    layers: the fewer and the more layers of two shortened models whose times give those of all layers.
    """

    shape: str
    part: Literal["prefix", "grid", "tuning"]
    samples: Size = 8
    tokens: Size = 1024
    epochs: Size = 20
    taken: Two = (1, 2)
    layers: Two = (1, 2)


class DistillArguments(Frozen):
    """Quantization-aware training of a W2A4KV4 model with random weights on one GPU (RCP Table 8).

    method: BitDistiller, the same in a rotated model, or RCP.
    batch_size: sequences in each step, `tokens` long. samples: of the text, each seen `epochs` times.
    taken: steps that are taken; the first two warm up, so four at least.
    layers: the fewer and the more layers of two shortened models whose steps and memory give those of all layers; None
        trains the whole model.
    """

    shape: str
    method: Literal["BitDistiller", "BitDistiller rotated", "RCP"]
    batch_size: Size = 8
    tokens: Size = 1024
    samples: Size = 8000
    epochs: Size = 8
    taken: Size = 6
    layers: Two | None = None

    @model_validator(mode="after")
    def _a_step_can_be_timed(self) -> "DistillArguments":
        if not 4 <= self.taken <= self.steps:
            raise ValueError("taken must be at least 4 steps, and no more than there are")
        return self

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.epochs * (self.samples // self.batch_size)


class SharedDistillArguments(DistillArguments):
    """The same on one GPU or several of one host, which share each batch evenly; the model is whole.

    at_once: sequences of its share that pass a GPU together; None for all.
    """

    gpus: Size = 2
    at_once: Size | None = None

    @model_validator(mode="after")
    def _shares_are_equal(self) -> "SharedDistillArguments":
        if self.batch_size % self.gpus:
            raise ValueError(f"batches of {self.batch_size} have no equal shares for {self.gpus} GPUs")
        if self.layers is not None:
            raise ValueError("layers are not left out where GPUs share a model")
        return self
