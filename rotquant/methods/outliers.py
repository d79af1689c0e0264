"""Which input features stay in higher precision: QUIK (Ashkboos et al. 2023) and Atom (Zhao et al. 2023, Sec. 4.1).

Both rank the features of every linear layer's input over calibration text and move the largest to the end; Atom also
sorts the others, so that a group of neighbours shares a scale that suits all of them. Nothing is moved here.
"""

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture
from rotquant.recipes.recipe import Recipe, check_widths
from rotquant.recipes.schemes import OutlierFeatures
from rotquant.tensors.quantization import ColumnSplit


def check_outliers(architecture: Architecture, recipe: Recipe) -> None:
    """Refuse, before any work, outlier counts that leave no normal features or no whole number of groups.

    Raises:
        RecipeError: naming the site, its features and what would fit.
    """
    if recipe.outliers is not None:
        check_widths(recipe, {site.name: site.features for site in architecture.sites})


def select_outliers(statistic: Tensor, outliers: OutlierFeatures) -> ColumnSplit:
    """Split the features of one site into normal ones and the `outliers.features` largest.

    The outliers lie last, in ascending order of the statistic. The normal features keep their natural order, or with
    `order="ascending"` are sorted by the statistic too. Equal statistics keep their natural order.

    Args:
        statistic: one number per feature, larger is more of an outlier, [features].
        outliers: how many to keep and how to arrange the others.

    Returns:
        A split whose permutation lies on the host.

    Raises:
        RecipeError: when no normal feature would remain.
    """
    features = statistic.numel()
    if outliers.features >= features:
        raise RecipeError(
            f"outliers.features is {outliers.features}, but the input has only {features} features: choose fewer."
        )
    ascending = torch.argsort(statistic.cpu(), stable=True)
    normal, largest = ascending[: -outliers.features], ascending[-outliers.features :]
    if outliers.order == "natural":
        normal = normal.sort().values
    return ColumnSplit(torch.cat([normal, largest]), outliers.features, outliers.bits)
