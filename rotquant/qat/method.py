"""Common part of the methods that train a whole model to be its own full-precision teacher: settings and checks.

Each says which quantizers its weights have; the training is `qat.training`. No torch here: tables are expanded by it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from rotquant.recipes.recipe import Budget, Method, Recipe, Role
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme, WeightQuantization

if TYPE_CHECKING:
    from rotquant.kernels.rows.partition import Kind

#: The widths of weights that there are quantizers for.
WIDTHS = (2, 3)


class QuantizerSettings(NamedTuple):
    """Quantizers of weights in a training, and where they begin.

    kind: by its name in `qat.quantizers`.
    straight_through: what stands in for the derivative of a partition's steps, see `tensors.partition.ldp`.
    start_target: from what the error is measured by which clips begin, see `qat.start.search_clips`.
    start_rounding: how the search for clips rounds: as the quantizers do at their start, or all of them as Eq. 1.
    fixed: parameters of quantizers, by their names, that stay as they begin.
    unsearched: linear layers, by the last part of their names, whose clips begin with all of the range.
    """

    kind: "Kind"
    straight_through: Literal["step", "ramp"] = "step"
    start_target: Literal["weight", "clipped"] = "weight"
    start_rounding: Literal["own", "uniform"] = "own"
    fixed: tuple[str, ...] = ()
    unsearched: tuple[str, ...] = ()


class SelfDistillation(Method):
    """A method that trains all parameters of the quantized model towards the full-precision model (RCP Eq. 3)."""

    actions: ClassVar[str] = "rotquant.qat.training"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation", "rounding"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    seeded: ClassVar[bool] = True
    groups: ClassVar[str] = "table_groups"
    stored_as: ClassVar[Literal["integers", "lattice", "codebook"]] = "codebook"
    rates: ClassVar[tuple[str, ...]] = ("weight_lr", "quantizer_lr")
    quantized_inputs: ClassVar[bool] = True

    text: Calibration = Calibration(corpus="alpaca_wikitext2", samples=8000, sequence_length=1024)
    """Training text: Alpaca's instructions and WikiText-2 (RCP Sec. 5.1). How many sequences the paper does not say; Du
    et al. have 8,000 of these two."""
    epochs: Annotated[int, Field(gt=0)] = 8
    """How often each sequence is seen: 8 times, and 16 for LLaMA-3.2 1B (RCP Table 8)."""
    batch_size: Annotated[int, Field(gt=0)] = 64
    """Sequences in each step. RCP's Table 8 prints 8 for 7B, 4 for 1B, 3B and 8B, 32 for 13B, probably for each of its
    8 GPUs: App. A.5 cuts a batch "from 8 to 1" for the memory of one, and BitDistiller's script has
    `per_device_train_batch_size` on 8. So a step has 64 of 7B, and 8,000 samples make some 1,000 steps in 8 epochs, not
    8,000."""
    weight_lr: Annotated[float, Field(gt=0.0)] | None = None
    """Learning rate of weights, embeddings and norms; null takes 1e-6 with a quantized KV cache, 8e-7 without (RCP
    Sec. 5.1)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of all learning rates; `cosine` falls to zero. The paper speaks of none."""
    start_samples: Annotated[int, Field(gt=0)] = 64
    """Number of sequences of the text that decide where the clipping begins (RCP Eq. 6)."""
    confidence: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["largest", "labels"] = "largest"
    """The share of KL(S || T) in the loss (RCP Eq. 3), a number or what it is measured as on the text: `largest`, the
    teacher's mean largest probability, as BitDistiller's code does; `labels`, its mean probability of the tokens that
    follow (Du et al. 2024, Eq. 8)."""
    temperature: Annotated[float, Field(gt=0.0)] | None = 0.7
    """Temperature at which the full-precision model writes the training text, as in BitDistiller's code, after the
    first tokens of each sample; null trains on the samples themselves."""
    prompt: Annotated[int, Field(gt=0)] = 32
    """How many first tokens of a sample it writes after. The code takes the first 128 characters of WikiText's samples,
    about 32 tokens, and Alpaca's instructions."""
    validation_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """Share of the samples that are not trained on. Of all steps the one with the least loss on them is saved, as in
    BitDistiller's code (`load_best_model_at_end`); 0 trains on all and keeps the last step."""
    validate_every: Annotated[int, Field(gt=0)] = 4
    """Steps between two measurements of that loss (BitDistiller's `eval_steps`); the last step has one too."""
    gradient_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Bound at which the norm of all gradients together is cut, the default of the trainer that BitDistiller's code
    calls; null never cuts. The code adds the loss up over a sample's tokens. Here it is their mean, so the cut acts
    less often."""
    factorized: bool = False
    """Whether R1 stays an operator of its own in training, next to weights that are not rotated (RCP Table 12)."""

    def codebook_entries(self, recipe: Recipe) -> int:
        """Number of levels stored with each table: the ends for equal distances and for NormalFloat about zero, and
        also the centre where it is learned (`tensors.codebook_compression`)."""
        every = super().codebook_entries(recipe)
        return {"ldp": every, "nf3_ldp": 3}.get(self.quantizer_settings(recipe).kind, 2)

    def quantizer_settings(self, recipe: Recipe) -> QuantizerSettings:
        """Quantizers chosen by the scheme of the recipe's weights."""
        raise NotImplementedError(f"{self.name} names no quantizers")

    @property
    def validated(self) -> int:
        """Number of samples, the first ones, that are not trained on."""
        return int(self.validation_share * self.text.samples)

    @property
    def steps(self) -> int:
        """Steps of AdamW."""
        return self.epochs * ((self.text.samples - self.validated) // self.batch_size)

    @property
    def written(self) -> tuple[int, int] | None:
        """The training text, unless it is taken as it is."""
        return None if self.temperature is None else (self.text.samples, self.text.sequence_length)

    def budget(self, recipe: Recipe) -> Budget:
        """Training text and learning rates, the rate of weights being that for the recipe's KV cache."""
        found = super().budget(recipe)
        if self.weight_lr is not None:
            return found
        rate = 8e-7 if recipe.keys is None and recipe.values is None else 1e-6
        return found._replace(rates=tuple((name, rate if own is None else own) for name, own in found.rates))

    def check(self, recipe: Recipe) -> None:
        """Asymmetric weights of 2 or 3 bits, in groups or rows, without another search; dynamic activations; an R1 that
        is drawn for `factorized`."""
        self.refuse_clip_search(recipe)
        self.refuse_static(recipe)
        scheme = recipe.rounded.scheme
        if scheme.bits not in WIDTHS:
            raise ValueError(f"{self.name} has quantizers of 2 and 3 bits: set weights.scheme.bits to one of them")
        if scheme.symmetric or scheme.granularity == "tensor":
            raise ValueError(
                f"{self.name} quantizes each group or row of weights between two ends: set weights.scheme.symmetric to "
                "false, and granularity to group or channel"
            )
        trained = self.text.samples - self.validated
        if trained < self.batch_size:
            raise ValueError(
                f"{self.name}.batch_size is {self.batch_size}, and {self.name}.text.samples only {self.text.samples}, "
                f"of which {trained} are trained on: take more samples or smaller batches"
            )
        if self.temperature is not None and self.prompt >= self.text.sequence_length:
            raise ValueError(
                f"{self.name}.prompt is {self.prompt}, and {self.name}.text.sequence_length "
                f"{self.text.sequence_length}: take longer samples, shorter prompts, or set temperature to null"
            )
        fixed = recipe.fuses_norms and not recipe.has_role("rotations")
        if self.factorized and not fixed:
            raise ValueError(
                f"{self.name}.factorized keeps a random R1 next to the weights: set rotation.residual and learn no "
                "rotations, or set it to false"
            )

    def check_widths(self, recipe: Recipe, widths: Mapping[str, int]) -> None:
        """Groups divide the features of every linear layer."""
        self.refuse_ragged_groups(recipe, widths)

    def describe(self, recipe: Recipe) -> str:
        text = f"{self.text.samples} samples of {self.text.sequence_length} tokens in batches of {self.batch_size}"
        rates = ", ".join(f"{rate:g} {name.removesuffix('_lr')}s" for name, rate in self.budget(recipe).rates)
        of = {"largest": "the teacher's mean largest probability", "labels": "the teacher's mean probability of labels"}
        share = of[self.confidence] if isinstance(self.confidence, str) else f"{self.confidence:g}"
        if self.temperature is not None:
            text += f", written by the teacher at temperature {self.temperature:g} after {self.prompt} tokens"
        if self.validated:
            text += f", {self.validated} of them held out, by which the best step is chosen"
        cut = "" if self.gradient_norm is None else f", gradients cut at a norm of {self.gradient_norm:g}"
        return (
            f"{self.title}, {self.epochs} epochs of {text}, lr {rates}, {self.schedule}{cut}; CAKLD with a = {share}; "
            f"clips begin by a search on {self.start_samples} samples"
            f"{', R1 next to the weights' if self.factorized else ''}"
        )


def low_bits(method: str, rotation: RotationScheme | None) -> Recipe:
    """W2A4KV4 of a method (RCP Table 11): asymmetric weights in groups of 128, inputs symmetric per token clipped to
    0.9 of their range, KV cache asymmetric per head (128 features) clipped to 0.95."""
    weights = QuantizationScheme(bits=2, symmetric=False, granularity="group", group_size=128)
    cache = QuantizationScheme(bits=4, symmetric=False, granularity="head", clip_ratio=0.95)
    return Recipe.model_validate(
        {
            "methods": {method: {}},
            "rotation": rotation,
            "weights": WeightQuantization(scheme=weights, clip_search=False),
            "activations": QuantizationScheme(bits=4, clip_ratio=0.9),
            "keys": cache,
            "values": cache,
        }
    )
