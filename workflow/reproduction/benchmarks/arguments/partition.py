"""Arguments of the benchmarks of fake quantization in training as validated data, separate from their functions."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from reproduction.benchmarks.arguments.gpu import Size
from rotquant.foundation.data import Frozen

#: Alignment to 16 bytes, in elements of the smallest type.
_MULTIPLE = 8


class FakeQuantizeArguments(Frozen):
    """A weight [out_features, in_features] as the codes of its groups stand for it, and the gradients (RCP Sec. 4.3).

    kind, straight_through: of the quantizer (`qat.quantizers.make_quantizer`).
    phase: `backward` has the gradient of the value given, `both` are a step of training.
    implementation: ours; torch, the same formulas in eager mode, and compiled by it; copy, of as many bytes of weights
        as must be read and written, two weights for the forward pass and three for the backward one.
    """

    out_features: Annotated[int, Field(gt=0, multiple_of=2)]
    in_features: Size
    group_size: Annotated[int, Field(gt=0, multiple_of=_MULTIPLE)] = 128
    dtype: Literal["bfloat16", "float16", "float32"]
    kind: Literal["range", "learned_range", "ldp", "n2uq", "nf3", "nf3_ldp"] = "ldp"
    straight_through: Literal["step", "ramp"] = "step"
    phase: Literal["forward", "backward", "both"]
    implementation: Literal["ours", "torch", "compiled", "copy"]

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "FakeQuantizeArguments":
        if self.in_features % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {self.in_features} input features")
        if self.phase == "backward" and self.implementation in ("torch", "compiled"):
            raise ValueError("torch has no backward pass without the forward one: ask for both")
        return self


class RoundRowsArguments(Frozen):
    """A float32 weight [out_features, in_features] rounded to 4 bits and back, to bfloat16, by a scale
    for each row that is learned (block-wise tuning, PrefixQuant Sec. 5.2).

    phase, implementation: see `FakeQuantizeArguments`; the copy moves as many bytes.
    """

    out_features: Annotated[int, Field(gt=0, multiple_of=4)]
    in_features: Annotated[int, Field(gt=0, multiple_of=_MULTIPLE)]
    phase: Literal["forward", "both"]
    implementation: Literal["ours", "torch", "copy"]
