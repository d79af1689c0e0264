"""Selection of the input features that stay in higher precision: QUIK (Ashkboos et al. 2023) and Atom (Zhao et al.
2023, Sec. 4.1).

Both rank the features of every linear layer's input over calibration text and move the largest to the end; Atom also
sorts the others, so that a group of neighbours shares a scale that suits all of them. Nothing is moved here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.recipe import Method, Recipe, Role

if TYPE_CHECKING:
    from torch import Tensor

    from rotquant.models.architectures import Architecture
    from rotquant.models.simulation.runtime import RuntimeQuantization
    from rotquant.tensors.quantization import ColumnSplit
    from rotquant.weights.context import QuantizationContext


class OutlierFeatures(Method):
    """Input features kept in higher precision, chosen by calibration and moved to the end (QUIK, Atom)."""

    name: ClassVar[str] = "outliers"
    actions: ClassVar[str] = __name__
    title: ClassVar[str] = "outlier features"
    source: ClassVar[str] = "QUIK (Ashkboos et al. 2023); Atom (Zhao et al. 2023), Sec. 4.1"
    roles: ClassVar[frozenset[Role]] = frozenset({"selection"})
    acts_at_run_time: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    scaled: ClassVar[Mapping[str, str]] = {"features": "outlier_features"}

    features: Annotated[int, Field(gt=0)]
    """How many input features of every linear layer; a slot scales the papers' numbers to its width."""
    bits: Literal[8, 16] = 16
    """16 keeps them as floats (QUIK), 8 quantizes them symmetrically, one scale per token or output channel (Atom)."""
    statistic: Literal["max", "square"] = "max"
    """Statistic that ranks a feature over the calibration set: `max` |x| (QUIK) or `square` sum of squares (Atom)."""
    order: Literal["natural", "ascending"] = "natural"
    """How the other features are arranged: `natural` as they were (QUIK), `ascending` by the statistic, so that the
    members of a group have similar ranges (Atom's reordering)."""

    @property
    def outlier_features(self) -> int:
        """Number of outlier features of every linear layer."""
        return self.features

    @property
    def acts_beyond_quantizers(self) -> bool:
        """Whether more than quantizers acts at run time: no, these are only given the features to
        leave."""
        return False

    def check(self, recipe: Recipe) -> None:
        """Weights or activations are quantized."""
        if recipe.weights is None and recipe.activations is None:
            raise ValueError("outliers keep features from being quantized: they need a weights or activations section")

    def check_widths(self, recipe: Recipe, widths: Mapping[str, int]) -> None:
        """Normal features remain everywhere."""
        for site, features in widths.items():
            if self.features >= features:
                raise RecipeError(
                    f"outliers.features is {self.features}, but {site} has only {features} features: "
                    f"choose fewer than {features}."
                )

    def describe(self, recipe: Recipe) -> str:
        kept = "floating point" if self.bits == 16 else f"{self.bits} bits"
        return f"{self.features} outlier features in {kept}, ranked by {self.statistic}"


def apply(settings: OutlierFeatures, context: "QuantizationContext") -> None:
    """Split the features of every site, by the calibration text's statistic."""
    for index, measured in enumerate(context.statistics(settings.statistic)):
        for site, statistic in measured.items():
            split = select_outliers(statistic, settings)
            context.splits[index, site] = split
            context.tensors[f"{index}.{site}"] = split.permutation


def tensors(settings: OutlierFeatures, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
    """The order of the features of every site, by layer and site."""
    layers = range(architecture.num_layers)
    return {f"{index}.{site.name}": (site.features,) for index in layers for site in architecture.sites}


def runtime(
    settings: OutlierFeatures, quantization: "RuntimeQuantization", tensors: "Mapping[str, Tensor]"
) -> "RuntimeQuantization":
    """Quantizers leave the features out."""
    from rotquant.tensors.quantization import ColumnSplit

    splits = {}
    for name, permutation in tensors.items():
        index, site = name.split(".")
        splits[int(index), site] = ColumnSplit(permutation, settings.features, settings.bits)
    return replace(quantization, outliers=splits)


def select_outliers(statistic: "Tensor", outliers: OutlierFeatures) -> "ColumnSplit":
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
    import torch

    from rotquant.tensors.quantization import ColumnSplit

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
