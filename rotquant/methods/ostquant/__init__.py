"""OSTQuant's learning of orthogonal and scaling pairs as a method of a recipe.

`pair_training` has the learning, `rotquant.models.rotation.scales` what the scales divide.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role, override
from rotquant.recipes.schemes import Calibration


class OSTQuant(Method):
    """OSTQuant (Hu et al. 2025): rotations and scales of features, learned through the quantized network, all merged
    into the weights.

    R1 and each layer's R2 have beside them a scale of each feature: of what the two norms give behind R1, of queries
    against keys, of values, and of up_proj's rows against down_proj's columns. They minimize the KL divergence from the
    full-precision network over its likeliest tokens, while inputs and KV cache are quantized, or weights too.
    """

    name: ClassVar[str] = "ostquant"
    actions: ClassVar[str] = "rotquant.methods.ostquant.pair_training"
    title: ClassVar[str] = "OSTQuant"
    source: ClassVar[str] = "Hu et al. 2025, Secs. 4.1 and 4.2, Eqs. 9-13"
    roles: ClassVar[frozenset[Role]] = frozenset({"rotations"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "transformation", "selection"})
    seeded: ClassVar[bool] = True
    rates: ClassVar[tuple[str, ...]] = ("rotation_lr", "scale_lr")
    quantized_inputs: ClassVar[bool] = True
    short: ClassVar[Mapping[str, Any]] = {"steps": 32, "text": {"samples": 256}}

    steps: Annotated[int, Field(gt=0)] = 150
    """Iterations; 100 in the authors' scripts."""
    batch_size: Annotated[int, Field(gt=0)] = 8
    """Sequences in an iteration; 32 in the authors' scripts, four on each of eight GPUs."""
    rotation_lr: Annotated[float, Field(gt=0.0)] = 0.01689753172873217
    """Learning rate of rotations at the first step (authors' code; the paper's text and tables differ)."""
    scale_lr: Annotated[float, Field(gt=0.0)] = 0.0017898822675917248
    """Learning rate of scales at the first step (authors' code)."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rates decay to zero: `cosine` as the paper says, `linear` as its authors' code does."""
    gradient_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Norm to which the gradient of all that is learned is cut: the default of the trainer in the authors' code."""
    likeliest: Annotated[int, Field(gt=0)] = 1000
    """Tokens over which the divergence is summed: those to which the full-precision network gives most."""
    learned: Literal["both", "rotations", "scales"] = "both"
    """What is learned; the other is left as it starts. One alone takes the pairs away and leaves all else."""
    start: Literal["weights", "drawn"] = "weights"
    """Where rotations start: behind the principal directions of the `weights` that read what they give, R = U H, or as
    `drawn`. Scales start at one."""
    network: Literal["activations", "all"] = "activations"
    """Tensors that are quantized while learning: `activations`, inputs of linear layers and KV cache alone, or `all`,
    weights too, round-to-nearest: as the authors do it where weights alone are quantized."""
    text: Calibration = Calibration(samples=1000)
    """Where the sequences come from: its `samples` are gone through in random order, as often as needed."""

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless there are rotations to learn and something is quantized, dynamically, meanwhile."""
        self.refuse_nothing_to_learn(recipe)
        self.refuse_static(recipe)
        if self.network == "all" and recipe.weights is None:
            raise ValueError("ostquant.network 'all' needs a weights section")
        if self.network == "activations" and not (recipe.activations or recipe.keys or recipe.values):
            raise ValueError(
                "ostquant.network 'activations' needs an activations, keys or values section: nothing else is "
                "quantized while learning; 'all' learns for quantized weights too"
            )

    def describe(self, recipe: Recipe) -> str:
        text = self.text
        what = {"both": "rotations and scales", "rotations": "rotations", "scales": "scales"}[self.learned]
        start = "behind the weights' principal directions" if self.start == "weights" else "as drawn"
        return (
            f"OSTQuant of {what} from {start}, KL of the {self.likeliest} likeliest tokens, Riemannian Adam, "
            f"{self.steps} steps of {self.batch_size} x {text.sequence_length} tokens of {text.samples} samples of "
            f"{text.corpus}, learning rates {self.rotation_lr:.3g} and {self.scale_lr:.3g} {self.schedule}, gradient "
            f"cut to {self.gradient_norm:g}" + (", weights rounded too" if self.network == "all" else "")
        )

    def learns_from(self, recipe: Recipe) -> dict[str, Any]:
        """How weights are rounded to nearest, where they are while learning; what rounds them later counts nowhere."""
        return {"weights": recipe.rounded.model_dump(mode="json")} if self.network == "all" else {}

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """QuaRot with GPTQ, its rotations learned with scales."""
        return {"ostquant": ostquant}


def ostquant() -> Recipe:
    """OSTQuant W4A4KV4: QuaRot with GPTQ, R1, R2 and scales learned by the KL divergence of the likeliest tokens."""
    from rotquant.recipes.presets import quarot

    changes = {"rotation": {"values": "random_hadamard"}, "methods": {"ostquant": {}}}
    return override(quarot(), changes, "ostquant")
