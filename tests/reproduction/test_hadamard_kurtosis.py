"""RCP's Lemma 1 by samples: the samples are what they claim to be, and the rule finds what is wrong."""

import math
from functools import reduce

import numpy as np
import pytest
import scipy.stats
import torch
from pydantic import ValidationError

from reproduction.metrics import hadamard_kurtosis as sampled
from reproduction.metrics.hadamard_kurtosis import SHAPES, Shape, hadamard_kurtosis, jackknife, kurtosis_of, power_sums
from reproduction.metrics.settings import HadamardKurtosis
from reproduction.tables.quantities import HADAMARD_KURTOSIS

INDEPENDENT = tuple(name for name in SHAPES if name not in ("turned_two_point", "common_scale"))
SMALL = HadamardKurtosis(sizes=(2, 8, 64), samples=2**18, batches=32)


@pytest.mark.parametrize("name", SHAPES)
def test_a_distribution_has_the_kurtosis_that_it_says(name: str) -> None:
    x = SHAPES[name].draw((2**13, 16), torch.Generator().manual_seed(1))
    found, error = jackknife(torch.stack([power_sums(part) for part in x.split(2**8)]))
    assert found == pytest.approx(SHAPES[name].kurtosis(16), abs=4 * error)
    assert error < 0.1


@pytest.mark.parametrize("name", ["turned_two_point", "common_scale"])
def test_dependent_components_are_not_correlated(name: str) -> None:
    x = SHAPES[name].draw((2**14, 8), torch.Generator().manual_seed(2)).numpy()
    correlations = np.corrcoef(x.T) - np.eye(8)
    assert np.abs(correlations).max() < 5 / 2**7  # five standard errors of 2^14 vectors, over 28 pairs
    squares = np.corrcoef((x**2).T) - np.eye(8)
    assert np.abs(squares).max() > 5 / 2**7  # and yet depend on each other


def test_kurtosis_from_power_sums_is_scipys() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp() + 5
    expected = scipy.stats.kurtosis(x.numpy())
    assert kurtosis_of(power_sums(x)).item() == pytest.approx(expected, rel=1e-6)  # 5^4 over the fourth moment, in eps
    parts = torch.stack([power_sums(part) for part in x.split(100)])
    assert kurtosis_of(parts.sum(0)).item() == pytest.approx(expected, rel=1e-6)
    errors = [scipy.stats.kurtosis(np.delete(x.numpy().reshape(10, 100), i, 0).ravel()) for i in range(10)]
    found, error = jackknife(parts)
    assert found == pytest.approx(10 * expected - 9 * np.mean(errors), rel=1e-5)
    assert error == pytest.approx(math.sqrt(0.9 * np.sum((errors - np.mean(errors)) ** 2)), rel=1e-5)


def test_a_standard_error_is_the_deviation_over_other_samples() -> None:
    generator = torch.Generator().manual_seed(3)
    found = [
        jackknife(torch.stack([power_sums(torch.rand(256, generator=generator)) for _ in range(32)]))
        for _ in range(200)
    ]
    kurtoses, errors = np.array(found).T
    # The deviation of 200 numbers is known to 5 %, the mean of 200 errors from 32 batches better.
    assert errors.mean() == pytest.approx(kurtoses.std(ddof=1), rel=0.2)
    assert abs(kurtoses.mean() + 1.2) < 4 * kurtoses.std() / math.sqrt(200)


@pytest.mark.parametrize("size", [2, 16])
def test_two_points_have_the_kurtosis_of_their_exact_distribution(size: int) -> None:
    """The sum of n signs is binomial; all components of the transform have its distribution."""
    exact = reduce(np.convolve, [np.array([0.5, 0, 0.5])] * size)
    values = np.arange(-size, size + 1) / math.sqrt(size)
    kurtosis = (exact @ values**4) / (exact @ values**2) ** 2 - 3
    assert kurtosis == pytest.approx(-2 / size)
    metric = SMALL.model_copy(update={"distributions": ("two_point",), "sizes": (size,)})
    (point,) = hadamard_kurtosis(metric, 5)[1]["series"]["two_point"]
    for kind in ("first", "others"):
        found, error = point[kind]
        assert found == pytest.approx(kurtosis, abs=4.5 * error)


def test_the_lemma_holds_of_independent_components() -> None:
    metric = SMALL.model_copy(update={"distributions": INDEPENDENT})
    metrics, arrays = hadamard_kurtosis(metric)
    assert metrics["adjusted_p"] >= 1
    assert set(metrics) == {quantity.name for quantity in HADAMARD_KURTOSIS}
    assert [point["size"] for point in arrays["series"]["beta"]] == [2, 8, 64]
    assert hadamard_kurtosis(metric)[1] == arrays  # equal seeds draw equal samples
    assert hadamard_kurtosis(metric, 1)[1] != arrays


def test_kurtosis_rises_from_below_and_falls_from_above() -> None:
    rises = {
        name: hadamard_kurtosis(SMALL.model_copy(update={"distributions": (name,)}))[0]["least_rise"]
        for name in INDEPENDENT
    }
    assert rises.pop("laplace") < -4
    assert min(rises.values()) > 4


@pytest.mark.parametrize("name", ["turned_two_point", "common_scale"])
def test_components_that_depend_on_each_other_need_not_follow(name: str) -> None:
    metrics, arrays = hadamard_kurtosis(SMALL.model_copy(update={"distributions": (name,)}))
    assert metrics["adjusted_p"] < 1e-6
    (*_, last) = arrays["series"][name]
    if name == "turned_two_point":
        assert last["others"][0] == pytest.approx(-2, abs=0.01)
        assert last["kurtosis_x"] == -2 / 64  # so that it falls
        assert metrics["least_rise"] < -4
    else:
        assert last["others"][0] > 0.9


@pytest.mark.parametrize("power", [0.5, 1.5])
def test_another_power_of_n_would_be_found(monkeypatch: pytest.MonkeyPatch, power: float) -> None:
    """Kurt(Y) = Kurt(X) / sqrt(n), or / n^1.5, is refused by the same samples."""
    true = SHAPES["uniform"]
    other = Shape(true.draw, lambda n: -1.2 * n / n**power)
    monkeypatch.setitem(sampled.SHAPES, "uniform", other)
    assert hadamard_kurtosis(SMALL)[0]["adjusted_p"] < 0.01


def test_a_test_among_many_is_judged_among_many() -> None:
    one = SMALL.model_copy(update={"sizes": (2,)})
    metrics, _ = hadamard_kurtosis(one)
    expected = 4 * scipy.stats.t.sf(metrics["largest_z"], 31)  # two tests, two sides
    assert metrics["adjusted_p"] == pytest.approx(100 * min(1, expected))


def test_how_far_the_kurtosis_is_told_apart_from_none() -> None:
    points = [{"size": n, "others": (-2 / n, 0.05)} for n in (2, 4, 8, 16)]
    assert sampled._resolved(points) == 8  # 0.25 is five standard errors, 0.125 two and a half
    assert sampled._resolved(points[3:]) == 1


def test_lengths_and_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValidationError, match="a length of 12 is no power of two"):
        HadamardKurtosis(sizes=(12,))
    with pytest.raises(ValidationError, match="hold too few vectors of 1024"):
        HadamardKurtosis(sizes=(1024,), samples=2**14)
