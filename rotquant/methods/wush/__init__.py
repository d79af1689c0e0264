"""WUSH as a method of a recipe: its settings and what they need; `second_moments` has the mathematics."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.recipe import Method, Recipe, Role, override
from rotquant.recipes.traits import Trait
from rotquant.recipes.transforms import SiteName, Transform


class WUSH(Method):
    """WUSH (Chen et al. 2025): an invertible matrix for each block of features, in closed form from inputs and weights.

    A Hadamard matrix comes after a basis in which inputs and weights have equal second moments. It acts while the model
    runs; the weights hold the inverse, and the recipe rounds them afterwards. Linear layers that read one input share
    it.
    """

    name: ClassVar[str] = "wush"
    actions: ClassVar[str] = "rotquant.methods.wush.second_moments"
    title: ClassVar[str] = "WUSH"
    source: ClassVar[str] = "Chen et al. 2025 (arXiv 2512.00956)"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation"})
    acts_at_run_time: ClassVar[bool] = True
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    inverts: ClassVar[bool] = True
    mixes: ClassVar[str | None] = "block"
    fp4: ClassVar[Mapping[str, Any] | None] = {}

    block: Annotated[int, Field(gt=1)] = 16
    """Features that a matrix mixes: 16 for NVFP4, 32 for MXFP4 (authors' code)."""
    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Share of the mean of the inputs' squares that is added to each square."""
    spectrum_damping: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of a block's mean singular value that is added to each."""

    @property
    def unsuited(self) -> Mapping[Trait, str]:
        """Experts, each of which reads tokens of its own."""
        return {"experts": "has one matrix for all who read an input, while each expert reads other tokens"}

    def check(self, recipe: Recipe) -> None:
        """No other transform of what linear layers read."""
        if any(one.online and one.location != "queries_keys" for one in recipe.transforms):
            raise ValueError(
                "wush computes what stands before linear layers: set rotation.inputs to none, rotation.heads and "
                "rotation.mlp to false"
            )
        if recipe.attention_output is not None:
            raise ValueError("wush mixes features without regard to heads: leave attention_output out")

    def check_widths(self, recipe: Recipe, widths: Mapping[str, int]) -> None:
        """Blocks divide the features, and there is a Hadamard matrix of their size."""
        from rotquant.tensors.hadamard import is_supported

        if not is_supported(self.block):
            raise RecipeError(f"wush has no Hadamard matrix of size {self.block}: set methods.wush.block to 16 or 32.")
        for site, features in widths.items():
            if features % self.block:
                raise RecipeError(
                    f"wush: blocks of {self.block} do not divide the {features} features of {site}: set "
                    "methods.wush.block to a divisor."
                )

    def describe(self, recipe: Recipe) -> str:
        return f"WUSH in blocks of {self.block}, damping {self.damping:.0%} and {self.spectrum_damping:.0%}"

    def transform_at(self, site: SiteName) -> Transform:
        """What acts on the input of a site."""
        about = {"name": self.name, "kind": "matrix", "location": site, "online": True, "origin": "learned"}
        return Transform(size=self.block, tensors=(site,), **about)

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """With GPTQ."""
        return {"wush": wush}


def wush() -> Recipe:
    """WUSH with NVFP4: the quantizers and the rounding of mr-gptq, and matrices from the data in place of its Hadamard
    blocks."""
    from rotquant.recipes.presets import preset

    return override(preset("mr-gptq"), {"rotation": None, "methods": {"wush": {}}}, "wush")
