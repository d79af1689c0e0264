"""Weights rounded to nearest, with scales by which a layer's outputs change least (PrefixQuant Sec. 6.1)."""

from typing import TYPE_CHECKING, ClassVar

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.weights.grids import WeightGrid

if TYPE_CHECKING:
    from torch import Tensor

    from rotquant.weights.context import QuantizationContext


class GridWeights(WeightGrid, Method):
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

    def check(self, recipe: Recipe) -> None:
        """Weights without another search."""
        self.refuse_clip_search(recipe)


def apply(settings: GridWeights, context: "QuantizationContext") -> None:
    """Round site by site."""
    from rotquant.tensors.quantization import choose_qparams, quantize
    from rotquant.weights.rtn import QuantizedWeight
    from rotquant.weights.search import search_ratios

    scheme = context.recipe.rounded.scheme
    ratios = settings.ratios(scheme)

    def rounded(weight: "Tensor", hessian: "Tensor") -> QuantizedWeight:
        exact = weight.to(hessian.dtype)
        qparams = choose_qparams(exact, scheme, search_ratios(exact, hessian, scheme, ratios))
        return QuantizedWeight(quantize(weight, qparams, scheme), qparams, scheme)

    context.round_by_site(settings.title, lambda weights, hessian, _: [rounded(weight, hessian) for weight in weights])
