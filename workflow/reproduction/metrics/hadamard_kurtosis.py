"""The excess kurtosis of a vector's components after a Hadamard transform, by samples (RCP Lemma 1, proof in A.2).

For independent components of one distribution, Kurt(Y_i) = Kurt(X) / n for all i, which is above Kurt(X) where this is
negative. Y_1 sums all components, whose means add up; every other Y_i adds one half and subtracts the other, so these
have one distribution and are pooled. Nothing is assumed from the lemma: means, variances and fourth moments are sample
moments, and the standard errors come from independent batches.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from scipy.special import stdtr
from torch import Generator, Tensor

from reproduction.metrics.settings import HadamardKurtosis
from rotquant.foundation.progress import track
from rotquant.tensors.hadamard import hadamard_transform

#: Truncation point of the normal distribution on both sides, in standard deviations.
CUT = 2.0
#: The factors from which `common_scale` draws one for all components of a vector.
SCALES = (0.5, 1.0)
#: Number of standard errors from which a kurtosis counts as different from a normal distribution's.
RESOLVED = 4.0


class Shape(NamedTuple):
    """A distribution of vectors of n components: how they are drawn, and the excess kurtosis of each component.

    draw: ([vectors, n], generator) to components, float64.
    """

    draw: Callable[[tuple[int, int], Generator], Tensor]
    kurtosis: Callable[[int], float]


def _uniform(shape: tuple[int, int], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _two_point(shape: tuple[int, int], generator: Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator).double().mul_(2).sub_(1)


def _beta(shape: tuple[int, int], generator: Generator) -> Tensor:
    """Beta(2, 2): the median of three uniform numbers."""
    return torch.rand((3, *shape), generator=generator, dtype=torch.float64).median(0).values


def _truncated_normal(shape: tuple[int, int], generator: Generator) -> Tensor:
    inside = math.erf(CUT / math.sqrt(2))
    return _uniform(shape, generator).mul_(2 * inside).sub_(inside).erfinv_().mul_(math.sqrt(2))


def _laplace(shape: tuple[int, int], generator: Generator) -> Tensor:
    """The difference of two exponential numbers."""
    ends = torch.rand((2, *shape), generator=generator, dtype=torch.float64).neg_().log1p_()
    return ends[0] - ends[1]


def _turned_two_point(shape: tuple[int, int], generator: Generator) -> Tensor:
    """A Hadamard transform of two-point numbers: uncorrelated, identically distributed, not independent."""
    return hadamard_transform(_two_point(shape, generator))


def _common_scale(shape: tuple[int, int], generator: Generator) -> Tensor:
    scales = torch.tensor(SCALES, dtype=torch.float64)[torch.randint(2, (shape[0], 1), generator=generator)]
    return scales * _uniform(shape, generator).mul_(2).sub_(1)


def _kurtosis_of_truncated_normal() -> float:
    inside = math.erf(CUT / math.sqrt(2))
    edge = 2 * CUT * math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi) / inside
    return (3 - edge * (CUT**2 + 3)) / (1 - edge) ** 2 - 3


def _kurtosis_of_common_scale() -> float:
    """E S^4 / (E S^2)^2 times that of uniform numbers, 1.8."""
    fourth, second = (sum(scale**power for scale in SCALES) / len(SCALES) for power in (4, 2))
    return 1.8 * fourth / second**2 - 3


SHAPES: dict[str, Shape] = {
    "uniform": Shape(_uniform, lambda _: -1.2),
    "two_point": Shape(_two_point, lambda _: -2.0),
    "beta": Shape(_beta, lambda _: -6 / 7),
    "truncated_normal": Shape(_truncated_normal, lambda _: _kurtosis_of_truncated_normal()),
    # the square of a uniform number: mean 1/3, skewness 0.64, and by chance the kurtosis of Beta(2, 2)
    "skewed": Shape(lambda shape, generator: _uniform(shape, generator).square_(), lambda _: -6 / 7),
    "laplace": Shape(_laplace, lambda _: 3.0),
    "turned_two_point": Shape(_turned_two_point, lambda n: -2 / n),
    "common_scale": Shape(_common_scale, lambda _: _kurtosis_of_common_scale()),
}
"""Every distribution of `HadamardKurtosis`."""


def hadamard_kurtosis(metric: HadamardKurtosis, seed: int = 0) -> tuple[dict[str, float], dict[str, Any]]:
    """Excess kurtosis of Y = H X against Kurt(X) / n, for every distribution and length of the metric.

    Args:
        seed: seeds all draws; each distribution and length draws separately.

    Returns:
        Metrics, over all distributions, lengths and both kinds of component: `largest_z`, the largest distance from
        Kurt(X) / n in standard errors; `adjusted_p`, its p-value in percent by Student's t, with Bonferroni's
        correction over all tests; `least_rise`, the least Kurt(Y) - Kurt(X) in standard errors; `resolved`, the largest
        length up to which all kurtoses differ from 0 by `RESOLVED` standard errors, 1 for none. Arrays: `series` by
        distribution, each a list over the lengths of `size`, `kurtosis_x`, and for Y_1, `first`, and the other
        components, `others`, [kurtosis, standard error].
    """
    series = {
        name: [_measured(metric, name, size, seed) for size in metric.sizes]
        for name in track(metric.distributions, "sampling", "distribution")
    }
    found = [(point, point[kind]) for points in series.values() for point in points for kind in ("first", "others")]
    z = [abs(_in_errors(kurtosis - point["kurtosis_x"] / point["size"], error)) for point, (kurtosis, error) in found]
    rises = [_in_errors(kurtosis - point["kurtosis_x"], error) for point, (kurtosis, error) in found]
    metrics = {
        "largest_z": max(z),
        "adjusted_p": 100 * min(1.0, len(z) * 2 * float(stdtr(metric.batches - 1, -max(z)))),
        "least_rise": min(rises),
        "resolved": float(min(_resolved(points) for points in series.values())),
    }
    return metrics, {"series": series}


def _measured(metric: HadamardKurtosis, name: str, size: int, seed: int) -> dict[str, Any]:
    """Measure one distribution and length."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(1_000_003 * seed + 10_007 * list(SHAPES).index(name) + size)
    vectors = metric.samples // (metric.batches * size)
    sums: dict[str, list[Tensor]] = {"first": [], "others": []}
    for _ in range(metric.batches):
        turned = hadamard_transform(shape.draw((vectors, size), generator))
        sums["first"].append(power_sums(turned[:, 0]))
        sums["others"].append(power_sums(turned[:, 1:]))
    found = {kind: jackknife(torch.stack(batches)) for kind, batches in sums.items()}
    return {"size": size, "kurtosis_x": shape.kurtosis(size), **found}


def _in_errors(distance: float, error: float) -> float:
    """A distance in standard errors; 0 or infinite for samples without variance."""
    return distance / error if error else math.copysign(math.inf, distance) if distance else 0.0


def _resolved(points: list[dict[str, Any]]) -> int:
    """The largest length up to which the kurtosis of all components but the first differs from a normal one's."""
    longest = 1
    for point in points:
        kurtosis, error = point["others"]
        if abs(kurtosis) < RESOLVED * error:
            break
        longest = point["size"]
    return longest


def power_sums(x: Tensor) -> Tensor:
    """The count of numbers and the sums of their first four powers: [5], float64."""
    flat = x.double().flatten()
    square = flat.square()
    return torch.stack(
        [flat.new_tensor(float(len(flat))), flat.sum(), square.sum(), (square * flat).sum(), square.square().sum()]
    )


def kurtosis_of(sums: Tensor) -> Tensor:
    """Excess kurtosis from power sums [..., 5]."""
    raw = sums[..., 1:] / sums[..., :1]
    mean, second, third, fourth = raw.unbind(-1)
    variance = second - mean.square()
    central = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean.square().square()
    return central / variance.square() - 3


def jackknife(sums: Tensor) -> tuple[float, float]:
    """Excess kurtosis and its standard error from the power sums [batches, 5] of independent batches.

    Leaves out one batch at a time (Quenouille 1956, Tukey 1958), which also removes the first-order bias of a ratio of
    moments.
    """
    total, count = sums.sum(0), len(sums)
    left_out = kurtosis_of(total - sums)
    kurtosis = count * kurtosis_of(total) - (count - 1) * left_out.mean()
    error = ((count - 1) / count * (left_out - left_out.mean()).square().sum()).sqrt()
    return kurtosis.item(), error.item()
