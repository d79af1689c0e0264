"""The illustration of SpinQuant's Figure 6 has the paper's numbers, and a learned rotation the best there can be."""

import math

import pytest
import torch

from reproduction.metrics.range_use import POINTS, range_use, rotation_of
from reproduction.metrics.settings import RangeUse

SOLID = (2.0, 0.5, 0.5)


def test_the_papers_ranges() -> None:
    """From [2, 0.5, 0.5] to [1, 1, 1.414], Section 4.4."""
    _, before = range_use(RangeUse(magnitudes=SOLID))
    _, after = range_use(RangeUse(magnitudes=SOLID, rotation="turns"))
    assert before["ranges"] == [2.0, 0.5, 0.5]
    assert after["ranges"] == pytest.approx([1.0, 1.0, math.sqrt(2)])


def test_in_two_dimensions_45_degrees_are_best() -> None:
    before, _ = range_use(RangeUse())
    turned, arrays = range_use(RangeUse(rotation="turns"))
    learned, _ = range_use(RangeUse(rotation="learned"))
    assert before == {"range_use": 62.5, "largest_range": 2.0}
    assert arrays["ranges"] == pytest.approx([math.sqrt(2)] * 2)
    assert turned["range_use"] == pytest.approx(100.0)
    assert learned == pytest.approx(turned)


def test_a_learned_rotation_reaches_the_least_largest_range() -> None:
    """The longest end keeps its length 2, so three ranges that cover it are at least 2 / sqrt(3) where equal."""
    metrics, arrays = range_use(RangeUse(magnitudes=SOLID, rotation="learned"))
    # 200 steps leave the ranges within a thousandth of equal.
    assert metrics["largest_range"] == pytest.approx(2 / math.sqrt(3), rel=1e-3)
    assert arrays["ranges"] == pytest.approx([2 / math.sqrt(3)] * 3, rel=1e-3)
    assert metrics["range_use"] == pytest.approx(100.0, abs=0.1)


@pytest.mark.parametrize("kind", ["none", "turns", "learned"])
@pytest.mark.parametrize("magnitudes", [(2.0, 0.5), SOLID])
def test_points_are_rotated_and_stay_within_the_ranges(kind: str, magnitudes: tuple[float, ...]) -> None:
    metric = RangeUse(magnitudes=magnitudes, rotation=kind)
    rotation = rotation_of(metric, torch.diag(torch.tensor(magnitudes, dtype=torch.float64)))
    size = len(magnitudes)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(size, dtype=torch.float64))  # float64's tolerance
    _, arrays = range_use(metric)
    points = torch.tensor(arrays["points"], dtype=torch.float64)
    assert points.shape == (2 * size + POINTS, size)
    assert (points.abs() <= torch.tensor(arrays["ranges"], dtype=torch.float64) + 1e-12).all()
    original = points @ rotation.T
    assert ((original.abs() / torch.tensor(magnitudes, dtype=torch.float64)).sum(1) <= 1 + 1e-12).all()
    assert range_use(metric)[1] == arrays
