"""Quantities of metrics: names in result files, format in tables, and whether lower or higher is better.

A perplexity run yields one number; a run of tasks the average and the accuracies, or ROUGE-L; a run on activations or
weights a few statistics. The first quantity of a metric is its main one. Nothing here computes or imports torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from reproduction.metrics.settings import MaximaByToken, Metric, WeightKurtosis
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import TASKS, has_choices, log_odds_of, task_names


@dataclass(frozen=True)
class Quantity:
    """One number of a run.

    name: its key in the published values, and in a result file's metrics unless `stored` is set.
    title: name in a table's head.
    better: whether lower or higher numbers are better.
    unit: printed where numbers are compared.
    chance: the score of guessing, in percent, for accuracies.
    relative: whether rows are compared by their loss in percent of another row.
    sampled: whether it is estimated from a sample: windows of a text or items of tasks.
    infinite: meaning of +inf if it is a result, the best possible; None if +inf means that a network overflowed.
    text: whether it is a text, which is shown next to the paper's and never compared.
    stored: its key in a result file, if a table gives the quantity its own name.
    decides: the quantity that it replaces in deciding a mechanism on a stand-in (`endpoints`).
    absent: meaning of nan where it stands for a missing number, not an overflow.
    """

    name: str
    title: str
    better: Literal["lower", "higher"]
    unit: str = ""
    chance: float | None = None
    relative: bool = True
    sampled: bool = False
    infinite: str | None = None
    absent: str | None = None
    text: bool = False
    stored: str | None = None
    decides: str | None = None

    @property
    def key(self) -> str:
        """The quantity's key in a result file's metrics."""
        return self.stored or self.name

    def loss(self, value: float, reference: float) -> float:
        """The loss of `value` against `reference`, in the quantity's unit; negative for a gain."""
        if value == reference:  # also inf dB and inf dB, whose difference would be nan
            return 0.0
        return value - reference if self.better == "lower" else reference - value

    def checkable(self, *values: float) -> bool:
        """Whether measured values can decide a claim: each is finite, or infinite as a result."""
        return all(math.isfinite(value) or (self.infinite is not None and value == math.inf) for value in values)


def _described(name: str, title: str, better: Literal["lower", "higher"], unit: str = "", **more: Any) -> Quantity:
    """A quantity whose rows are compared by differences, not by losses in percent of another row."""
    return Quantity(name, title, better, unit, relative=False, **more)


PERPLEXITY = Quantity("perplexity", "PPL", "lower", sampled=True)
AVERAGE = Quantity("average", "Avg.", "higher", "%", sampled=True)
ROUGE_L = Quantity("rouge_l", "ROUGE-L", "higher", "%", sampled=True)
KL = _described("kl", "mean", "lower", "nats", sampled=True, decides="perplexity")
LOG_ODDS = _described("log_odds", "mean", "higher", "nats", sampled=True, decides="average")
ANSWER_FLIPS = _described("answer_flips", "flips", "lower", "%", sampled=True)
OF_WINDOWS = (
    KL,
    _described("kl_median", "median window", "lower", "nats"),
    _described("flips", "flips", "lower", "%", sampled=True),
)
OF_CHOICES = (LOG_ODDS, _described("log_odds_median", "median item", "higher", "nats"), ANSWER_FLIPS)
"""Answers that differ from the unquantized network's; known where its run file exists."""
SNR_DB = _described("snr", "SNR", "higher", "dB", infinite="the logits equal the unquantized network's")
MAGNITUDES = (
    _described("peak_ratio", "max/median", "lower"),
    _described("largest", "max", "lower"),
    _described("median", "median", "lower"),
)
OUTLIERS = (
    _described("kurtosis", "largest kurtosis", "lower"),
    _described("mean_kurtosis", "mean kurtosis", "lower"),
    Quantity("activation_error", "activation error", "lower", "%"),
    Quantity("weight_error", "weight error", "lower", "%"),
)
RANGE_USE = (_described("range_use", "range use", "higher", "%"), _described("largest_range", "largest range", "lower"))
TENSOR_WORDS = {
    "inputs": {
        "mlp_output": "down_proj",
        "attention_input": "q/k/v_proj",
        "attention_output": "o_proj",
        "mlp_input": "gate/up_proj",
    },
    "attention": {"query": "Q", "key": "K", "value": "V"},
}
TOKEN_MAXIMA = {
    tensors: tuple(
        _described(f"{name}_{end}", f"{words} {ratio}", "lower")
        for name, words in names.items()
        for end, ratio in (("top", "top-1/median"), ("bottom", "median/min-1"))
    )
    for tensors, names in TENSOR_WORDS.items()
}
OUTLIER_TOKENS = (
    _described("number", "outlier tokens per window", "lower"),
    _described("elsewhere", "not at the first position", "lower", "%"),
    _described("meaningful", "neither there nor of low meaning", "lower", "%"),
    _described("repeated", "of others, where one was before", "lower", "%"),
)
PREFIX_TOKENS = (_described("tokens", "Number", "lower"), _described("content", "Content", "lower", text=True))
MODEL_SIZE = (
    _described("megabits", "size", "lower", "Mbit"),
    _described("parameters", "parameters", "lower", "million"),
)
TRAINING_LOSS = (
    _described("spikes", "spikes", "lower"),
    _described("highest_spike", "highest", "lower"),
    Quantity("final_loss", "loss at the end", "lower"),
    _described("remaining", "share of the first loss", "lower", "%"),
)
WEIGHT_KURTOSIS = (
    _described("correlation", "rank correlation", "higher", absent="the kurtosis of no weight changes"),
    _described("kurtosis_rise", "kurtosis rises by", "lower"),
    _described("raised", "outputs whose kurtosis rises", "lower", "%"),
    _described("error_rise", "error rises by", "lower", "%"),
    _described("platykurtic", "p_platy before", "higher", "%"),
    _described("normal", "p_platy of normal numbers", "higher", "%"),
)
"""Quantities for one weight or more; the next ones need several."""
WEIGHT_KURTOSIS_OF_SOME = tuple(
    _described(name, title, "lower", unit, absent="no weight has such a p_platy")
    for name, title, unit in (
        ("few_kurtosis_rise", "kurtosis rises by, p_platy far below 50 %", ""),
        ("half_kurtosis_rise", "kurtosis rises by, p_platy about 50 %", ""),
        ("half_error_rise", "error rises by, p_platy about 50 %", "%"),
    )
)
HADAMARD_KURTOSIS = (
    _described("largest_z", "largest distance", "lower"),
    _described("adjusted_p", "adjusted p", "higher", "%"),
    _described("least_rise", "least rise", "higher"),
    _described("resolved", "resolved to n", "higher"),
)
DESCRIPTIVE = (
    *(*MODEL_SIZE, *MAGNITUDES, *OUTLIERS[:2], *TOKEN_MAXIMA["inputs"], *TOKEN_MAXIMA["attention"], *OUTLIER_TOKENS),
    *(*PREFIX_TOKENS, *WEIGHT_KURTOSIS, *WEIGHT_KURTOSIS_OF_SOME, *HADAMARD_KURTOSIS),
)
"""Quantities that describe a distribution, of which neither lower nor higher is better."""

_BY_KIND: dict[str, tuple[Quantity, ...]] = {
    "perplexity": (PERPLEXITY,),
    "snr": (SNR_DB,),
    "magnitudes": MAGNITUDES,
    "outliers": OUTLIERS,
    "range_use": RANGE_USE,
    "outlier_tokens": OUTLIER_TOKENS,
    "prefix_tokens": PREFIX_TOKENS,
    "model_size": MODEL_SIZE,
    "training_loss": TRAINING_LOSS,
    "hadamard_kurtosis": HADAMARD_KURTOSIS,
}


def quantities(metric: Metric) -> tuple[Quantity, ...]:
    """The quantities of a metric, the main one first."""
    if isinstance(metric, MaximaByToken):
        return TOKEN_MAXIMA[metric.tensors]
    if isinstance(metric, WeightKurtosis):
        several = len(metric.weights) * len(metric.depths) > 1
        return (*WEIGHT_KURTOSIS, *(WEIGHT_KURTOSIS_OF_SOME if several else ()))
    if not isinstance(metric, ZeroShot):
        return _BY_KIND[metric.kind]
    tasks = [(name, TASKS[metric.suite][name]) for name in task_names(metric)]
    found = [
        Quantity(name, task.title, "higher", "%", task.chance, sampled=True)
        for name, task in tasks
        if task.chance is not None
    ]
    return (*((AVERAGE, *found) if found else ()), *((ROUGE_L,) if len(found) < len(tasks) else ()))


def called(metric: Metric, name: str | None) -> tuple[Quantity, ...]:
    """The quantities of a metric in a table: only the main one if the table names it `name`, else all. A table may have
    several metrics of a kind."""
    if name is None:
        return quantities(metric)
    title = TASKS["paper"][name].title if name in TASKS["paper"] else name
    main = quantities(metric)[0]
    return (replace(main, name=name, title=title, stored=main.name),)


def endpoints(metric: Metric, name: str | None = None) -> tuple[Quantity, ...]:
    """Finer quantities of a run, from the same forward passes.

    For perplexity the KL divergence from the full-precision model, for tasks with choices the log-odds of the right
    one, over all and by task; empty for other metrics. Older run files lack them.

    Args:
        name: the table's own name for the metric's main quantity (`called`), if any.
    """
    if metric.kind == "perplexity":
        found = OF_WINDOWS
    elif isinstance(metric, ZeroShot) and (tasks := [one for one in task_names(metric) if has_choices(metric, one)]):
        each = (replace(LOG_ODDS, name=log_odds_of(one), title=TASKS[metric.suite][one].title) for one in tasks)
        own = tuple(replace(one, decides=task) for one, task in zip(each, tasks, strict=True))
        found = (*OF_CHOICES, *(own if name is None else ()))
    else:
        return ()
    if name is None:
        return found
    main = quantities(metric)[0].name
    return tuple(
        replace(one, name=f"{name}_{one.name}", stored=one.name, decides=name if one.decides == main else None)
        for one in found
    )
