"""BitDistiller as a method of a recipe, RCP's baseline: its settings; the training is `rotquant.qat`'s."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from rotquant.qat.method import QuantizerSettings, SelfDistillation, low_bits
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme


class BitDistiller(SelfDistillation):
    """BitDistiller (Du et al. 2024): clipped weights in ranges that follow them, trained to be the model's own student.

    The ends of each group's range are searched before and cut into the weights; from then on the range is that of the
    weights as they are: INT2 with equal distances, NF3 with those of a normal distribution on either side of zero.
    """

    name: ClassVar[str] = "bitdistiller"
    title: ClassVar[str] = "BitDistiller"
    source: ClassVar[str] = "Du et al. 2024, arXiv:2402.10631, Sec. 3; RCP, Sec. 5.1"
    clipping: ClassVar[str | None] = "search"

    clips_queries: bool = False
    """Whether weights of queries and keys are clipped too. The authors' search leaves both out (`auto_clip_block`)."""

    def quantizer_settings(self, recipe: Recipe) -> QuantizerSettings:
        """Quantizers chosen by the number of bits; clips of q_proj and k_proj are not searched, unless these are to be
        clipped."""
        kind = "nf3" if recipe.rounded.scheme.bits == 3 else "range"
        return QuantizerSettings(kind, unsearched=() if self.clips_queries else ("q_proj", "k_proj"))

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """RCP's two baselines."""
        return {"bitdistiller": bitdistiller, "bitdistiller-rotated": bitdistiller_rotated}


def bitdistiller() -> Recipe:
    """BitDistiller W2A4KV4 without rotation (RCP Table 2): asymmetric INT2 weights in groups of 128."""
    return low_bits(BitDistiller.name, None)


def bitdistiller_rotated() -> Recipe:
    """BitDistiller W2A4KV4 in a model with rotations R1 to R4 (RCP Table 2)."""
    return low_bits(BitDistiller.name, RotationScheme())
