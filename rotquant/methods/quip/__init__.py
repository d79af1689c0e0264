"""QuIP# as a method of a recipe: its settings and what they need; `block_ldlq` has the mathematics."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role


class QuIP(Method):
    """QuIP# (Tseng et al. 2024) without fine-tuning: weights in a rotated basis, rounded to the E8P lattice codebook.

    `weights.scheme` says 2 bits, one codebook, or 4, a second one for what the first leaves.
    """

    name: ClassVar[str] = "quip"
    actions: ClassVar[str] = "rotquant.methods.quip.block_ldlq"
    title: ClassVar[str] = "QuIP#"
    source: ClassVar[str] = "Tseng et al. 2024, Secs. 3 and 4.1-4.2"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation", "rounding"})
    stored_as: ClassVar[Literal["integers", "lattice", "codebook"]] = "lattice"
    excludes: ClassVar[frozenset[Role]] = frozenset({"selection"})
    calibrates: ClassVar[bool] = True
    inverts: ClassVar[bool] = True
    seeded: ClassVar[bool] = True

    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Share of the Hessian's mean diagonal that is added to its diagonal."""
    tune_iterations: Annotated[int, Field(ge=0)] = 0
    """How often, after block LDLQ, every block of eight columns is rounded anew with all others as they are. The paper
    does not speak of it; its authors' code does so 10 times (`quip_tune_iters`)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Added to the run's seed it draws the signs of the randomized Hadamard transforms."""

    def check(self, recipe: Recipe) -> None:
        """Weights alone, of 2 or 4 bits with one scale, without clip search."""
        self.refuse_clip_search(recipe)
        scheme = recipe.rounded.scheme
        if scheme.bits not in (2, 4) or scheme.granularity != "tensor" or not scheme.symmetric:
            raise ValueError("quip takes symmetric weights of 2 or 4 bits with granularity tensor")
        if recipe.activations:
            raise ValueError("quip is for weights alone: leave activations out")

    def describe(self, recipe: Recipe) -> str:
        tuned = f", {self.tune_iterations or 'no'} iterations over rounded blocks"
        return f"QuIP# without fine-tuning, damping {self.damping:g}{tuned}"
