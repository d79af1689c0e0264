"""SmoothQuant as a method of a recipe: its setting and its place among the phases; `scaling` has the mathematics."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.traits import Trait


class SmoothQuant(Method):
    """SmoothQuant (Xiao et al. 2023, Eq. 4): s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), from activation to weight."""

    name: ClassVar[str] = "smoothquant"
    actions: ClassVar[str] = "rotquant.methods.smoothquant.scaling"
    title: ClassVar[str] = "SmoothQuant"
    source: ClassVar[str] = "Xiao et al. 2023, Eqs. 3-4"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation"})
    calibrates: ClassVar[bool] = True

    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """How much of the difficulty goes from activations to weights. The paper finds 0.5 for OPT and BLOOM (Sec. 4); its
    authors' repository has 0.85 for Llama-2-7B, 13B and Llama-3, 0.9 for Llama-2-70B and 0.8 for Mistral-7B."""

    @property
    def unsuited(self) -> Mapping[Trait, str]:
        """Layers without norms before them."""
        return {
            "bare_inputs": "divides what those norms give and nothing else: take duquant, whose division acts online"
        }

    def check(self, recipe: Recipe) -> None:
        """No transform between norms and what reads them."""
        self.refuse_rotated_inputs(recipe)

    def describe(self, recipe: Recipe) -> str:
        return f"smoothing alpha {self.alpha:g}"
