"""Block-wise fine-tuning as a method of a recipe: its settings and its place; `block_training` has the mathematics."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import Calibration
from rotquant.weights.grids import ScaleGrid, WeightGrid


class BlockAP(Method):
    """Block-wise training of all parameters (EfficientQAT's Block-AP), by which PrefixQuant is fine-tuned.

    Block by block the weights of linear layers, their scales and zero points, and the static scales of inputs and KV
    cache are trained together, so that the quantized block, on what the quantized blocks before it give, has the
    outputs of the full-precision one.
    """

    name: ClassVar[str] = "block_ap"
    actions: ClassVar[str] = "rotquant.methods.block_ap.block_training"
    title: ClassVar[str] = "block-wise fine-tuning"
    source: ClassVar[str] = "PrefixQuant, Secs. 5.2 and 6.1; Chen et al. 2024 (EfficientQAT), Sec. 3.2"
    roles: ClassVar[frozenset[Role]] = frozenset({"rounding", "scales"})
    short: ClassVar[Mapping[str, Any]] = {"text": {"samples": 64, "sequence_length": 512}}
    excludes: ClassVar[frozenset[Role]] = frozenset({"selection"})
    seeded: ClassVar[bool] = True
    rates: ClassVar[tuple[str, ...]] = ("scale_lr", "weight_lr")
    quantized_inputs: ClassVar[bool] = True
    clipping: ClassVar[str | None] = "learned scales"

    text: Calibration = Calibration(corpus="pile", samples=512, sequence_length=1024)
    """Training text; EfficientQAT has 4096 samples of 2048 tokens of RedPajama."""
    epochs: Annotated[int, Field(gt=0)] = 20
    """How often each sample is seen: 20 times at W4A4KV4 and 10 at W4A8KV4; EfficientQAT has 2."""
    batch_size: Annotated[int, Field(gt=0)] = 4
    """Samples in each step."""
    scale_lr: Annotated[float, Field(gt=0.0)] = 5e-5
    """Learning rate of scales and zero points; 2e-5 for Llama-3-70B."""
    weight_lr: Annotated[float, Field(gt=0.0)] = 5e-6
    """Learning rate of weights; 2e-6 for Llama-3-70B."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of both learning rates. The paper speaks of none; its authors' code takes a cosine to a tenth."""
    clip_gradients: Annotated[float, Field(gt=0.0)] | None = None
    """Largest norm of a step's gradient. The paper speaks of none; its authors' code has 0.3."""
    targets: Literal["full_precision", "quantized"] = "full_precision"
    """The network whose hidden states are the inputs of the full-precision block that gives the targets."""
    loss: Literal["mse", "relative"] = Field("mse", exclude_if=lambda loss: loss == "mse")
    """`relative` divides each token's squared error by the mean square of the token's target, as the norm that reads it
    next does; else a few tokens with massive activations are most of the loss. Papers have `mse`."""
    norms: bool = False
    """Whether the norms' gains are trained with the weights, as the authors' code does; the paper names weights and
    quantization parameters."""
    weights: WeightGrid | None = WeightGrid()
    """The grid search by which weights' scales begin; null: they cover the weights (EfficientQAT)."""
    scales: ScaleGrid = ScaleGrid()
    """The grid search by which static scales begin."""

    def check(self, recipe: Recipe) -> None:
        """Weights without another search, static scales that are symmetric."""
        self.refuse_clip_search(recipe)
        self.refuse_asymmetric_static(recipe)
        if self.text.samples < self.batch_size:
            raise ValueError(
                f"block_ap.batch_size is {self.batch_size}, and block_ap.text.samples only {self.text.samples}: "
                "take more samples or smaller batches"
            )

    @property
    def steps(self) -> int:
        """Training steps of each block."""
        return self.epochs * (self.text.samples // self.batch_size)

    def describe(self, recipe: Recipe) -> str:
        rates = f"lr {self.scale_lr:g} scales, {self.weight_lr:g} weights, {self.schedule}"
        clipped = "" if self.clip_gradients is None else f", gradients clipped at {self.clip_gradients:g}"
        start = "covering the weights" if self.weights is None else self.weights.describe(recipe)
        static = f"; {self.scales.describe(recipe)}" if recipe.has_static_scales else ""
        text = f"{self.text.samples} samples of {self.text.sequence_length} tokens in batches of {self.batch_size}"
        norms = ", norms trained too" if self.norms else ""
        return f"{self.title}, {self.epochs} epochs of {text}, {rates}{clipped}{norms}; {start}{static}"
