"""RCP as a method of a recipe: its settings and what they need; the training is `rotquant.qat`'s."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.qat.method import SelfDistillation, low_bits
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme

if TYPE_CHECKING:
    from rotquant.qat.quantizers import Kind


class RCP(SelfDistillation):
    """RCP (Choi et al. 2025, "Rotate, Clip, and Partition"): clips and partitions of weights trained with the weights.

    The model is rotated before; every group of weights has a range with learned ends and, between them, levels that
    lie at learned distances. It is trained as a whole to give its full-precision self's distributions.
    """

    name: ClassVar[str] = "rcp"
    title: ClassVar[str] = "RCP"
    source: ClassVar[str] = "Choi et al. 2025, Secs. 4.1 to 4.3, Eqs. 3 to 13"

    quantizer: Literal["ldp", "lwc", "n2uq"] = "ldp"
    """`ldp`, learned partitions with levels between their centres (Eqs. 7 to 11), at 3 bits NF3 around a learned centre
    (Eqs. 12, 13); `lwc`, learned ends and equal distances (Table 9); `n2uq`, learned partitions with levels at equal
    distances, against which Section 4.3 argues, at 2 bits."""
    quantizer_lr: Annotated[float, Field(gt=0.0)] = 1e-5
    """Learning rate of clips and partitions (Sec. 5.1)."""
    straight_through: Literal["step", "ramp"] = "step"
    """What stands in for the derivative of a step at a threshold: `step`, one everywhere, as the paper says; `ramp`,
    that of a ramp over the step's partition. At 2 bits with learned partitions."""
    start_target: Literal["weight", "clipped"] = "weight"
    """With what the search by which clips begin compares the rounded weight's outputs: `weight`, those of the weight,
    as the search that the paper cites and BitDistiller's code; `clipped`, those of the clipped weight, as Eq. 6 prints,
    which counts no error of clipping."""
    start_rounding: Literal["own", "uniform"] = "own"
    """How it rounds: `own`, as the quantizer does at its start; `uniform`, by Eq. 1, whose whole zero point moves the
    levels that learned partitions then put elsewhere."""

    @property
    def slope(self) -> Literal["step", "ramp"]:
        """As the setting says."""
        return self.straight_through

    @property
    def aim(self) -> Literal["weight", "clipped"]:
        """As the setting says."""
        return self.start_target

    @property
    def rounding(self) -> Literal["own", "uniform"]:
        """As the setting says."""
        return self.start_rounding

    def kind(self, recipe: Recipe) -> "Kind":
        """By the setting and the bits."""
        if self.quantizer == "ldp" and recipe.rounded.scheme.bits == 3:
            return "nf3_ldp"
        return "learned_range" if self.quantizer == "lwc" else self.quantizer

    def check(self, recipe: Recipe) -> None:
        """As for every training; two bits for n2uq."""
        super().check(recipe)
        if self.quantizer == "n2uq" and recipe.rounded.scheme.bits != 2:
            raise ValueError(f"{self.name}.quantizer n2uq has 2 bits: set weights.scheme.bits to 2")

    def clips_weights(self, recipe: Recipe) -> str | None:
        """By learning, in the paper's word."""
        return "LWC"

    def words(self, recipe: Recipe) -> str:
        """As on the pages."""
        return f"{super().words(recipe)}; {self.kind(recipe)}"

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """RCP's own setting."""
        return {"rcp": rcp}


def rcp() -> Recipe:
    """RCP W2A4KV4: rotations R1 to R4, learned clips and partitions of weights in groups of 128 (Tables 2 and 11)."""
    return low_bits(RCP.name, RotationScheme())
