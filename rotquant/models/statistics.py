"""How large each input feature of the linear layers is over calibration text: what every method here starts from.

One number per feature and site, gathered by forward hooks while decoder layers run; activations are never kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture
from rotquant.models.stream import LayerStream, observed_inputs

Statistic = Literal["max", "square"]


@contextmanager
def observe(layer: nn.Module, architecture: Architecture, statistic: Statistic) -> Iterator[dict[str, Tensor]]:
    """While the block is open, measure every site's input of one decoder layer, as its linear layers read it.

    Hooks that were there before (online transforms, quantizers) act first.

    Args:
        layer: a decoder layer of a model of this architecture.
        statistic: `max` |x| or `square`, the sum of squares, over all tokens that pass.

    Yields:
        By site name one tensor [features], float32 (float64 for float64 activations), complete when the layer has run.
    """
    statistics: dict[str, Tensor] = {}

    def update(site: str, x: Tensor) -> None:
        measured = measure(x.detach(), statistic)
        if site in statistics:
            measured = torch.maximum(statistics[site], measured) if statistic == "max" else statistics[site] + measured
        statistics[site] = measured

    with observed_inputs(layer, architecture.sites, update):
        yield statistics


def collect_statistics(stream: LayerStream, statistic: Statistic) -> list[dict[str, Tensor]]:
    """Run the stream through the whole model, one layer at a time on its device, and measure every site.

    Args:
        stream: calibration samples before the first layer; their hidden states are used up.
        statistic: `max` |x| or `square`, the sum of squares.

    Returns:
        For each decoder layer one tensor [features] by site name, on the host.
    """
    observed = stream.observed_layers("measuring inputs", lambda layer: observe(layer, stream.architecture, statistic))
    return [{name: value.cpu() for name, value in statistics.items()} for _, _, statistics in observed]


def measure(x: Tensor, statistic: Statistic) -> Tensor:
    """The statistic of each feature over all tokens of `x` [..., features]: [features], at least float32."""
    tokens = x.reshape(-1, x.shape[-1])
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tokens.abs().amax(dim=0).to(dtype) if statistic == "max" else tokens.to(dtype).square().sum(dim=0)
