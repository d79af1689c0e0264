"""What a run's numbers are means of: windows of a text, items of tasks. Stored with a run, so that its noise is known.

Perplexity has each window's negative log-likelihood, a task each item's score: text of 0 and 1 for right and wrong, and
numbers for ROUGE-L. A quantity of a run is always read back as `observations`, whatever it is computed from. Other
metrics store none, and neither do networks whose outputs are not finite.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import FiniteFloat, StringConstraints, TypeAdapter

from rotquant.metrics.zeroshot.suites import TASKS, task_names
from rotquant.recipes.schemes import Metric
from rotquant.study.quantities import AVERAGE, PERPLEXITY, ROUGE_L

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Answers = Annotated[str, StringConstraints(pattern="^[01]+$")]
Samples = dict[str, Answers | list[FiniteFloat]]
"""Each window's negative log-likelihood under "perplexity", each item's score under its task."""

_SAMPLES = TypeAdapter(Samples)
#: Means are summed in another order than the run did.
_TOLERANCE = 1e-6


def pack(found: Mapping[str, Sequence[float]]) -> Samples:
    """Samples as a run file stores them; those with a number that is not finite are left out."""
    kept = {name: values for name, values in found.items() if values and all(map(math.isfinite, values))}
    return {
        name: "".join(f"{value:.0f}" for value in values) if set(values) <= {0.0, 1.0} else list(values)
        for name, values in kept.items()
    }


def check_samples(metric: Metric, metrics: Mapping[str, float], samples: object) -> Samples:
    """Samples as they were read, of a run with these numbers.

    Raises:
        ValidationError: they are no samples.
        ValueError: they are of another metric, or their mean is not the run's number.
    """
    found = _SAMPLES.validate_python(samples)
    for name, values in found.items():
        if name not in _names(metric):
            raise ValueError(f"samples of {name!r}, which is not measured")
        mean = values.count("1") / len(values) if isinstance(values, str) else statistics.fmean(values)
        told = math.exp(mean) if metric.kind == "perplexity" else 100 * mean
        if not math.isclose(told, metrics[name], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            raise ValueError(f"the samples of {name} give {told:g} and not {metrics[name]:g}")
    return found


def observations(
    metric: Metric, quantity: str, metrics: Mapping[str, float], samples: Samples
) -> "NDArray[np.float64] | None":
    """A run's quantity, window by window or item by item: float64 [n]; None where the run stores no samples of it.

    Their mean is the quantity, and their deviation over sqrt(n) its standard error. So a perplexity p of windows with
    negative log-likelihoods x is p (1 + x - mean(x)), the delta method for exp (Miller 2024, "Adding Error Bars to
    Evals", for other means), and in the average of T tasks the deviations of one task's n_t items from its mean are
    stretched by n / (T n_t), since a task counts as one whatever its items.
    """
    import numpy as np

    names = _members(metric, quantity)
    if not names or not set(names) <= set(samples):
        return None
    found = [_numbers(samples[name]) for name in names]
    if quantity == PERPLEXITY.name:
        return metrics[quantity] * (1 + found[0] - found[0].mean())
    count = sum(map(len, found))
    stretched = (count / (len(found) * len(one)) * 100 * (one - one.mean()) for one in found)
    return metrics[quantity] + np.concatenate([*stretched])


def _numbers(values: "str | list[float]") -> "NDArray[np.float64]":
    import numpy as np

    if isinstance(values, str):
        return (np.frombuffer(values.encode(), np.uint8) - ord("0")).astype(np.float64)
    return np.asarray(values, np.float64)


def _names(metric: Metric) -> tuple[str, ...]:
    """What a metric's samples may be of."""
    return task_names(metric) if metric.kind == "zero_shot" else (PERPLEXITY.name,) * (metric.kind == "perplexity")


def _members(metric: Metric, quantity: str) -> tuple[str, ...]:
    """The samples that a quantity is the mean of."""
    names = _names(metric)
    if metric.kind != "zero_shot" or quantity not in (AVERAGE.name, ROUGE_L.name):
        return (quantity,) * (quantity in names)
    accuracies = quantity == AVERAGE.name
    return tuple(name for name in names if (TASKS[metric.suite][name].chance is not None) is accuracies)
