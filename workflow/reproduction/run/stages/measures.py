"""Measurements of metrics on a model: one function for each kind of metric, found by its name.

An edit of one of them, or of code that only it uses, does not affect the results of the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reproduction.identity.names import HISTORY_FILE
from reproduction.identity.run import Run, named
from reproduction.metrics.settings import (
    SNR,
    HadamardKurtosis,
    Magnitudes,
    MaximaByToken,
    ModelSize,
    Outliers,
    OutlierTokens,
    PrefixTokens,
    RangeUse,
    TrainingLoss,
    WeightKurtosis,
)
from reproduction.run.samples import Samples, pack
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.foundation.files import read_json
from rotquant.recipes.schemes import Calibration, Perplexity
from rotquant.text import NO_BOS, Split, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rotquant.metrics.divergence import FloatStates
    from rotquant.weights.storage import QuantizedState

#: Items of a zero-shot task per window of text that fits into a batch; they are about this much shorter.
ITEMS_PER_WINDOW = 8


@dataclass(frozen=True)
class MetricResult:
    """The result of a metric.

    source: provenance of its text or tasks. arrays: data of figures. samples: the samples whose means its numbers are
    (`run.samples`). texts: its texts by quantity.
    """

    metrics: dict[str, float]
    source: dict[str, Any]
    arrays: dict[str, Any] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """The subject of a measurement: a run's model under its recipe.

    text: yields the tokens of a corpus's split (or of its head) and its provenance. reference: the run's checkpoint.
    batch_size: windows of text per forward pass. state: tensors stored next to the weights, if any.
    allow_code_execution: whether programs that it writes may be run.
    weights: the folder of its stored weights, None for an unchanged checkpoint.
    exact: the full-precision model's last states on the windows of a perplexity run; None without quantization.
    """

    run: Run
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    text: Callable[..., tuple[Tokens, dict[str, Any]]]
    reference: Callable[[], "PreTrainedModel"]
    batch_size: int
    state: "QuantizedState | None" = None
    allow_code_execution: bool = False
    weights: Path | None = None
    exact: "FloatStates | None" = None

    def tokens(
        self, metric: Perplexity | SNR | Magnitudes | Outliers | MaximaByToken | OutlierTokens
    ) -> tuple[Tokens, dict[str, Any]]:
        """The tokens that a metric reads, and their provenance."""
        tokens, identity = self.read(metric.corpus, metric.split)
        return tokens, {"corpora": {"evaluation": identity}}

    def read(self, corpus: str, split: Split, characters: int | None = None) -> tuple[Tokens, dict[str, Any]]:
        """The tokens of a planned text, and its provenance."""
        planned = self.run.texts.get(named(corpus, split, characters))
        return self.text(self.run.corpora[corpus], split, characters, planned)


def perplexity(metric: Perplexity, subject: Subject) -> MetricResult:
    """Perplexity of a text and, for quantized models, KL divergence from the full-precision model."""
    from rotquant.metrics.perplexity import perplexity

    tokens, source = subject.tokens(metric)
    result = perplexity(subject.model, tokens, metric, batch_size=subject.batch_size, exact=subject.exact)
    if subject.run.key == subject.run.unquantized.key:
        nothing = (0.0,) * result.windows
        result = replace(result, kl=nothing, flips=nothing)
    windows = {"perplexity": result.by_window, "kl": result.kl, "flips": result.flips}
    return MetricResult(result.as_metrics(), source, samples=pack(windows))


def zero_shot(metric: ZeroShot, subject: Subject) -> MetricResult:
    """Accuracies of tasks."""
    from reproduction import tasks

    folder = tasks.prepare(metric, Path(), subject.run.corpora.get(metric.corpus or ""))
    batch_size = ITEMS_PER_WINDOW * subject.batch_size
    allowed = subject.allow_code_execution
    found = tasks.scores(subject.model, subject.tokenizer, metric, folder, batch_size, allowed)
    note = {"note": NO_BOS} if subject.tokenizer.bos_token_id is None else {}
    source = {"corpora": {}, "tasks": tasks.identity(metric, folder), **note}
    return MetricResult(found.metrics, source, samples=pack(found.items))


def snr(metric: SNR, subject: Subject) -> MetricResult:
    """Signal-to-noise ratio of the logits, against those of the checkpoint."""
    from reproduction.metrics.snr import end_to_end_snr

    tokens, source = subject.tokens(metric)
    return MetricResult(end_to_end_snr(subject.model, subject.reference(), tokens, metric), source)


def magnitudes(metric: Magnitudes, subject: Subject) -> MetricResult:
    """Magnitudes of activations or weights."""
    from reproduction.metrics.magnitudes import magnitudes

    tokens, source = subject.tokens(metric)
    metrics, arrays = magnitudes(subject.model, tokens, metric)
    return MetricResult(metrics, source, arrays)


def outliers(metric: Outliers, subject: Subject) -> MetricResult:
    """Statistics of outliers, site by site."""
    from reproduction.metrics.outliers import outlier_statistics

    tokens, source = subject.tokens(metric)
    metrics, arrays = outlier_statistics(subject.model, tokens, metric)
    return MetricResult(metrics, source, arrays)


def range_use(metric: RangeUse, subject: Subject) -> MetricResult:
    """Share of a quantizer's range that example values use, without a model."""
    from reproduction.metrics.range_use import range_use

    metrics, arrays = range_use(metric)
    return MetricResult(metrics, {"corpora": {}}, arrays)


def hadamard_kurtosis(metric: HadamardKurtosis, subject: Subject) -> MetricResult:
    """Excess kurtosis of random vectors after a Hadamard transform, without a model."""
    from reproduction.metrics.hadamard_kurtosis import hadamard_kurtosis

    metrics, arrays = hadamard_kurtosis(metric, subject.run.seed)
    return MetricResult(metrics, {"corpora": {}}, arrays)


def weight_kurtosis(metric: WeightKurtosis, subject: Subject) -> MetricResult:
    """Effect of rotation on the kurtosis of weights and on output errors.

    Raises:
        RecipeError: the recipe quantizes, but the metric measures only rotation.
    """
    from reproduction.metrics.weight_kurtosis import weight_kurtosis
    from rotquant.text import calibration_samples

    recipe = subject.run.recipe
    quantized = [name for name in ("weights", "activations", "keys", "values") if getattr(recipe, name) is not None]
    if quantized:
        raise RecipeError(f"weight_kurtosis rounds weights by itself: leave {quantized[0]} out of the recipe.")
    calibration = Calibration(samples=metric.samples, sequence_length=metric.sequence_length)
    tokens, identity = subject.read(metric.corpus, "train", calibration.characters)
    samples = calibration_samples(tokens, calibration, subject.run.seed)
    metrics, arrays = weight_kurtosis(subject.model, subject.reference(), samples, metric)
    return MetricResult(metrics, {"corpora": {"calibration": identity}}, arrays)


def token_maxima(metric: MaximaByToken, subject: Subject) -> MetricResult:
    """Largest magnitudes of tokens, layer by layer.

    Raises:
        RecipeError: the recipe quantizes the measured tensors, whose range is then the quantizer's.
    """
    from reproduction.metrics.token_maxima import token_maxima

    recipe = subject.run.recipe
    quantized = [name for name in ("activations", "keys", "values") if getattr(recipe, name) is not None]
    if quantized:
        raise RecipeError(f"token_maxima looks at what is not quantized: leave {quantized[0]} out of the recipe.")
    tokens, source = subject.tokens(metric)
    metrics, arrays = token_maxima(subject.model, tokens, metric, recipe.transforms)
    return MetricResult(metrics, source, arrays)


def outlier_tokens(metric: OutlierTokens, subject: Subject) -> MetricResult:
    """Content and position of outlier tokens."""
    from reproduction.metrics.outlier_tokens import outlier_tokens

    tokens, source = subject.tokens(metric)
    metrics, arrays = outlier_tokens(subject.model, tokens, metric, cast(Any, subject.tokenizer.decode))
    return MetricResult(metrics, source, arrays)


def prefix_tokens(metric: PrefixTokens, subject: Subject) -> MetricResult:
    """Number and content of the tokens that are stored in front of every text.

    Raises:
        RecipeError: no method of the recipe chooses such tokens.
    """
    from reproduction.metrics.counts import prefix_tokens
    from rotquant.models.simulation.prefix import stored_ids

    methods = subject.run.recipe.methods.values()
    chooser = next((method for method in methods if "prefix" in method.roles), None)
    if chooser is None or subject.state is None:
        raise RecipeError("prefix_tokens looks at a stored prefix: the recipe needs a method that chooses one.")
    ids = stored_ids(subject.state.tensors[chooser.name])
    decode = cast(Any, subject.tokenizer.decode)
    metrics, texts = prefix_tokens(ids, subject.model.config.bos_token_id, decode)
    return MetricResult(metrics, {"corpora": {}}, {"ids": list(ids)}, texts=texts)


def model_size(metric: ModelSize, subject: Subject) -> MetricResult:
    """Parameters and bits of the checkpoint under the recipe."""
    from reproduction.metrics.counts import model_size

    return MetricResult(model_size(subject.reference(), subject.run.recipe.weights), {"corpora": {}})


def training_loss(metric: TrainingLoss, subject: Subject) -> MetricResult:
    """Spikes and end of the loss of the training that made the stored weights.

    Raises:
        RecipeError: no method of the recipe trains weights by steps that have a loss.
    """
    from reproduction.metrics.counts import training_loss

    path = subject.weights and subject.weights.parent / HISTORY_FILE
    history = read_json(path, "history of a training") if path and path.exists() else []
    if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
        raise ResultError(f"history of a training {path} is damaged (no list of steps); make the weights again.")
    losses = [float(record["loss"]) for record in history if isinstance(record.get("loss"), int | float)]
    if not all(0 < loss < math.inf for loss in losses):
        raise ResultError(f"history of a training {path} is damaged (a loss that none has); make the weights again.")
    if len(losses) < 2:
        raise RecipeError("training_loss looks at a training: the recipe needs a method that trains weights by steps.")
    metrics, arrays = training_loss(losses, metric)
    return MetricResult(metrics, {"corpora": {}}, arrays)
