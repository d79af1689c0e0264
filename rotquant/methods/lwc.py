"""Learnable weight clipping (OmniQuant, Shao et al. 2023, Eq. 2) without its equivalent transformation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role

if TYPE_CHECKING:
    from rotquant.weights.context import QuantizationContext
    from rotquant.weights.reconstruction import DecoderBlock, LearnedTransformation, Parameters


class LearnedClipping(Method):
    """OmniQuant's learnable weight clipping alone (Shao et al. 2023, Eq. 2), block by block, after any transformation.

    DuQuant's authors learn it on transformed weights (DuQuant+LWC). Scales start at 0.98 of each range.
    """

    name: ClassVar[str] = "lwc"
    actions: ClassVar[str] = __name__
    title: ClassVar[str] = "LWC"
    source: ClassVar[str] = "Shao et al. 2023, Eqs. 1-2; Lin et al. 2024 (DuQuant+LWC)"
    roles: ClassVar[frozenset[Role]] = frozenset({"rounding"})
    short: ClassVar[Mapping[str, Any]] = {"steps": 32}
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    quantized_inputs: ClassVar[bool] = True
    clipping: ClassVar[str | None] = "LWC"

    steps: Annotated[int, Field(gt=0)] = 2560
    """Optimizer steps per block (20 epochs over 128 samples at batch 1)."""
    batch_size: Annotated[int, Field(gt=0)] = 1
    """Samples in each step."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-3
    """Learning rate of the clipping, as in OmniQuant's paper; its authors' code and DuQuant's have 1e-2."""

    def check(self, recipe: Recipe) -> None:
        """Weights without clip search, activations with dynamic scales."""
        self.refuse_clip_search(recipe)
        self.refuse_static(recipe)

    def describe(self, recipe: Recipe) -> str:
        return f"LWC {self.steps} steps of {self.batch_size} a block, lr {self.learning_rate:g}"


def apply(settings: LearnedClipping, context: "QuantizationContext") -> None:
    """Train and round block by block, along a full-precision and a quantized stream of hidden states."""
    from rotquant.weights.reconstruction import LearnedTransformation, initial_clipping, quantize_blocks

    linears, scheme = context.architecture.linears, context.recipe.rounded.scheme

    def start(_block: "DecoderBlock", parameters: "Parameters", _maxima: "Parameters") -> "LearnedTransformation":
        return LearnedTransformation({}, initial_clipping(parameters, linears, scheme))

    context.keep_layers(quantize_blocks(context, settings, start))
