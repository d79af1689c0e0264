"""Statistics of a training's loss: spikes at its beginning and remaining loss at its end (RCP Figure 6)."""

import itertools
from collections.abc import Sequence
from typing import Any

from reproduction.metrics.settings import TrainingLoss


def training_loss(losses: Sequence[float], metric: TrainingLoss) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure a loss curve.

    Args:
        losses: the loss of every step, two at least.

    Returns:
        Metrics: `spikes`, the number of first steps whose loss is above `factor` times the least before;
        `highest_spike`, the largest of these ratios; `final_loss`, the mean over the last tenth of the steps;
        `remaining`, that in percent of the first step's. Arrays: `losses`, and `spikes`, the indices of those steps.
    """
    least = itertools.accumulate(losses, min)
    ratios = [loss / before for loss, before in zip(losses[1 : metric.first], least, strict=False)]
    spikes = [step for step, ratio in enumerate(ratios, 1) if ratio > metric.factor]
    last = losses[-max(1, len(losses) // 10) :]
    final = sum(last) / len(last)
    metrics = {
        "spikes": float(len(spikes)),
        "highest_spike": max(ratios),
        "final_loss": final,
        "remaining": 100 * final / losses[0],
    }
    return metrics, {"losses": list(losses), "spikes": spikes}
