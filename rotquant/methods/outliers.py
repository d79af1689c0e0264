"""Selection of the input features that stay in higher precision: QUIK (Ashkboos et al. 2023) and Atom (Zhao et al.
2023, Sec. 4.1).

Both rank the features of every linear layer's input over calibration text and move the largest to the end; Atom also
sorts the others, so that a group of neighbours shares a scale that suits all of them. Nothing is moved here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.transforms import SiteName

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

    features: Annotated[int, Field(gt=0)] | None = None
    """How many input features of every linear layer; a slot scales the papers' numbers to its width."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(default=None, exclude_if=lambda share: share is None)
    """Share of the input features of every linear layer, in place of a number (ResQ: an eighth)."""
    sites: tuple[SiteName, ...] = Field(
        default=get_args(SiteName), exclude_if=lambda sites: sites == get_args(SiteName)
    )
    """Whose inputs have outlier features; all the others' are quantized whole."""
    bits: Literal[8, 16] = 16
    """16 keeps them as floats (QUIK), 8 quantizes them symmetrically, one scale per token or output channel (Atom)."""
    statistic: Literal["max", "square"] = "max"
    """Statistic that ranks a feature over the calibration set: `max` |x| (QUIK) or `square` sum of squares (Atom)."""
    order: Literal["natural", "ascending"] = "natural"
    """How the other features are arranged: `natural` as they were (QUIK), `ascending` by the statistic, so that the
    members of a group have similar ranges (Atom's reordering)."""

    def outlier_features(self, site: str, features: int) -> int:
        """Number of outlier features of a site."""
        if site not in self.sites:
            return 0
        return self.features or max(1, int((self.share or 0.0) * features))

    @property
    def acts_beyond_quantizers(self) -> bool:
        """Whether more than quantizers acts at run time: no, these are only given the features to
        leave."""
        return False

    def check(self, recipe: Recipe) -> None:
        """Weights or activations are quantized, and either a number or a share is given."""
        if recipe.weights is None and recipe.activations is None:
            raise ValueError("outliers keep features from being quantized: they need a weights or activations section")
        if (self.features is None) == (self.share is None):
            raise ValueError("outliers are a number of features or a share of them: set features or share")

    def check_widths(self, recipe: Recipe, widths: Mapping[str, int]) -> None:
        """Normal features remain everywhere."""
        for site, features in widths.items():
            if self.outlier_features(site, features) >= features:
                raise RecipeError(
                    f"outliers.features is {self.features}, but {site} has only {features} features: "
                    f"choose fewer than {features}."
                )

    def describe(self, recipe: Recipe) -> str:
        kept = "floating point" if self.bits == 16 else f"{self.bits} bits"
        number = f"{self.features} outlier features" if self.features else f"{self.share:g} of the features"
        left = [site for site in get_args(SiteName) if site not in self.sites]
        where = f", not of {' and '.join(left)}," if left else ""
        return f"{number}{where} in {kept}, ranked by {self.statistic}"


def apply(settings: OutlierFeatures, context: "QuantizationContext") -> None:
    """Split the features of the sites, by the calibration text's statistic."""
    for index, measured in enumerate(context.statistics(settings.statistic)):
        for site in settings.sites:
            split = select_outliers(measured[site], settings, site)
            context.splits[index, site] = split
            context.tensors[f"{index}.{site}"] = split.permutation


def tensors(settings: OutlierFeatures, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
    """The order of the features of the sites, by layer and site."""
    layers = range(architecture.num_layers)
    return {f"{index}.{name}": (architecture.site(name).features,) for index in layers for name in settings.sites}


def runtime(
    settings: OutlierFeatures, quantization: "RuntimeQuantization", tensors: "Mapping[str, Tensor]"
) -> "RuntimeQuantization":
    """Quantizers leave the features out."""
    from rotquant.tensors.quantization import ColumnSplit

    splits = {}
    for name, permutation in tensors.items():
        index, site = name.split(".")
        kept = settings.outlier_features(site, permutation.numel())
        splits[int(index), site] = ColumnSplit(permutation, kept, settings.bits)
    return replace(quantization, outliers=splits)


def select_outliers(statistic: "Tensor", outliers: OutlierFeatures, site: str) -> "ColumnSplit":
    """Split the features of one site into normal ones and the largest, as many as `outliers` says.

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
    kept = outliers.outlier_features(site, features)
    if kept >= features:
        raise RecipeError(f"outliers.features is {kept}, but the input has only {features} features: choose fewer.")
    ascending = torch.argsort(statistic.cpu(), stable=True)
    normal, largest = ascending[:-kept], ascending[-kept:]
    if outliers.order == "natural":
        normal = normal.sort().values
    return ColumnSplit(torch.cat([normal, largest]), kept, outliers.bits)
