"""Samples of a run: the windows of a text or items of tasks whose means its numbers are, stored to know their noise.

Perplexity stores each window's negative log-likelihood, KL divergence and share of flips. A task stores each item's
score: text of 0 and 1 for wrong and right, and numbers for ROUGE-L. A task with choices also stores the log-odds of the
right one, and the choice, a digit each. A quantity of a run is always read back as `observations`. Other metrics, and
networks whose outputs are not finite, store none.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import FiniteFloat, StringConstraints, TypeAdapter

from reproduction.metrics.settings import Metric
from reproduction.tables.quantities import AVERAGE, KL, LOG_ODDS, PERPLEXITY, ROUGE_L
from reproduction.tasks.suites import TASKS, choices_of, has_choices, log_odds_of, task_names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Answers = Annotated[str, StringConstraints(pattern="^[0-9]+$")]
Samples = dict[str, Answers | list[FiniteFloat]]
"""Windows' values by quantity, such as negative log-likelihoods under "perplexity"; items' scores by task."""

_SAMPLES = TypeAdapter(Samples)
#: Tolerance of means, whose summation order differs from the run's.
_TOLERANCE = 1e-6


def pack(found: Mapping[str, Sequence[float]]) -> Samples:
    """Format samples for a run file; those with a number that is not finite are left out."""
    kept = {name: values for name, values in found.items() if values and all(map(math.isfinite, values))}
    digits = {float(digit) for digit in range(10)}
    return {
        name: "".join(f"{value:.0f}" for value in values) if set(values) <= digits else list(values)
        for name, values in kept.items()
    }


def check_samples(metric: Metric, metrics: Mapping[str, float], samples: object) -> Samples:
    """Validate the samples that were read for a run with these numbers.

    Raises:
        ValidationError: they are no samples.
        ValueError: they belong to another metric, or their mean is not the run's number.
    """
    found = _SAMPLES.validate_python(samples)
    for name, values in found.items():
        if name not in _names(metric):
            raise ValueError(f"samples of {name!r}, which is not measured")
        if name in _choices(metric):
            continue
        if isinstance(values, str) and not set(values) <= {"0", "1"}:
            raise ValueError(f"the answers of {name} are 0 and 1")
        mean = float(_numbers(values).mean())
        told = _scale(name) * mean
        if name == PERPLEXITY.name:
            told = math.inf if mean >= 700 else math.exp(mean)  # as `rotquant.metrics.perplexity` has it
        if not math.isclose(told, metrics[name], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            raise ValueError(f"the samples of {name} give {told:g} and not {metrics[name]:g}")
    return found


def observations(
    metric: Metric, quantity: str, metrics: Mapping[str, float], samples: Samples
) -> "NDArray[np.float64] | None":
    """A run's quantity by window or item: float64 [n]; None where the run stores no samples of it.

    Their mean is the quantity, and their deviation over sqrt(n) its standard error. So a perplexity p of windows with
    negative log-likelihoods x is p (1 + x - mean(x)), the delta method for exp (Miller 2024, "Adding Error Bars to
    Evals", for other means). In the average of T tasks, the deviations of one task's n_t items from its mean are scaled
    by n / (T n_t), since all tasks have equal weight.
    """
    import numpy as np

    names = _members(metric, quantity)
    if not names or not set(names) <= set(samples):
        return None
    found = [_numbers(samples[name]) for name in names]
    if quantity == PERPLEXITY.name:
        return metrics[quantity] * (1 + found[0] - found[0].mean())
    count, scale = sum(map(len, found)), _scale(names[0])
    stretched = (count / (len(found) * len(one)) * scale * (one - one.mean()) for one in found)
    return metrics[quantity] + np.concatenate([*stretched])


def _numbers(values: "str | list[float]") -> "NDArray[np.float64]":
    import numpy as np

    if isinstance(values, str):
        return (np.frombuffer(values.encode(), np.uint8) - ord("0")).astype(np.float64)
    return np.asarray(values, np.float64)


def flipped(metric: Metric, samples: Samples, others: Samples) -> float | None:
    """The share of items for which two runs chose differently, in percent, the mean over tasks.

    None if one of them lacks the choices of a task, or has another number of items.
    """
    shares = []
    for name in _choices(metric):
        mine, their = samples.get(name), others.get(name)
        if not isinstance(mine, str) or not isinstance(their, str) or len(mine) != len(their):
            return None
        shares.append(100 * float((_numbers(mine) != _numbers(their)).mean()))
    return statistics.fmean(shares) if shares else None


def _names(metric: Metric) -> tuple[str, ...]:
    """The possible names of a metric's samples."""
    if metric.kind == "perplexity":
        return (PERPLEXITY.name, KL.name, "flips")
    return (*task_names(metric), *_odds(metric), *_choices(metric)) if metric.kind == "zero_shot" else ()


def _members(metric: Metric, quantity: str) -> tuple[str, ...]:
    """The names of the samples whose mean a quantity is."""
    names = _names(metric)
    if metric.kind == "zero_shot" and quantity == LOG_ODDS.name:
        return _odds(metric)
    if metric.kind != "zero_shot" or quantity not in (AVERAGE.name, ROUGE_L.name):
        return (quantity,) * (quantity in names)
    accuracies = quantity == AVERAGE.name
    return tuple(name for name in task_names(metric) if (TASKS[metric.suite][name].chance is not None) is accuracies)


def _odds(metric: Metric) -> tuple[str, ...]:
    """The names of log-odds samples of tasks with choices."""
    named = _with_choices(metric)  # pyright: ignore[reportArgumentType]  # frozen, so hashable
    return tuple(log_odds_of(name) for name in named)


def _choices(metric: Metric) -> tuple[str, ...]:
    """The names of samples of choices, which have no mean."""
    named = _with_choices(metric)  # pyright: ignore[reportArgumentType]  # frozen, so hashable
    return tuple(choices_of(name) for name in named)


@functools.cache
def _with_choices(metric: Metric) -> tuple[str, ...]:
    if metric.kind != "zero_shot":
        return ()
    return tuple(name for name in task_names(metric) if has_choices(metric, name))


def _scale(name: str) -> float:
    """The factor of the mean of samples: 100 for shares, which are printed in percent, 1 for nats."""
    return 1.0 if name == KL.name or name.endswith(log_odds_of("")) else 100.0
