"""SpinQuant's learning of rotations as a method of a recipe.

`cayley_training` and `rotquant.models.rotation.network` have the mathematics.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import Calibration


class SpinQuant(Method):
    """Rotations learned by Cayley SGD on the quantized network's loss, all weights frozen (SpinQuant Sec. 3.2, 4.1)."""

    name: ClassVar[str] = "spinquant"
    actions: ClassVar[str] = "rotquant.methods.spinquant.cayley_training"
    title: ClassVar[str] = "SpinQuant"
    source: ClassVar[str] = "Liu et al. 2024, Secs. 3.2 and 4.1, Eqs. 2 and 5"
    roles: ClassVar[frozenset[Role]] = frozenset({"rotations"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "transformation", "selection"})
    seeded: ClassVar[bool] = True
    quantized_inputs: ClassVar[bool] = True
    short: ClassVar[Mapping[str, Any]] = {"steps": 32, "text": {"samples": 256}}

    steps: Annotated[int, Field(gt=0)] = 100
    """Iterations."""
    batch_size: Annotated[int, Field(gt=0)] = 8
    """Sequences of text in an iteration."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1.5
    """Learning rate at the first step; it decays to zero. The authors' optimizer takes its Cayley step on R transposed,
    so its bound min(rate, 1 / norm) is of another matrix than here."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the learning rate decays: `linear` as the paper says, `cosine` as its authors' code does."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum of the gradients; zero in the paper and in its authors' code."""
    gradient: Literal["errors", "scales"] = "errors"
    """Dependence of the rounding errors on the rotation in the straight-through gradient: `errors`, that they turn with
    it (Eq. 5, and the authors' code), or `scales`, a gradient of our own that keeps their direction and lets them grow
    with the scales which the rotation decides. Autograd through minimum and maximum is close to `errors`, with a cosine
    of .96 on rq-7b, and far from `scales`, with .3."""
    network: Literal["activations", "all"] = "activations"
    """Tensors that are quantized while learning: `activations`, inputs of linear layers and KV cache alone, so that
    GPTQ is left with the weights ("Cayley on 16-4-KV"), or `all`, weights too, round-to-nearest ("Cayley on 4-4-KV",
    Table 3)."""
    targets: Literal["tokens", "predictions"] = "tokens"
    """Targets of the cross entropy of the quantized network's predictions: the next `tokens` of the text, as the paper
    does, or the `predictions` of the float network, which hold less noise than single tokens."""
    text: Calibration = Calibration(samples=800)
    """Where the sequences come from: its `samples` are gone through in random order, as often as needed."""

    @property
    def constants(self) -> bool:
        """Whether neither weights nor rounding errors have a gradient: the backward pass then needs little memory."""
        return self.gradient == "errors" and self.network == "activations"

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless there are rotations to learn and something is quantized, dynamically, while
        learning."""
        self.refuse_nothing_to_learn(recipe)
        self.refuse_static(recipe)
        if self.network == "all" and recipe.weights is None:
            raise ValueError("spinquant.network 'all' needs a weights section")
        if self.network == "activations" and not (recipe.activations or recipe.keys or recipe.values):
            raise ValueError(
                "spinquant.network 'activations' needs an activations, keys or values section: nothing else is "
                "quantized while learning; 'all' learns for quantized weights too"
            )

    def describe(self, recipe: Recipe) -> str:
        text = self.text
        batch = f"{self.batch_size} x {text.sequence_length} tokens of {text.samples} samples of {text.corpus}"
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        rate = f"learning rate {self.learning_rate:g} {self.schedule}{momentum}"
        network = {"activations": "inputs and cache quantized", "all": "everything quantized"}[self.network]
        gradient = ", gradient of the scales alone" if self.gradient == "scales" else ""
        gradient += ", towards the float network's predictions" if self.targets == "predictions" else ""
        return f"Cayley SGD, {self.steps} steps of {batch}, {rate}{gradient}, {network}"

    def learns_from(self, recipe: Recipe) -> dict[str, Any]:
        """How weights are rounded to nearest, where they are while learning; what rounds them later counts nowhere."""
        return {"weights": recipe.rounded.model_dump(mode="json")} if self.network == "all" else {}
