"""Grids of a search of scales (PrefixQuant Secs. 3 and 6.1), as data: of weights, and of static scales of activations.

The methods that search, and those whose training begins at what a search finds, have them among their settings.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rotquant.foundation.data import Frozen
from rotquant.recipes.schemes import QuantizationScheme

if TYPE_CHECKING:
    from rotquant.recipes.recipe import Recipe


class WeightGrid(Frozen):
    """Shares of the scale that covers a weight, among which the one of least error of the layer's outputs is taken."""

    smallest: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """The least share of a weight's range that is tried; the paper has no number, its authors' code 0.55."""
    steps: Annotated[int, Field(gt=0)] = 50
    """How many shares are tried, evenly from 1 down to it, without it; the authors' code tries ten."""

    covering: Literal["largest_code", "all_steps"] = "largest_code"
    """The scale of share 1: `largest_code`, max|w| / (2^(b-1) - 1), with which the largest weight has the largest code;
    `all_steps`, 2 max|w| / (2^b - 1), as the authors' code has it. The paper does not say."""

    def describe(self, recipe: "Recipe") -> str:
        """The grid in words."""
        steps = "" if self.covering == "largest_code" else " of 2 max / (2^b - 1)"
        return f"scales by layer outputs, {self.steps} shares from 1 to {self.smallest:g}{steps}"

    def ratios(self, scheme: QuantizationScheme) -> tuple[float, ...]:
        """The shares of the scale that covers the weights by `scheme`, the largest first."""
        from rotquant.tensors.quantization import share_of_all_steps

        first = 1.0 if self.covering == "largest_code" else share_of_all_steps(scheme)
        return tuple(first * (1 - step * (1 - self.smallest) / self.steps) for step in range(self.steps))


class ScaleGrid(Frozen):
    """Shares of the range that covers the calibration text, and what each is judged by.

    A scale of a whole tensor is judged by the outputs of its decoder layer, one of a head of keys or values by those of
    attention.
    """

    samples: Annotated[int, Field(gt=0)] = 8
    """Number of calibration samples, the first ones."""
    smallest: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The least share of a range that is tried. The paper has no number; its authors' code has 0.25 for inputs and 0.55
    for heads."""
    coarse: Annotated[int, Field(gt=1)] = 10
    """How many shares are tried first, evenly from 1 down to the least; the authors' code tries 8 from 0.95."""
    fine: Annotated[int, Field(ge=0)] = 10
    """How many are tried then, around the best one, within half a step to both sides."""
    keys: Literal["outputs", "attention", "own"] = "outputs"
    """Error by which scales of a head of keys are chosen: `outputs`, softmax(Q K^T) V, since scales of heads minimise
    what a layer gives (Sec. 6.1); `attention`, the weights softmax(Q K^T), as the authors' code; or its `own` squared
    error."""
    values: Literal["outputs", "own"] = "outputs"
    """Error by which scales of a head of values are chosen: `outputs`, as above, or its `own` squared error, as the
    authors' code."""
    ranges: Literal["largest", "average"] = "largest"
    """Range whose shares are tried: `largest`, the largest value of all samples; `average`, as in the authors' code,
    the largest feature of a moving average of each feature's maximum, 0.99 times what was before plus 0.01 times the
    next sample's, from the first sample on. The paper does not say."""
    covering: Literal["largest_code", "all_steps"] = "largest_code"
    """The scale of share 1: `largest_code`, max|x| / (2^(b-1) - 1); `all_steps`, 2 max|x| / (2^b - 1), as the authors'
    code has it, where the largest value lies on the tie above the largest code. The paper does not say."""
    causal: bool = True
    """Whether these weights are those of a causal model; the authors' code lets every query see every key."""

    def describe(self, recipe: "Recipe") -> str:
        """The grid in words."""
        by = {"outputs": "attention's outputs", "attention": "its weights", "own": "their own error"}
        keys = f", keys by {by[self.keys]}" if recipe.keys else ""
        values = f", values by {by[self.values]}" if recipe.values else ""
        ranges = "" if self.ranges == "largest" else " of averaged ranges"
        steps = "" if self.covering == "largest_code" else " of 2 max / (2^b - 1)"
        grid = f"{self.coarse} shares{ranges}{steps} from 1 to {self.smallest:g}, then {self.fine} around the best"
        return f"static scales by grid search on {self.samples} samples ({grid}{keys}{values})"
