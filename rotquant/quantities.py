"""What a metric measures, quantity by quantity: its name in result files, how it is printed, and which way is better.

A perplexity run yields one number; a zero-shot run the average and one accuracy per task; a run that looks at
activations a few statistics. The first quantity of a metric is its main one. Nothing here computes or imports torch.
"""

from dataclasses import dataclass
from typing import Literal

from rotquant.schemes import Magnitudes, Metric, Perplexity
from rotquant.zeroshot.suites import TASKS, task_names


@dataclass(frozen=True)
class Quantity:
    """One number of a run.

    name: its key among the metrics of a result file, and in the published values.
    title: as a table's head prints it.
    better: whether lower or higher numbers are better.
    unit: printed where numbers are compared.
    chance: what guessing scores, in percent, for accuracies.
    """

    name: str
    title: str
    better: Literal["lower", "higher"]
    unit: str = ""
    chance: float | None = None

    def loss(self, value: float, reference: float) -> float:
        """How much worse `value` is than `reference`, in the quantity's own unit; negative for a gain."""
        return value - reference if self.better == "lower" else reference - value


PERPLEXITY = Quantity("perplexity", "PPL", "lower")
AVERAGE = Quantity("average", "Avg.", "higher", "%")
MAGNITUDES = (
    Quantity("peak_ratio", "max/median", "lower"),
    Quantity("largest", "max", "lower"),
    Quantity("median", "median", "lower"),
)


def quantities(metric: Metric) -> tuple[Quantity, ...]:
    """The quantities of a metric, the main one first."""
    if isinstance(metric, Perplexity):
        return (PERPLEXITY,)
    if isinstance(metric, Magnitudes):
        return MAGNITUDES
    tasks = [(name, TASKS[metric.suite][name]) for name in task_names(metric)]
    return (AVERAGE, *(Quantity(name, task.title, "higher", "%", task.chance) for name, task in tasks))
