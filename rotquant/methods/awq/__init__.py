"""AWQ as a method of a recipe: its settings and what they need; `activation_aware_scaling` has the mathematics."""

from typing import Annotated, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role


class AWQ(Method):
    """AWQ (Lin et al. 2023, Sec. 3.2): input features are scaled by s = mean|x|^alpha before weights are rounded."""

    name: ClassVar[str] = "awq"
    actions: ClassVar[str] = "rotquant.methods.awq.activation_aware_scaling"
    title: ClassVar[str] = "AWQ"
    source: ClassVar[str] = "Lin et al. 2023, Sec. 3.2, Eqs. 4-5"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation", "rounding"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    reads = "layers"

    grid: Annotated[int, Field(gt=0)] = 20
    """alpha is searched for among 0, 1/grid, ... below 1 for each group of layers that read one input (Eqs. 4-5)."""
    clip_search: bool = True
    """Whether clips are searched after the scales: each scale shrinks to the share among 1, 1 - 1/grid, ... above 1/2
    with the least error of the output (the authors' code, which leaves q and k alone; the paper mentions clipping
    without its search)."""

    def check(self, recipe: Recipe) -> None:
        """Weights of granularity channel or group, without clip search of their own."""
        self.refuse_clip_search(recipe)
        self.refuse_rotated_inputs(recipe)
        if recipe.rounded.scheme.granularity == "tensor":
            raise ValueError("awq takes weights of granularity channel or group")

    def clips_weights(self, recipe: Recipe) -> str | None:
        """How clips of weights are chosen: by a search of each scale's range."""
        return "search" if self.clip_search else None

    def describe(self, recipe: Recipe) -> str:
        return f"AWQ, {self.grid} values of alpha{', clipped' if self.clip_search else ''}"
