"""What rotation does to groups of weights, number by number: kurtosis, error, histogram and the summary of several."""

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from reproduction.metrics.distortion import excess_kurtosis, kurtosis
from reproduction.metrics.magnitudes import read_inputs
from reproduction.metrics.settings import WeightKurtosis
from reproduction.metrics.weight_kurtosis import (
    DEVIATIONS,
    group_size,
    histogram,
    output_error,
    rounded,
    share_of_normal,
    spearman,
    spearman_interval,
    weight_kurtosis,
)
from reproduction.tables.configuration import Slot
from reproduction.tables.quantities import quantities
from reproduction.tables.resolution import resolve_metric
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import decoder_layers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import RotationScheme
from tests.helpers.models import AWKWARD, tiny_model, tiny_tokens

METRIC = WeightKurtosis(weights=("q_proj", "o_proj", "down_proj"), depths=(0.0, 0.99), groups=4, bins=6)


def rotated(model: torch.nn.Module, scheme: RotationScheme) -> torch.nn.Module:
    turned = copy.deepcopy(model)
    rotate(turned, scheme, seed=3)
    wrap(turned, RuntimeQuantization(transforms=scheme.transforms))
    return turned


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_error(weight: torch.Tensor, x: torch.Tensor, size: int, bits: int) -> list[float]:
    """Each pair of shares tried for each group by Eq. 1 in float64, and the mean |error| of each output, one by one."""
    outputs = []
    for row in weight.double():
        total = torch.zeros(len(x), dtype=torch.float64)
        for start in range(0, len(row), size):
            part, inputs = row[start : start + size], x[:, start : start + size].double()
            candidates = []
            for high, low in itertools.product([1 - step / 20 for step in range(10)], repeat=2):
                ends = low * part.min(), high * part.max()
                scale = (ends[1] - ends[0]) / (2**bits - 1)
                zero = -torch.round(ends[0] / scale)
                codes = (torch.round(part / scale) + zero).clamp(0, 2**bits - 1)
                error = inputs @ ((codes - zero) * scale - part)
                candidates.append((error.square().sum().item(), error))
            total += min(candidates, key=lambda found: found[0])[1]
        outputs.append(total.abs().mean().item())
    return outputs


@pytest.mark.parametrize("size", [3, 8, 128])
def test_the_kurtosis_of_groups_is_scipys(size: int) -> None:
    x = drawn(5, 4, size, seed=size).exp()
    expected = scipy.stats.kurtosis(x.double().numpy(), axis=-1)
    np.testing.assert_allclose(excess_kurtosis(x).numpy(), expected, rtol=1e-10)  # two orders of float64 sums
    assert excess_kurtosis(x[0, 0]).item() + 3 == pytest.approx(kurtosis(x[0, 0]), rel=1e-12)


def test_few_numbers_have_little_kurtosis_and_equal_ones_none() -> None:
    x = drawn(1000, 4, seed=0)
    assert (excess_kurtosis(x) < -2 / 3 + 1e-9).all()  # 4 - 5 + 1 / 3, whatever the numbers are
    assert excess_kurtosis(torch.tensor([0.0, 0.0, 0.0, 1.0])).item() == pytest.approx(-2 / 3)
    assert excess_kurtosis(torch.ones(3, 8)).isnan().all()
    mean = excess_kurtosis(drawn(100_000, 16, seed=1)).mean().item()
    assert mean == pytest.approx(-6 / 17, abs=0.01)  # four standard errors of 100,000 groups whose deviation is 0.7


def test_the_share_of_normal_groups_is_more_than_half() -> None:
    assert share_of_normal(4) == 1.0
    assert 0.5 < share_of_normal(512) < share_of_normal(128) < share_of_normal(16) < 1
    assert share_of_normal(128) == share_of_normal(128)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_error_is_that_of_a_slow_loop(bits: int) -> None:
    weight, x = drawn(6, 24, seed=0), drawn(40, 24, seed=1)
    metric = METRIC.model_copy(update={"bits": bits})
    kept, quantized = rounded(weight, x, 8, metric)
    found = output_error(weight, quantized, x)
    # Clips are found alike, for no two pairs are nearly as good; what is left is float32 products against float64 ones.
    np.testing.assert_allclose(found.numpy(), slow_error(weight, x, 8, bits), rtol=1e-4)
    assert (kept.abs() <= weight.abs() + 1e-6).all()
    assert not torch.equal(kept, weight)
    unclipped, coarse = rounded(weight, x, 8, metric, clipped=False)
    assert torch.equal(unclipped, weight)
    assert (x @ (coarse - weight).T).square().mean() > (x @ (quantized - weight).T).square().mean()


def test_an_error_from_the_clipped_weight_takes_no_notice_of_clipping() -> None:
    weight, x = drawn(6, 64, seed=2), drawn(50, 64, seed=3)
    printed = METRIC.model_copy(update={"target": "clipped"})
    kept, quantized = rounded(weight, x, 16, printed)
    assert output_error(kept, quantized, x).mean() < output_error(weight, quantized, x).mean()
    assert kept.abs().sum() < rounded(weight, x, 16, METRIC)[0].abs().sum()  # nothing speaks against clipping more


def test_each_number_of_a_panel_is_one_of_both_networks() -> None:
    model, samples = tiny_model(), tiny_tokens(batch=2)
    scheme = RotationScheme()
    turned = rotated(model, scheme)
    metrics, arrays = weight_kurtosis(turned, model, samples, METRIC)
    assert [(panel["layer"], panel["weight"]) for panel in arrays["panels"]] == [
        (layer, name) for layer in (0, 1) for name in METRIC.weights
    ]
    panel = arrays["panels"][-1]
    rises = []
    for network in (model, turned):
        weight = decoder_layers(network)[1].get_submodule("mlp.down_proj").weight.detach()
        windows = [read_inputs(network, sample[None], [(1, "mlp_output")], lambda x: x) for sample in samples]
        x = torch.cat([window[1, "mlp_output"] for window in windows])
        groups = scipy.stats.kurtosis(weight.double().unflatten(1, (4, -1)).numpy(), axis=-1)
        rises.append((groups.mean(1), np.array(slow_error(weight, x, 24, 2)), 100 * (groups < 0).mean()))
    kurtosis_rise, error_rise = (after - before for before, after in zip(rises[0][:2], rises[1][:2], strict=True))
    assert panel["outputs"] == 64
    assert (panel["platykurtic"], panel["platykurtic_after"]) == pytest.approx((rises[0][2], rises[1][2]))
    # float32 networks: a clip that two pairs are nearly equally good for may be the other one
    assert panel["kurtosis_rise"] == pytest.approx(kurtosis_rise.mean(), rel=1e-6)
    assert panel["error_rise"] == pytest.approx(100 * error_rise.mean() / rises[0][1].mean(), abs=0.02)
    assert panel["raised"] == pytest.approx(100 * (kurtosis_rise > 0).mean())
    assert panel["correlation"] == pytest.approx(scipy.stats.spearmanr(kurtosis_rise, error_rise).statistic, abs=0.01)
    assert metrics["kurtosis_rise"] == pytest.approx(np.mean([one["kurtosis_rise"] for one in arrays["panels"]]))
    assert set(metrics) == {quantity.name for quantity in quantities(METRIC)}


def test_a_network_that_is_not_rotated_rises_by_nothing() -> None:
    model = tiny_model()
    metrics, _ = weight_kurtosis(model, model, tiny_tokens(batch=2), METRIC)
    assert metrics["kurtosis_rise"] == metrics["error_rise"] == metrics["raised"] == 0
    assert math.isnan(metrics["correlation"])
    assert "the kurtosis of no weight changes" in str(quantities(METRIC)[0].absent)
    printed = METRIC.model_copy(update={"clips": "rotated", "target": "clipped"})
    metrics, _ = weight_kurtosis(model, model, tiny_tokens(batch=2), printed)
    assert metrics["kurtosis_rise"] < 0  # by clipping alone
    assert metrics["error_rise"] < 0


@pytest.mark.parametrize("name", ["phi-3", "llama-2", "qwen2"])
def test_weights_of_every_layout_are_found(name: str) -> None:
    model = tiny_model(**AWKWARD[name])
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    metric = METRIC.model_copy(update={"weights": every, "depths": (0.0,), "groups": 2})
    _, arrays = weight_kurtosis(rotated(model, RotationScheme()), model, tiny_tokens(batch=1), metric)
    config: Any = model.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = [*(head_dim * count for count in heads), config.hidden_size, *[config.intermediate_size] * 2]
    assert [panel["outputs"] for panel in arrays["panels"]] == [*widths, config.hidden_size]


def test_planted_tails_are_taken_away_where_they_are() -> None:
    """Weights of few platykurtic groups and of many are told apart."""
    model = tiny_model(hidden_size=128, intermediate_size=256)
    with torch.no_grad():
        heavy = decoder_layers(model)[0].get_submodule("mlp.down_proj").weight
        heavy[:, ::16] *= 20.0
        flat = decoder_layers(model)[1].get_submodule("mlp.down_proj").weight
        flat.copy_((torch.rand(flat.shape, generator=torch.Generator().manual_seed(0)) - 0.5) * 0.1)
    scheme = RotationScheme(residual="none", values="none", heads=False, keys=False)
    metric = METRIC.model_copy(update={"weights": ("down_proj",)})
    metrics, arrays = weight_kurtosis(rotated(model, scheme), model, tiny_tokens(batch=2), metric)
    first, last = arrays["panels"]
    assert (first["platykurtic"], last["platykurtic"]) == (pytest.approx(0, abs=5), pytest.approx(100, abs=5))
    assert first["raised"] < 5 < 95 < last["raised"]
    assert metrics["few_kurtosis_rise"] == first["kurtosis_rise"] < -1
    # Groups of 64 uniform numbers become such of normal ones, with four standard errors of 512 groups of 0.5 each.
    uniform = excess_kurtosis(torch.rand(20_000, 64, generator=torch.Generator().manual_seed(1))).mean().item()
    assert last["kurtosis_rise"] == pytest.approx(-6 / 65 - uniform, abs=0.1)
    assert math.isnan(metrics["half_kurtosis_rise"])
    assert math.isnan(metrics["half_error_rise"])


def test_a_histogram_counts_every_pair_once() -> None:
    x, y = (drawn(500, seed=seed).double().numpy() for seed in (0, 1))
    found = histogram(x, y + 3, 5)
    inside = (np.abs(x - x.mean()) <= DEVIATIONS * x.std()) & (np.abs(y - y.mean()) <= DEVIATIONS * y.std())
    assert np.sum(found["counts"]) == inside.sum() == 500 - found["beyond"]
    assert found["y"] == pytest.approx([y.mean() + 3 - 1.5 * y.std(), y.mean() + 3 + 1.5 * y.std()], rel=1e-5)
    edges = [np.linspace(*found[name], 6) for name in ("x", "y")]
    first = [(edge[0] <= axis) & (axis < edge[1]) for edge, axis in zip(edges, (x, y + 3), strict=True)]
    assert found["counts"][0][0] == (first[0] & first[1]).sum()
    assert histogram(x, y * math.inf, 5) == {"counts": [], "x": [], "y": [], "beyond": 500}


def test_rank_correlations_are_scipys() -> None:
    x, y = (drawn(80, seed=seed).double().numpy().round(1) for seed in (0, 1))  # with ties
    found = spearman(x, x + y)
    assert found == pytest.approx(scipy.stats.spearmanr(x, x + y).statistic)
    low, high = spearman_interval(found, 80)
    assert low < found < high
    assert math.isnan(spearman(x, np.ones(80)))
    assert math.isnan(spearman(x, y * math.nan))
    assert math.isnan(spearman_interval(1.0, 80)[0])


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of normal pairs with correlation 0.5, whose Spearman's is 6 / pi asin(0.25)."""
    generator, truth = np.random.default_rng(0), 6 / math.pi * math.asin(0.25)
    covered = 0
    for _ in range(400):
        x, noise = generator.standard_normal((2, 60))
        low, high = spearman_interval(spearman(x, x / math.sqrt(3) + noise), 60)
        covered += low <= truth <= high
    assert 0.91 <= covered / 400 <= 0.98  # 95 %, four standard errors of 400 trials at most


def test_groups_that_do_not_fit_are_refused() -> None:
    assert group_size(WeightKurtosis(), "q_proj", 4096) == 128
    assert group_size(METRIC, "down_proj", 344) == 86
    with pytest.raises(RecipeError, match="group_size 128 does not divide the 344 input features of down_proj"):
        group_size(WeightKurtosis(), "down_proj", 344)
    with pytest.raises(RecipeError, match="the 98 input features of down_proj make no 4 equal groups"):
        group_size(METRIC, "down_proj", 98)
    with pytest.raises(RecipeError, match="exceed the model's context"):
        weight_kurtosis(tiny_model(max_position_embeddings=8), tiny_model(), tiny_tokens(batch=1), METRIC)


def test_a_slot_says_the_groups_and_a_table_what_it_asks() -> None:
    slot = Slot(name="Llama-2-7B", checkpoint="models/small", weight_kurtosis={"groups": 4, "sequence_length": 64})
    found = resolve_metric({"kind": "weight_kurtosis", "sequence_length": 32}, slot, "here")
    assert isinstance(found, WeightKurtosis)
    assert (found.groups, found.sequence_length) == (4, 32)
