"""DuQuant as a method of a recipe: its settings and what they need; `rotation_and_permutation` has the mathematics."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.transforms import Kind, SiteName, Transform


class DuQuant(Method):
    """DuQuant (Lin et al. 2024): smoothing, then block-wise rotations found greedily and a zigzag permutation between.

    What linear layers read is transformed as the model runs, their weights by the inverse before they are rounded, and
    the function stays what it was. The clipping of weights and inputs is that of the recipe's schemes.
    """

    name: ClassVar[str] = "duquant"
    actions: ClassVar[str] = "rotquant.methods.duquant.model_transformation"
    title: ClassVar[str] = "DuQuant"
    source: ClassVar[str] = "Lin et al. 2024, Sec. 3.2, Eqs. 2-5"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation"})
    acts_at_run_time: ClassVar[bool] = True
    # A prefix is computed before smoothing, which changes what values are; kept features would be turned into others.
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    reads = "sites"
    seeded: ClassVar[bool] = True

    alpha: Annotated[float, Field(ge=0.0, le=1.0)] | None = 0.6
    """How much of the difficulty smoothing moves from activations to weights; null smooths nothing. With weight
    clipping that is learned the authors take 0.5."""
    smoothed_by: Literal["all", "query_up"] = "all"
    """The linear layers whose largest weights smoothing weighs against the activations after a norm: those of `all`
    linear layers that read them, or, as in the authors' code, of q_proj and up_proj alone."""
    block_size: Annotated[int, Field(gt=1)] = 128
    """Features that are rotated together, which lowers a lone outlier by the square root of this at most. Where it does
    not divide the features of a site, their largest divisor below it stands there."""
    search_steps: Annotated[int, Field(ge=0)] = 256
    """Steps of a greedy search; the product with the least peak among them is taken, no rotation counted in."""
    permutations: Annotated[int, Field(ge=0)] = 1
    """Zigzag permutations, each between two rotations; 0 leaves one rotation alone."""
    rotations: Literal["blocks", "shared"] = "blocks"
    """`blocks` searches a rotation for each block (Eq. 3), `shared` one for all blocks of a site together, as in the
    authors' code."""
    outlier: Literal["feature", "row"] = "feature"
    """Definition of the outlier's dimension d in a step (Eq. 2): the `feature` of the largest magnitude, or, in the
    authors' code, the number of its `row`, modulo the block size."""
    peak: Literal["magnitude", "range"] = "magnitude"
    """Quantity that the search minimises: the largest magnitude, or the largest less the least value (the authors'
    code)."""
    inputs: Literal["tokens", "mean"] = "tokens"
    """Inputs of the search: `tokens` of the calibration text, or one sequence whose embeddings are the samples' means
    at each position (the authors' code, which runs it through quantized layers)."""
    tokens: Annotated[int, Field(gt=0)] = 128
    """A search sees so many tokens a block, those of the largest norm in it: a rotation keeps norms, so no other token
    exceeds the peak that is left unless its norm does. The paper names no number; its authors' code sees 2048."""
    queries: bool = True
    """Whether queries are quantized as keys are, after RoPE and R3, as the authors' code does."""

    def check(self, recipe: Recipe) -> None:
        """No rotation in addition to this one but that of keys, no scale per head before o_proj, no static queries."""
        if any(one.location != "queries_keys" for one in recipe.transforms):
            raise ValueError(
                "duquant rotates what linear layers read in its own way: leave rotation out, or of it only keys on"
            )
        if recipe.attention_output is not None:
            raise ValueError("duquant moves features from head to head: leave attention_output out")
        if self.queries and recipe.keys is not None and not recipe.keys.dynamic:
            raise ValueError("static scales are of keys alone: set keys.dynamic to true")

    def check_widths(self, recipe: Recipe, widths: Mapping[str, int]) -> None:
        """Every input is a whole number of blocks of two features or more."""
        for site, features in widths.items():
            if self.block(features) < 2:
                raise RecipeError(
                    f"duquant.block_size is {self.block_size}, and no number from 2 to that divides the {features} "
                    f"features of {site}: choose a larger one."
                )

    def block(self, features: int) -> int:
        """Features of a block at a site of so many: their largest divisor up to `block_size`."""
        return next(size for size in range(self.block_size, 0, -1) if features % size == 0)

    def transforms_at(self, site: SiteName, size: int) -> tuple[Transform, ...]:
        """What is searched for the input of a site, in blocks of a size: rotation, permutation, rotation (Eq. 5)."""

        def stored(kind: Kind, tensor: str, part: int, size: int | None) -> Transform:
            about = {"name": self.name, "location": site, "online": True, "origin": "learned"}
            return Transform(kind=kind, size=size, tensors=(f"{site}.{tensor}",), part=part, **about)

        found = [stored("orthogonal", "rotations", 0, size)]
        for part in range(self.permutations):
            found.append(stored("permutation", "permutations", part, None))
            found.append(stored("orthogonal", "rotations", part + 1, size))
        return tuple(found)

    def describe(self, recipe: Recipe) -> str:
        """Describe the settings in words, as the pages of the report print them."""
        smoothing = "no smoothing" if self.alpha is None else f"smoothing alpha {self.alpha:g}"
        weighed = "" if self.alpha is None or self.smoothed_by == "all" else " by q_proj and up_proj"
        blocks = f"blocks of up to {self.block_size}{'' if self.rotations == 'blocks' else ' with one rotation'}"
        outlier = "" if self.outlier == "feature" else ", outliers by row"
        seen = f"{self.tokens} tokens a block{'' if self.inputs == 'tokens' else ' of the mean text'}"
        queries = ", queries quantized as keys" if self.queries and recipe.keys else ""
        return (
            f"DuQuant, {smoothing}{weighed}, {blocks}, {self.search_steps} steps to the least {self.peak}{outlier}, "
            f"{self.permutations} permutations, {seen}{queries}"
        )
