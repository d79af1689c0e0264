"""Effect of rotation on the kurtosis of groups of weights and on 2-bit output errors (RCP Figures 3 and 8, A.3).

A weight W [out, in] has in = groups x size. The excess kurtosis is averaged over the groups of a row, which all
contribute to one output element, and QErr(W, X) = |X (Q(W) - W)| over the tokens of X, so both are one number for each
output element. Their rises by rotation are compared. Nothing here changes a model.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Generator, Tensor, nn

from reproduction.metrics.distortion import excess_kurtosis
from reproduction.metrics.magnitudes import read_inputs
from reproduction.metrics.settings import WeightKurtosis, WeightName
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import track
from rotquant.models.architectures import Architecture, Projection, architecture_of, decoder_layers, linear_of
from rotquant.models.limits import ModelLimits
from rotquant.qat.start import clip_weight, search_clips, uniform_rounding
from rotquant.tensors.value_range import dynamic_range

#: Our bounds for the paper's shares of platykurtic groups, "far below 0.5" and "about 0.5".
FEW, ABOUT_HALF = 0.25, (0.35, 0.65)
#: Range of the histograms: this many deviations on both sides of the mean (A.3).
DEVIATIONS = 1.5
#: Number of groups of normal numbers that estimate the share of platykurtic ones in small groups.
_NORMAL_GROUPS = 20_000
#: The 97.5 % point of the normal distribution.
_NORMAL_QUANTILE = 1.959964

#: The sites whose inputs the weights read.
_SITES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention_input"),
    "o_proj": "attention_output",
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp_input"),
    "down_proj": "mlp_output",
}
_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "gate_proj": "gate", "up_proj": "up"}

Place = tuple[int, WeightName]
"""A layer's index and the name of a weight in it."""


@dataclass(frozen=True)
class Found:
    """Measurements of one weight by output element, float64 [out]: the mean kurtosis of its groups and its error.

    platykurtic: share of its groups with a negative excess kurtosis. normal: the share for groups of normal numbers.
    """

    kurtosis: Tensor
    error: Tensor
    platykurtic: float
    normal: float


def weight_kurtosis(
    model: nn.Module, reference: nn.Module, samples: Tensor, metric: WeightKurtosis
) -> tuple[dict[str, float], dict[str, Any]]:
    """Rises of kurtosis and output error by rotation.

    Args:
        model: a supported causal language model, rotated, which quantizes nothing. reference: its checkpoint.
        samples: calibration token ids, int64 [samples, tokens].

    Returns:
        Metrics, averaged over the weights: `correlation`, Spearman's, of both rises over the output elements;
        `kurtosis_rise`; `raised`, the share of output elements whose kurtosis rises, `error_rise`, of the mean error in
        percent, `platykurtic`, the share of groups with negative excess kurtosis before rotation, and `normal`, that of
        groups of normal numbers, all in percent. Of several weights also `few_kurtosis_rise`, the mean rise of the
        kurtosis of those that have few platykurtic groups (`FEW`), and `half_kurtosis_rise` and `half_error_rise` of
        those of which about half are (`ABOUT_HALF`); nan where there is no such weight. Arrays: `panels`, the weights
        in the metric's order, see `_panel`.

    Raises:
        RecipeError: groups that do not divide the input features, or a text that the model cannot read.
        CheckpointError: a text that the model cannot read; see `rotquant.models.limits`.
    """
    ModelLimits.of(model.config).check(samples, "calibration samples")
    layers = architecture_of(reference).num_layers
    places: list[Place] = [(int(depth * layers), name) for depth in metric.depths for name in metric.weights]
    sizes = {place: group_size(metric, place[1], _weight(reference, place).shape[1]) for place in places}
    before = _measure(reference, samples, metric, sizes, clipped=metric.clips == "both")
    after = _measure(model, samples, metric, sizes, clipped=True)
    panels = [_panel(place, before[place], after[place], metric.bins) for place in sizes]
    return _summary(panels), {"panels": panels}


def group_size(metric: WeightKurtosis, name: str, features: int) -> int:
    """Input features of a group of a weight.

    Raises:
        RecipeError: the features cannot be cut into such groups.
    """
    if metric.groups is None and features % metric.group_size:
        raise RecipeError(
            f"group_size {metric.group_size} does not divide the {features} input features of {name}: choose a divisor."
        )
    if metric.groups is not None and features % metric.groups:
        raise RecipeError(
            f"the {features} input features of {name} make no {metric.groups} equal groups: choose a divisor of them."
        )
    return features // metric.groups if metric.groups is not None else metric.group_size


@torch.no_grad()
def _measure(
    model: nn.Module, samples: Tensor, metric: WeightKurtosis, sizes: dict[Place, int], *, clipped: bool
) -> dict[Place, Found]:
    """Measure the weights of a network, with or without clipping."""
    inputs = _inputs(model, samples, sizes)
    found = {}
    for place, size in track(sizes.items(), "kurtosis and output error", "weight", len(sizes)):
        weight = _weight(model, place)
        x = inputs[place].to(weight)
        kept, quantized = rounded(weight, x, size, metric, clipped=clipped)
        aim = kept if metric.target == "clipped" else weight
        whole = excess_kurtosis(weight.unflatten(1, (-1, size)))
        found[place] = Found(
            kurtosis=excess_kurtosis(aim.unflatten(1, (-1, size))).mean(1).cpu(),
            error=output_error(aim, quantized, x).cpu(),
            platykurtic=(whole < 0).double().mean().item(),
            normal=share_of_normal(size),
        )
    return found


def rounded(
    weight: Tensor, x: Tensor, size: int, metric: WeightKurtosis, *, clipped: bool = True
) -> tuple[Tensor, Tensor]:
    """A weight [out, in] with groups clipped for the least output error (Eq. 6), and the rounded weight (Eq. 1).

    Args:
        x: the layer's inputs [tokens, in], of the weight's type and on its device. size: of a group.
        clipped: whether to clip; else the whole range of each group is kept.
    """
    view, rounding = weight.unflatten(1, (-1, size)), uniform_rounding(metric.bits)
    if not clipped:
        return weight, rounding(view, dynamic_range(view)).flatten(1)
    moment = x.T.double() @ x.double()
    clips = search_clips(weight, moment, size, rounding, target=metric.target)
    return clip_weight(weight, clips, size), rounding(view, clips.value_range(view)).flatten(1)


def output_error(weight: Tensor, quantized: Tensor, x: Tensor) -> Tensor:
    """|X (Q(W) - W)| of each output element, the mean over the tokens: [out], float64; x [tokens, in]."""
    difference = (quantized.double() - weight.double()).to(x.dtype).T
    total = x.new_zeros(len(weight), dtype=torch.float64)
    for part in x.split(4096):
        total += (part @ difference).abs().sum(0, dtype=torch.float64)
    return total / len(x)


def share_of_normal(size: int) -> float:
    """The share of groups of `size` normal numbers with a negative excess kurtosis: more than half."""
    numbers = torch.randn(_NORMAL_GROUPS, size, generator=Generator().manual_seed(size), dtype=torch.float64)
    return (excess_kurtosis(numbers) < 0).double().mean().item()


def _inputs(model: nn.Module, samples: Tensor, places: Iterable[Place]) -> dict[Place, Tensor]:
    """The inputs of the weights, [samples * tokens, in], float32 on the host."""
    sites = {place: (place[0], _SITES[place[1]]) for place in places}
    windows = [read_inputs(model, sample[None], set(sites.values()), lambda x: x) for sample in samples]
    read = {site: torch.cat([window[site] for window in windows]) for site in set(sites.values())}
    return {place: read[site] for place, site in sites.items()}


def _weight(model: nn.Module, place: Place) -> Tensor:
    """A weight [out, in], at least float32; from a fused linear layer only its own rows."""
    architecture, (layer, name) = architecture_of(model), place
    projection = _projection(architecture, name)
    weight = linear_of(decoder_layers(model)[layer], projection.name).weight.detach()
    weight = weight if projection.rows is None else weight[slice(*projection.rows)]
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _projection(architecture: Architecture, name: WeightName) -> Projection:
    outputs = {"o_proj": architecture.attention_output, "down_proj": architecture.mlp_output}
    return Projection(outputs[name]) if name in outputs else getattr(architecture, _PROJECTIONS[name])


def _panel(place: Place, before: Found, after: Found, bins: int) -> dict[str, Any]:
    """A weight's numbers: `layer`, `weight`, the rises and shares of `weight_kurtosis`, means before and after of
    `kurtosis` and `error`, `interval` of the correlation, and the `histogram`."""
    kurtosis, error = after.kurtosis - before.kurtosis, after.error - before.error
    correlation = spearman(kurtosis.numpy(), error.numpy())
    return {
        "layer": place[0],
        "weight": place[1],
        "outputs": len(kurtosis),
        "correlation": correlation,
        "interval": spearman_interval(correlation, len(kurtosis)),
        "kurtosis": [before.kurtosis.mean().item(), after.kurtosis.mean().item()],
        "error": [before.error.mean().item(), after.error.mean().item()],
        "kurtosis_rise": kurtosis.mean().item(),
        "error_rise": 100 * (error.mean() / before.error.mean()).item(),
        "raised": 100 * (kurtosis > 0).double().mean().item(),
        "platykurtic": 100 * before.platykurtic,
        "platykurtic_after": 100 * after.platykurtic,
        "normal": 100 * before.normal,
        "histogram": histogram(kurtosis.numpy(), error.numpy(), bins),
    }


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Spearman's rank correlation of paired numbers [n]; nan where one of them is not finite or all are equal."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def spearman_interval(correlation: float, count: int) -> tuple[float, float]:
    """The correlation's 95 % interval by Fisher's transformation, with the variance of Bonett and Wright (2000)."""
    if not math.isfinite(correlation) or abs(correlation) >= 1 or count < 5:
        return math.nan, math.nan
    half = _NORMAL_QUANTILE * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    return math.tanh(math.atanh(correlation) - half), math.tanh(math.atanh(correlation) + half)


def histogram(x: NDArray[np.float64], y: NDArray[np.float64], bins: int) -> dict[str, Any]:
    """A 2-D histogram of pairs: `counts` [x][y] of bins x bins fields, and the edges `x` and `y` of each axis.

    Each axis covers `DEVIATIONS` on both sides of its mean; `beyond` counts the pairs outside. Nothing is counted where
    a number is not finite.
    """
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return {"counts": [], "x": [], "y": [], "beyond": len(x)}
    ranges = [(axis.mean() - DEVIATIONS * axis.std(), axis.mean() + DEVIATIONS * axis.std()) for axis in (x, y)]
    counts, *edges = np.histogram2d(x, y, bins, ranges)
    ends = [[float(f"{edge:.6g}") for edge in (axis[0], axis[-1])] for axis in edges]
    return {"counts": counts.astype(int).tolist(), "x": ends[0], "y": ends[1], "beyond": len(x) - int(counts.sum())}


def _summary(panels: list[dict[str, Any]]) -> dict[str, float]:
    """The means over the weights; for several weights also the means over subsets."""

    def mean(name: str, chosen: Callable[[float], bool] = lambda _: True) -> float:
        numbers = [panel[name] for panel in panels if chosen(panel["platykurtic"] / 100)]
        return fmean(numbers) if numbers else math.nan

    names = ("correlation", "kurtosis_rise", "raised", "error_rise", "platykurtic", "normal")
    found = {name: mean(name) for name in names}
    if len(panels) == 1:
        return found

    def about_half(share: float) -> bool:
        return ABOUT_HALF[0] <= share <= ABOUT_HALF[1]

    return found | {
        "few_kurtosis_rise": mean("kurtosis_rise", lambda share: share <= FEW),
        "half_kurtosis_rise": mean("kurtosis_rise", about_half),
        "half_error_rise": mean("error_rise", about_half),
    }
