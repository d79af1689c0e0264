"""Example of a rotation that evens out the ranges of two or three features (SpinQuant Sec. 4.4, Figure 6).

The points fill the polytope between the ends +-m_j of the axes, which gives the paper's numbers: rotated by 45 degrees
from the first axis towards each other one, the ranges [2, 0.5, 0.5] become [1, 1, 1.414]. A quantizer with one scale
for all features resolves each feature by its share of the largest range.
"""

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.metrics.settings import RangeUse
from rotquant.tensors.stiefel import CayleySGD

#: Points that a figure shows in addition to the ends of the axes.
POINTS = 400
_STEPS, _RATE = 200, 0.1


def range_use(metric: RangeUse) -> tuple[dict[str, float], dict[str, Any]]:
    """Ranges of the features after the metric's rotation.

    Returns:
        Metrics: `range_use`, the features' mean share of the largest range in percent, and `largest_range`. Arrays:
        `points` [points, features], the first ones being the rotated ends of the axes, and `ranges` [features].
    """
    ends = torch.diag(torch.tensor(metric.magnitudes, dtype=torch.float64))
    rotation = rotation_of(metric, ends)
    ranges = (ends @ rotation).abs().amax(0)
    points = torch.cat([ends, -ends, _inside(ends)]) @ rotation
    metrics = {"range_use": 100 * (ranges.mean() / ranges.max()).item(), "largest_range": ranges.max().item()}
    return metrics, {"points": points.tolist(), "ranges": ranges.tolist()}


def rotation_of(metric: RangeUse, ends: Tensor) -> Tensor:
    """The metric's rotation R [n, n] of points as rows, x -> x R, where `ends` [n, n] are the ends of the axes."""
    size = len(ends)
    if metric.rotation == "none":
        return torch.eye(size, dtype=ends.dtype)
    turns = reduce(torch.matmul, [_turn(size, axis) for axis in reversed(range(1, size))])
    return turns if metric.rotation == "turns" else _learned(ends, turns)


def _turn(size: int, axis: int) -> Tensor:
    """The rotation by 45 degrees that takes the first axis towards another one."""
    turn = torch.eye(size, dtype=torch.float64)
    turn[0, 0] = turn[0, axis] = turn[axis, axis] = math.sqrt(0.5)
    turn[axis, 0] = -math.sqrt(0.5)
    return turn


def _learned(ends: Tensor, start: Tensor) -> Tensor:
    """The rotation that makes the ranges even: Cayley SGD on the sum of their fourth powers.

    A rotation preserves the sum of squares of the longest end, so fourth powers have the least sum where all are equal.
    """
    rotation = nn.Parameter(start.clone())
    optimizer = CayleySGD([rotation], lr=_RATE)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - step / _STEPS)
        optimizer.zero_grad()
        (ends @ rotation).abs().amax(0).pow(4).sum().backward()
        optimizer.step()
    return rotation.detach()


def _inside(ends: Tensor) -> Tensor:
    """Points drawn uniformly between the ends of the axes with a fixed seed: [POINTS, n]."""
    size, generator = len(ends), torch.Generator().manual_seed(0)
    shares = -torch.rand(POINTS, size + 1, generator=generator, dtype=ends.dtype).log()
    shares = shares[:, :size] / shares.sum(1, keepdim=True)
    signs = torch.randint(2, (POINTS, size), generator=generator) * 2 - 1
    return (shares * signs) @ ends
