"""OmniQuant as a method of a recipe: its settings and what they need; `block_reconstruction` has the mathematics."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role


class OmniQuant(Method):
    """OmniQuant (Shao et al. 2023): learnable weight clipping and equivalent transformation, block by block."""

    name: ClassVar[str] = "omniquant"
    actions: ClassVar[str] = "rotquant.methods.omniquant.block_reconstruction"
    title: ClassVar[str] = "OmniQuant"
    source: ClassVar[str] = "Shao et al. 2023, Eqs. 1-5"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation", "rounding"})
    acts_at_run_time: ClassVar[bool] = True
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    rates: ClassVar[tuple[str, ...]] = ("clipping_lr", "transformation_lr")
    quantized_inputs: ClassVar[bool] = True
    short: ClassVar[Mapping[str, Any]] = {"steps": 32}
    clipping: ClassVar[str | None] = "LWC"

    steps: Annotated[int, Field(gt=0)] = 2560
    """Optimizer steps per block (the paper: 20 epochs over 128 samples at batch 1)."""
    batch_size: Annotated[int, Field(gt=0)] = 1
    """Samples in each step."""
    clipping_lr: Annotated[float, Field(gt=0.0)] = 5e-3
    """Learning rate of the clipping, as in the paper; the authors' code has it for the transformation."""
    transformation_lr: Annotated[float, Field(gt=0.0)] = 1e-2
    """Learning rate of the transformation, as in the paper; the authors' code has it for the clipping."""
    smoothing_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Alpha of the SmoothQuant scales from which the transformation starts. The authors' scripts for Llama-2 (W4A4)
    have 0.75 here and 1e-3 for `transformation_lr`."""

    queries: bool = True
    """Whether queries are quantized as keys are, after RoPE: the paper (Sec. 4.1) and its authors' code quantize all
    activations but the softmax's. Without, only what the other methods quantize too: inputs and KV cache."""

    @property
    def acts_beyond_quantizers(self) -> bool:
        """Whether more than quantizers acts at run time: no, queries are only quantized."""
        return False

    def check(self, recipe: Recipe) -> None:
        """Weights without clip search, activations with dynamic scales."""
        self.refuse_clip_search(recipe)
        self.refuse_rotated_inputs(recipe)
        self.refuse_static(recipe)

    def describe(self, recipe: Recipe) -> str:
        rates = f"lr {self.clipping_lr:g} clipping, {self.transformation_lr:g} transformation"
        queries = ", queries quantized as keys" if self.queries and recipe.keys else ""
        start = f"start alpha {self.smoothing_alpha:g}{queries}"
        return f"OmniQuant {self.steps} steps of {self.batch_size} a block, {rates}, {start}"
