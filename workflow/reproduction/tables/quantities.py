"""Quantities of metrics: names in result files, format in tables, and whether lower or higher is better.

A perplexity run yields one number; a run of tasks the average and the accuracies, or ROUGE-L; a run on activations or
weights a few statistics. The first quantity of a metric is its main one. Nothing here computes or imports torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

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


PERPLEXITY = Quantity("perplexity", "PPL", "lower", sampled=True)
AVERAGE = Quantity("average", "Avg.", "higher", "%", sampled=True)
ROUGE_L = Quantity("rouge_l", "ROUGE-L", "higher", "%", sampled=True)
KL = Quantity("kl", "mean", "lower", "nats", relative=False, sampled=True, decides="perplexity")
LOG_ODDS = Quantity("log_odds", "mean", "higher", "nats", relative=False, sampled=True, decides="average")
ANSWER_FLIPS = Quantity("answer_flips", "flips", "lower", "%", relative=False, sampled=True)
OF_WINDOWS = (
    KL,
    Quantity("kl_median", "median window", "lower", "nats", relative=False),
    Quantity("flips", "flips", "lower", "%", relative=False, sampled=True),
)
OF_CHOICES = (
    LOG_ODDS,
    Quantity("log_odds_median", "median item", "higher", "nats", relative=False),
    ANSWER_FLIPS,
)
"""Answers that differ from the unquantized network's; known where its run file exists."""
SNR_DB = Quantity("snr", "SNR", "higher", "dB", relative=False, infinite="the logits equal the unquantized network's")
MAGNITUDES = (
    Quantity("peak_ratio", "max/median", "lower", relative=False),
    Quantity("largest", "max", "lower", relative=False),
    Quantity("median", "median", "lower", relative=False),
)
OUTLIERS = (
    Quantity("kurtosis", "largest kurtosis", "lower", relative=False),
    Quantity("mean_kurtosis", "mean kurtosis", "lower", relative=False),
    Quantity("activation_error", "activation error", "lower", "%"),
    Quantity("weight_error", "weight error", "lower", "%"),
)
RANGE_USE = (
    Quantity("range_use", "range use", "higher", "%", relative=False),
    Quantity("largest_range", "largest range", "lower", relative=False),
)
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
        Quantity(f"{name}_{end}", f"{words} {ratio}", "lower", relative=False)
        for name, words in names.items()
        for end, ratio in (("top", "top-1/median"), ("bottom", "median/min-1"))
    )
    for tensors, names in TENSOR_WORDS.items()
}
OUTLIER_TOKENS = (
    Quantity("number", "outlier tokens per window", "lower", relative=False),
    Quantity("elsewhere", "not at the first position", "lower", "%", relative=False),
    Quantity("meaningful", "neither there nor of low meaning", "lower", "%", relative=False),
    Quantity("repeated", "of others, where one was before", "lower", "%", relative=False),
)
PREFIX_TOKENS = (
    Quantity("tokens", "Number", "lower", relative=False),
    Quantity("content", "Content", "lower", relative=False, text=True),
)
MODEL_SIZE = (
    Quantity("megabits", "size", "lower", "Mbit", relative=False),
    Quantity("parameters", "parameters", "lower", "million", relative=False),
)
TRAINING_LOSS = (
    Quantity("spikes", "spikes", "lower", relative=False),
    Quantity("highest_spike", "highest", "lower", relative=False),
    Quantity("final_loss", "loss at the end", "lower"),
    Quantity("remaining", "share of the first loss", "lower", "%", relative=False),
)
WEIGHT_KURTOSIS = (
    Quantity("correlation", "rank correlation", "higher", relative=False, absent="the kurtosis of no weight changes"),
    Quantity("kurtosis_rise", "kurtosis rises by", "lower", relative=False),
    Quantity("raised", "outputs whose kurtosis rises", "lower", "%", relative=False),
    Quantity("error_rise", "error rises by", "lower", "%", relative=False),
    Quantity("platykurtic", "p_platy before", "higher", "%", relative=False),
    Quantity("normal", "p_platy of normal numbers", "higher", "%", relative=False),
)
"""Quantities for one weight or more; the next ones need several."""
WEIGHT_KURTOSIS_OF_SOME = (
    Quantity(
        "few_kurtosis_rise",
        "kurtosis rises by, p_platy far below 50 %",
        "lower",
        relative=False,
        absent="no weight has such a p_platy",
    ),
    Quantity(
        "half_kurtosis_rise",
        "kurtosis rises by, p_platy about 50 %",
        "lower",
        relative=False,
        absent="no weight has such a p_platy",
    ),
    Quantity(
        "half_error_rise",
        "error rises by, p_platy about 50 %",
        "lower",
        "%",
        relative=False,
        absent="no weight has such a p_platy",
    ),
)
HADAMARD_KURTOSIS = (
    Quantity("largest_z", "largest distance", "lower", relative=False),
    Quantity("adjusted_p", "adjusted p", "higher", "%", relative=False),
    Quantity("least_rise", "least rise", "higher", relative=False),
    Quantity("resolved", "resolved to n", "higher", relative=False),
)
DESCRIPTIVE = (
    *MODEL_SIZE,
    *MAGNITUDES,
    *OUTLIERS[:2],
    *TOKEN_MAXIMA["inputs"],
    *TOKEN_MAXIMA["attention"],
    *OUTLIER_TOKENS,
    *PREFIX_TOKENS,
    *WEIGHT_KURTOSIS,
    *WEIGHT_KURTOSIS_OF_SOME,
    *HADAMARD_KURTOSIS,
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
