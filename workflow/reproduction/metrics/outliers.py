"""Kurtosis and 4-bit rounding errors at the layers that read the residual stream (SpinQuant Sec. 2.1, Figure 3).

These are five linear layers of a block, with two inputs: Q, K, V, gate and up projection. Everything is measured on the
running network, without quantizing it.
"""

from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.metrics.distortion import kurtosis, relative_error
from reproduction.metrics.magnitudes import read_inputs
from reproduction.metrics.settings import Outliers
from rotquant.models.architectures import Projection, architecture_of, decoder_layers, linear_of
from rotquant.models.limits import model_windows
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import fake_quantize
from rotquant.text import Tokens

#: The sites that read the residual stream, and the projections of each.
READERS = {"attention_input": ("query", "key", "value"), "mlp_input": ("gate", "up")}


def outlier_statistics(model: nn.Module, tokens: Tokens, metric: Outliers) -> tuple[dict[str, float], dict[str, Any]]:
    """Kurtosis of the inputs, and relative squared errors of inputs and weights after rounding, by layer.

    Args:
        model: a supported causal language model, rotated or not, without quantizers.
        tokens: of a text (`rotquant.text.tokenize`).

    Returns:
        Metrics: `kurtosis`, the largest over all inputs, and `mean_kurtosis`; `activation_error` and `weight_error`,
        means over inputs and weights in percent. Arrays: `kurtosis` and `activation_error` by site, `weight_error` by
        projection, each a list over the layers.

    Raises:
        CorpusError: the text is shorter than the window.
        RecipeError, CheckpointError: the model cannot read the window; see `rotquant.models.limits`.
    """
    layers = range(architecture_of(model).num_layers)
    scheme = QuantizationScheme(bits=metric.bits, symmetric=False, granularity="token")

    def measure(x: Tensor) -> tuple[float, float]:
        return kurtosis(x), 100 * relative_error(x, fake_quantize(x, scheme))

    window = model_windows(model, tokens, metric.tokens)[:1]
    read = read_inputs(model, window, [(layer, site) for layer in layers for site in READERS], measure)
    tails = {site: [read[layer, site][0] for layer in layers] for site in READERS}
    activations = {site: [read[layer, site][1] for layer in layers] for site in READERS}
    weights = _weight_errors(model, metric.bits)
    metrics = {
        "kurtosis": _largest(tails),
        "mean_kurtosis": _mean(tails),
        "activation_error": _mean(activations),
        "weight_error": _mean(weights),
    }
    return metrics, {"kurtosis": tails, "activation_error": activations, "weight_error": weights}


@torch.no_grad()
def _weight_errors(model: nn.Module, bits: int) -> dict[str, list[float]]:
    """Error of each projection's weight in percent, rounded to nearest with one scale per row, layer by layer."""
    architecture = architecture_of(model)
    scheme = QuantizationScheme(bits=bits, granularity="channel")
    errors: dict[str, list[float]] = {}
    for layer in decoder_layers(model):
        for name in (name for names in READERS.values() for name in names):
            weight = _weight(layer, getattr(architecture, name))
            errors.setdefault(name, []).append(100 * relative_error(weight, fake_quantize(weight, scheme)))
    return errors


def _weight(layer: nn.Module, projection: Projection) -> Tensor:
    """The projection's rows [out, in] of its linear layer."""
    weight = linear_of(layer, projection.name).weight
    return weight if projection.rows is None else weight[slice(*projection.rows)]


def _mean(lists: dict[str, list[float]]) -> float:
    return fmean(value for values in lists.values() for value in values)


def _largest(lists: dict[str, list[float]]) -> float:
    """The largest number; nan where one is not a number, which Python's `max` would hide."""
    return torch.tensor([value for values in lists.values() for value in values], dtype=torch.float64).max().item()
