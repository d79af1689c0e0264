"""FlatQuant as a method of a recipe: its settings and what they need; `block_training` has the mathematics."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role, override
from rotquant.recipes.traits import Trait
from rotquant.recipes.transforms import SiteName, Transform


class FlatQuant(Method):
    """FlatQuant (Sun et al. 2024): an invertible matrix for each site, learned block by block, acts while the model
    runs.

    Each matrix is a Kronecker product of two small ones behind a scale of each feature, so it costs little. The weights
    hold the inverse, and the recipe rounds them afterwards. Keys and values are rotated by the recipe's `rotation`,
    where the paper learns their matrices too.
    """

    name: ClassVar[str] = "flatquant"
    actions: ClassVar[str] = "rotquant.methods.flatquant.block_training"
    title: ClassVar[str] = "FlatQuant"
    source: ClassVar[str] = "Sun et al. 2024, Secs. 3.1 and 3.2, Eqs. 3-5"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation"})
    acts_at_run_time: ClassVar[bool] = True
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    rates: ClassVar[tuple[str, ...]] = ("transformation_lr", "clipping_lr")
    quantized_inputs: ClassVar[bool] = True
    short: ClassVar[Mapping[str, Any]] = {"steps": 48, "batch_size": 2}

    steps: Annotated[int, Field(gt=0)] = 480
    """Steps of each block: 15 epochs over 128 samples (authors' code)."""
    batch_size: Annotated[int, Field(gt=0)] = 4
    """Samples in a step."""
    transformation_lr: Annotated[float, Field(gt=0.0)] = 5e-3
    """Learning rate of matrices and scales; it falls to a thousandth along a cosine, as the other does."""
    clipping_lr: Annotated[float, Field(gt=0.0)] = 5e-2
    """Learning rate of the clip ratios of weights and inputs."""
    smoothing_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3
    """Alpha of the SmoothQuant scales from which the features' scales start (authors' code)."""

    @property
    def unsuited(self) -> Mapping[Trait, str]:
        """Experts, whose weights do not see all tokens that the block's matrix is learned on."""
        return {"experts": "learns a block by all of its tokens, while an expert sees single ones"}

    def check(self, recipe: Recipe) -> None:
        """Dynamic inputs without groups of heads, scales of rows, and no other transform of what linear layers read."""
        self.refuse_static(recipe)
        if any(one.online and one.location != "queries_keys" for one in recipe.transforms):
            raise ValueError(
                "flatquant learns what stands before linear layers: set rotation.inputs to none, rotation.heads and "
                "rotation.mlp to false"
            )
        if recipe.weights is None and recipe.activations is None:
            raise ValueError("flatquant needs a weights or an activations section: nothing else is quantized")
        if recipe.attention_output is not None:
            raise ValueError("flatquant mixes features of several heads: leave attention_output out")
        if recipe.weights is not None and recipe.weights.scheme.granularity == "tensor":
            raise ValueError("flatquant takes weights of granularity channel or group")

    def describe(self, recipe: Recipe) -> str:
        return (
            f"FlatQuant, {self.steps} steps of {self.batch_size} a block, lr {self.transformation_lr:g} matrices, "
            f"{self.clipping_lr:g} clipping, start alpha {self.smoothing_alpha:g}"
        )

    def clips_weights(self, recipe: Recipe) -> str | None:
        """By the ratios that it learns, unless the recipe searches others afterwards."""
        return None if recipe.weights is None or recipe.weights.clip_search else "LWC"

    def transforms_at(self, site: SiteName) -> tuple[Transform, ...]:
        """What acts on the input of a site: a scale of each feature, then the product of two matrices."""
        about = {"name": self.name, "location": site, "online": True, "origin": "learned"}
        return (
            Transform(kind="scaling", tensors=(f"{site}.scale",), **about),
            Transform(kind="factorized", tensors=(f"{site}.left", f"{site}.right"), **about),
        )

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """With weights to nearest and by GPTQ."""
        return {"flatquant": flatquant, "flatquant-gptq": flatquant_gptq}


def factor_sizes(features: int) -> tuple[int, int]:
    """The sizes of the two matrices of a site of so many features: the two divisors next to the square root."""
    left = next(size for size in range(math.isqrt(features), 0, -1) if features % size == 0)
    return left, features // left


def flatquant_gptq() -> Recipe:
    """FlatQuant W4A4KV4 with GPTQ: QuaRot's quantizers, learned clips, and Hadamard rotations of keys and values."""
    from rotquant.recipes.presets import quarot

    rotation = {"residual": "none", "heads": False, "mlp": False}
    clips = {"weights": {"clip_search": False}, "activations": {"clip_ratio": 1.0}}
    return override(quarot(), {"methods": {"flatquant": {}}, "rotation": rotation, **clips}, "flatquant-gptq")


def flatquant() -> Recipe:
    """FlatQuant W4A4KV4: the same with weights rounded to nearest."""
    return override(flatquant_gptq(), {"methods": {"gptq": None}}, "flatquant")
