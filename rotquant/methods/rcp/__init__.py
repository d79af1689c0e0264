"""RCP as a method of a recipe: its settings and what they need; the training is `rotquant.qat`'s."""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.qat.method import QuantizerSettings, SelfDistillation, low_bits
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme


class RCP(SelfDistillation):
    """RCP (Choi et al. 2025, "Rotate, Clip, and Partition"): clips and partitions of weights trained with the weights.

    The model is rotated before; every group of weights has a range with learned ends and, between them, levels that
    lie at learned distances. It is trained as a whole to give its full-precision self's distributions.
    """

    name: ClassVar[str] = "rcp"
    title: ClassVar[str] = "RCP"
    source: ClassVar[str] = "Choi et al. 2025, Secs. 4.1 to 4.3, Eqs. 3 to 13"

    quantizer: Literal["ldp", "lwc", "lwc_exact", "n2uq"] = "ldp"
    """`ldp`, learned partitions with levels between their centres (Eqs. 7 to 11), at 3 bits NF3 around a learned centre
    (Eqs. 12, 13); `lwc`, learned ends and equal distances by Eq. 1, whose zero point is a whole number (Table 9);
    `lwc_exact`, the same with the lower end itself as the lowest level, as `ldp` has it, at 2 bits: what is left of
    `ldp` without partitions; `n2uq`, learned partitions with levels at equal distances, against which Section 4.3
    argues, at 2 bits."""
    learned: Literal["all", "nothing"] = "all"
    """Parameters that training learns among clips, partitions and centres: `nothing` keeps them where they begin, and
    the weights alone are trained."""
    quantizer_lr: Annotated[float, Field(gt=0.0)] = 1e-5
    """Learning rate of clips and partitions (Sec. 5.1)."""
    straight_through: Literal["step", "ramp"] = "step"
    """Substitute for the derivative of a step at a threshold: `step`, one everywhere, as the paper says; `ramp`, that
    of a ramp over the step's partition. At 2 bits with learned partitions."""
    start_target: Literal["weight", "clipped"] = "weight"
    """Target of the rounded weight's outputs in the search by which clips begin: `weight`, those of the weight, as in
    the search that Sec. 4.2 cites and in BitDistiller's code; `clipped`, those of the clipped weight, as Eq. 6 prints,
    which counts no error of clipping."""
    start_rounding: Literal["own", "uniform"] = "own"
    """Rounding in the search by which clips begin: `own`, as the quantizer does at its start; `uniform`, by Eq. 1, as
    Eq. 6 prints, whose whole zero point moves the levels that learned partitions then put elsewhere."""

    def quantizer_settings(self, recipe: Recipe) -> QuantizerSettings:
        """Quantizers chosen by the settings and the number of bits. Of `lwc_exact` partitions stay uniform, with even
        levels from end to end."""
        fixed = ("s1", "s2") if self.quantizer == "lwc_exact" else ()
        if self.learned == "nothing":
            fixed = ("gamma", "beta", "s1", "s2")
        kind = "nf3_ldp" if recipe.rounded.scheme.bits == 3 else "ldp"
        if self.quantizer in ("lwc", "n2uq"):
            kind = "learned_range" if self.quantizer == "lwc" else "n2uq"
        return QuantizerSettings(kind, self.straight_through, self.start_target, self.start_rounding, fixed)

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError as every training's check does, and for n2uq and lwc_exact unless there are two
        bits."""
        super().check(recipe)
        if self.quantizer in ("n2uq", "lwc_exact") and recipe.rounded.scheme.bits != 2:
            raise ValueError(f"{self.name}.quantizer {self.quantizer} has 2 bits: set weights.scheme.bits to 2")

    def clips_weights(self, recipe: Recipe) -> str | None:
        """How clips of weights are chosen: by learning, in the paper's word, or by the search that training begins
        with."""
        return "search" if self.learned == "nothing" else "LWC"

    def describe(self, recipe: Recipe) -> str:
        words = {("weight", "own"): "as the cited one", ("clipped", "uniform"): "as Eq. 6 prints"}
        other = f"with {self.start_rounding} rounding against the {self.start_target}"
        start = words.get((self.start_target, self.start_rounding), other)
        kind = "lwc_exact" if self.quantizer == "lwc_exact" else self.quantizer_settings(recipe).kind
        learned = "" if self.learned == "all" else ", only the weights learned"
        return f"{super().describe(recipe)}, {start}; {kind}{learned}"

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """RCP's own setting."""
        return {"rcp": rcp}


def rcp() -> Recipe:
    """RCP W2A4KV4: rotations R1 to R4, learned clips and partitions of weights in groups of 128 (Tables 2 and 11)."""
    return low_bits(RCP.name, RotationScheme())
