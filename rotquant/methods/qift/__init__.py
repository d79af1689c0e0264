"""Qift as a method of a recipe: its settings and what they need; `zero_free_grid` has the mathematics."""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role, override


class Qift(Method):
    """Two-bit weights on a grid without zero (Qift): values of -1.5, -0.5, 0.5 and 1.5 scales.

    Rotated weights are centred at zero and nearly Gaussian. A grid of -2, -1, 0 and 1 scales gives one of its four
    codes to a lower end that nothing needs; this one is symmetric. Errors are fed back as GPTQ does.
    """

    name: ClassVar[str] = "qift"
    actions: ClassVar[str] = "rotquant.methods.qift.zero_free_grid"
    title: ClassVar[str] = "Qift"
    source: ClassVar[str] = "Qift (arXiv 2606.02823)"
    roles: ClassVar[frozenset[Role]] = frozenset({"rounding"})
    stored_as: ClassVar[Literal["integers", "lattice", "codebook"]] = "codebook"
    groups: ClassVar[str] = "table_groups"
    calibrates: ClassVar[bool] = True
    inverts: ClassVar[bool] = True
    clipping: ClassVar[str | None] = "search"

    rounding: Literal["gptq", "nearest"] = "gptq"
    """How weights become codes: with `gptq`'s feedback of errors, or to the `nearest` level."""
    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Share of the Hessian's mean diagonal that is added to its diagonal."""
    smallest: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """The least share of a group's range that its largest level may lie at. This search is ours."""
    shares: Annotated[int, Field(gt=0)] = 36
    """How many shares are tried, evenly from 1 down to the least, for the least squared error of the group."""

    def check(self, recipe: Recipe) -> None:
        """Symmetric weights of 2 bits in groups or rows, clipped by the method alone."""
        self.refuse_clip_search(recipe)
        scheme = recipe.rounded.scheme
        if scheme.bits != 2 or not scheme.symmetric or scheme.granularity not in ("group", "channel"):
            raise ValueError("qift takes symmetric weights of 2 bits with granularity group or channel")

    def check_widths(self, recipe: Recipe, widths: Mapping[str, int]) -> None:
        """Groups divide the features of every linear layer."""
        self.refuse_ragged_groups(recipe, widths)

    def codebook_entries(self, recipe: Recipe) -> int:
        """The two ends of the levels, which lie at equal distances."""
        return 2

    def describe(self, recipe: Recipe) -> str:
        how = f"GPTQ, damping {self.damping:.0%}" if self.rounding == "gptq" else "to nearest"
        return f"grid without zero, {how}, {self.shares} shares of the range from 1 to {self.smallest:g}"

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """QuaRot's rotations and quantizers with weights in 2 bits."""
        return {"qift": qift}


def qift() -> Recipe:
    """Qift W2A4KV4: QuaRot with 2-bit weights in groups of 128, on a grid without zero."""
    from rotquant.recipes.presets import quarot

    scheme = {"bits": 2, "granularity": "group", "group_size": 128}
    changes = {"methods": {"gptq": None, "qift": {}}, "weights": {"scheme": scheme, "clip_search": False}}
    return override(quarot(), changes, "qift")
