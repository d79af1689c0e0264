"""Weights rounded to nearest, with scales by which a layer's outputs change least (PrefixQuant Sec. 6.1)."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import QuantizationScheme

if TYPE_CHECKING:
    from torch import Tensor

    from rotquant.weights.context import QuantizationContext


class GridWeights(Method):
    """Round-to-nearest with clip ratios from a grid, each the one of least squared error of a layer's outputs.

    PrefixQuant's grid search of per-channel scales, after AWQ's search of clipping. Inputs are those of layers that are
    rounded already. With groups the error is that of each group's own part of the output, as in AWQ.
    """

    name: ClassVar[str] = "grid_weights"
    actions: ClassVar[str] = __name__
    title: ClassVar[str] = "grid search of weights' scales"
    source: ClassVar[str] = "PrefixQuant, Secs. 3 and 6.1; Lin et al. 2023"
    roles: ClassVar[frozenset[Role]] = frozenset({"rounding"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"selection"})
    calibrates: ClassVar[bool] = True
    clipping: ClassVar[str | None] = "search"

    smallest: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """The least share of a weight's range that is tried; the paper has no number, its authors' code 0.55."""
    steps: Annotated[int, Field(gt=0)] = 50
    """How many shares are tried, evenly from 1 down to it, without it; the authors' code tries ten."""

    covering: Literal["largest_code", "all_steps"] = "largest_code"
    """The scale of share 1: `largest_code`, max|w| / (2^(b-1) - 1), with which the largest weight has the largest code;
    `all_steps`, 2 max|w| / (2^b - 1), as the authors' code has it. The paper does not say."""

    def check(self, recipe: Recipe) -> None:
        """Weights without another search."""
        self.refuse_clip_search(recipe)

    def describe(self, recipe: Recipe) -> str:
        steps = "" if self.covering == "largest_code" else " of 2 max / (2^b - 1)"
        return f"scales by layer outputs, {self.steps} shares from 1 to {self.smallest:g}{steps}"

    def ratios(self, scheme: QuantizationScheme) -> tuple[float, ...]:
        """The shares of the scale that covers the weights by `scheme`, the largest first."""
        from rotquant.tensors.quantization import share_of_all_steps

        first = 1.0 if self.covering == "largest_code" else share_of_all_steps(scheme)
        return tuple(first * (1 - step * (1 - self.smallest) / self.steps) for step in range(self.steps))


def apply(settings: GridWeights, context: "QuantizationContext") -> None:
    """Round site by site."""
    from rotquant.tensors.quantization import choose_qparams, quantize
    from rotquant.weights.output_error import search_ratios
    from rotquant.weights.rtn import QuantizedWeight

    scheme = context.recipe.rounded.scheme
    ratios = settings.ratios(scheme)

    def rounded(weight: "Tensor", hessian: "Tensor") -> QuantizedWeight:
        exact = weight.to(hessian.dtype)
        qparams = choose_qparams(exact, scheme, search_ratios(exact, hessian, scheme, ratios))
        return QuantizedWeight(quantize(weight, qparams, scheme), qparams, scheme)

    context.round_by_site(settings.title, lambda weights, hessian, _: [rounded(weight, hessian) for weight in weights])
