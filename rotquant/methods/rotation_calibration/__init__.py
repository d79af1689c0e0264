"""Rotations learned on sampled activations, or on the weights alone, as a method of a recipe.

`sampled_vectors` collects what they are learned on, `distribution_losses` has the losses and the learning.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role, override
from rotquant.recipes.schemes import Calibration


class RotationCalibration(Method):
    """Rotations whose outputs are spread as evenly as they can be, without a pass through the quantized network.

    Each rotation is learned on vectors of its own basis: R1 on the normed inputs of all layers, R2 on each layer's
    heads, online rotations on the inputs of their site. With `weights` the rows and columns of the weights that it is
    fused into count too, or alone.
    """

    name: ClassVar[str] = "rotation_calibration"
    actions: ClassVar[str] = "rotquant.methods.rotation_calibration.distribution_losses"
    title: ClassVar[str] = "rotation calibration"
    source: ClassVar[str] = (
        "Shao et al. 2025 (DartQuant), Akhondzadeh et al. 2025 (KurTail), OptRot (arXiv 2512.24124), "
        "OffQ (arXiv 2606.07116), Xiang and Zhang 2024 (DFRot), Saxena et al. 2024 (ResQ)"
    )
    roles: ClassVar[frozenset[Role]] = frozenset({"rotations"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "transformation"})
    seeded: ClassVar[bool] = True
    short: ClassVar[Mapping[str, Any]] = {
        "vectors": 16384,
        "share": 0.5,
        "text": {"samples": 32, "sequence_length": 512},
    }
    reads = "layers"

    loss: Literal["whip", "kurtosis", "rounding"] = "whip"
    """What is minimized of an activation vector y = x R: `whip`, the sum of exp(-|y_i|), which drives values away from
    zero (DartQuant Sec. 4.2), `kurtosis`, the distance of y's kurtosis from 1.8, a uniform distribution's (KurTail), or
    `rounding`, the squared error of the quantizer of inputs (of R2: of values) without its clip (DFRot)."""
    massive: Annotated[float, Field(ge=1.0, exclude_if=lambda factor: factor == 1.0)] = 1.0
    """Factor of the inputs of massive tokens, whose error it multiplies by its square. Massive are those that a grid
    meets well before they are rotated, since a few features have nearly all (DFRot)."""
    weights: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the weights in the loss, whose vectors count by the sum of y_i^4 (OptRot): 0 takes activations alone, 1
    weights alone, and then no text is read. Between the two, an experiment of our own, weights are in the unit of the
    activations' loss at the start."""
    parametrization: Literal["qr", "cayley", "procrustes"] = "qr"
    """How a rotation stays orthogonal: as the `qr` factor Q of a free matrix under SGD (DartQuant's QR-Orth), by
    `cayley` SGD as SpinQuant's, or as the solution of orthogonal `procrustes`: the rotation that brings a step's
    vectors next to what they were rounded to (DFRot)."""
    start: Literal["drawn", "principal", "eigenvectors"] = "drawn"
    """What is learned from: the rotation that the recipe draws, or that behind a Householder reflection which turns the
    `principal` direction of the vectors to the first axis. A Hadamard matrix makes of it one constant, which an
    asymmetric zero point takes (OffQ). Nothing is learned from `eigenvectors` of the vectors' second moments: those of
    the largest eigenvalues, as many as the recipe has outlier features, come last, and they and the others each have a
    random rotation of their own (ResQ)."""
    steps: Annotated[int, Field(ge=0)] = 128
    """Iterations of R1, or of the online rotations in its place; DartQuant's ten epochs over a tenth of the inputs of
    7B, 64 texts at a step. 0 leaves the start as it is."""
    value_steps: Annotated[int, Field(ge=0)] = 2
    """Iterations of each R2, the first of `steps`; two in DartQuant's code: 5 epochs of one batch, accumulated in
    pairs."""
    vectors: Annotated[int, Field(gt=0)] = 131072
    """Vectors in an iteration: 64 texts of 2048 tokens at one site each (DartQuant)."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    """Learning rate (DartQuant)."""
    schedule: Literal["constant", "linear"] = "constant"
    """How the learning rate goes on: `constant` as in DartQuant's code, `linear` to zero."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of the gradients (DartQuant)."""
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of the text's tokens that is kept at each place, drawn for each text and layer."""
    text: Calibration = Calibration(corpus="wikitext2")
    """Where the activations come from."""

    @property
    def sees_quantizers(self) -> bool:
        """Where the loss is that of a quantizer."""
        return self.loss == "rounding"

    @property
    def own_text(self) -> Calibration | None:
        """None where weights alone count."""
        return None if self.weights == 1 and self.start == "drawn" else self.text

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless there are rotations to learn."""
        self.refuse_nothing_to_learn(recipe)
        self.refuse_static(recipe)
        if self.loss == "rounding" and recipe.activations is None:
            raise ValueError("rotation_calibration.loss 'rounding' needs an activations section: it is its error")
        if self.loss != "rounding" and (self.massive > 1 or self.parametrization == "procrustes"):
            raise ValueError("rotation_calibration weights massive tokens and solves procrustes for loss 'rounding'")
        if self.parametrization == "procrustes" and self.weights:
            raise ValueError("rotation_calibration.parametrization 'procrustes' knows no loss of weights: set 0")
        if self.start == "eigenvectors" and (self.steps or not recipe.has_role("selection")):
            raise ValueError(
                "rotation_calibration.start 'eigenvectors' keeps those of outlier features apart, which steps would "
                "mix: set steps to 0, and methods.outliers"
            )
        if self.loss == "rounding" and recipe.has_role("selection"):
            raise ValueError("rotation_calibration.loss 'rounding' is of vectors without outlier features")

    def learns_from(self, recipe: Recipe) -> dict[str, Any]:
        """How many eigenvectors are kept apart."""
        if self.start != "eigenvectors":
            return {}
        return {
            "selection": [one.model_dump(mode="json") for one in recipe.methods.values() if "selection" in one.roles]
        }

    def describe(self, recipe: Recipe) -> str:
        words = {0.0: self.loss, 1.0: "fourth powers of the weights"}
        objective = words.get(self.weights, f"{self.loss} and {self.weights:g} of the weights' fourth powers")
        if self.start == "eigenvectors":
            return f"eigenvectors of activations, largest and others each turned at random{self._reads()}"
        start = ", from the principal direction" if self.start == "principal" else ""
        if not self.steps:
            return f"{self.title}{start}, not learned"
        how = {"qr": "QR factors by SGD", "cayley": "Cayley SGD", "procrustes": "orthogonal Procrustes"}
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        rate = f", learning rate {self.learning_rate:g} {self.schedule}{momentum}"
        rate = "" if self.parametrization == "procrustes" else rate
        massive = f", massive tokens times {self.massive:g}" if self.massive > 1 else ""
        return (
            f"{objective}{massive}{start}, {how[self.parametrization]}, {self.steps} steps ({self.value_steps} of R2) "
            f"of {self.vectors} vectors{rate}{self._reads()}"
        )

    def _reads(self) -> str:
        text = self.own_text
        read = "" if text is None else f" of {text.samples} x {text.sequence_length} tokens of {text.corpus}"
        return f", {self.share:g} of the tokens{read}"

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """QuaRot with GPTQ, R1 and R2 learned by each loss or found in closed form."""
        learned = {"dartquant": dartquant, "kurtail": kurtail, "optrot": optrot, "dfrot": dfrot}
        return {**learned, "offq": offq, "resq": resq}


#: What of the settings is ours: the papers that minimize kurtosis or fourth powers name no rate of Cayley SGD.
_CAYLEY = {"parametrization": "cayley", "learning_rate": 1.5, "schedule": "linear", "momentum": 0.0}


def _learned(name: str, settings: Mapping[str, Any], **changes: Any) -> Recipe:
    """QuaRot W4A4KV4 whose R1 and R2 are learned."""
    from rotquant.recipes.presets import quarot

    methods = {"rotation_calibration": dict(settings)}
    return override(quarot(), {"rotation": {"values": "random_hadamard"}, "methods": methods, **changes}, name)


def dartquant() -> Recipe:
    """DartQuant W4A4KV4: QuaRot with GPTQ, R1 and R2 learned by the whip loss on sampled activations."""
    return _learned("dartquant", {})


def kurtail() -> Recipe:
    """KurTail W4A4KV4: QuaRot with GPTQ, R1 and R2 learned by the kurtosis of sampled activations; rates are ours."""
    return _learned("kurtail", {"loss": "kurtosis", "value_steps": 128, **_CAYLEY})


def optrot() -> Recipe:
    """OptRot W4A4KV4: QuaRot with GPTQ, R1 and R2 learned by fourth powers of the weights, without text; rates are
    ours."""
    return _learned("optrot", {"weights": 1.0, "value_steps": 128, **_CAYLEY})


def offq() -> Recipe:
    """OffQ W4A4KV4: QuaRot with GPTQ, R1 behind a reflection of the inputs' principal direction, and asymmetric inputs;
    nothing is learned by steps."""
    settings = {"start": "principal", "steps": 0, "value_steps": 0}
    return _learned("offq", settings, activations={"symmetric": False})


def dfrot() -> Recipe:
    """DFRot W4A4KV4: QuaRot with GPTQ, R1 learned by the rounding errors of inputs, massive tokens weighted."""
    settings = {"loss": "rounding", "massive": 100.0, "parametrization": "procrustes", "steps": 100, "value_steps": 0}
    return _learned("dfrot", {**settings, "share": 1.0, "text": {"samples": 1}}, rotation={"values": "hadamard"})


def resq() -> Recipe:
    """ResQ W4A4KV4: QuaRot with GPTQ, R1 of the inputs' eigenvectors, and an eighth of the features in 8 bits but of
    down_proj's; its keys and values have 4 bits."""
    start = {"start": "eigenvectors", "steps": 0, "value_steps": 0}
    sites = ["attention_input", "attention_output", "mlp_input"]
    methods = {
        "rotation_calibration": start,
        "outliers": {"share": 0.125, "sites": sites, "bits": 8, "statistic": "square"},
    }
    return _learned("resq", {}, methods=methods, activations={"symmetric": False}, rotation={"values": "hadamard"})
