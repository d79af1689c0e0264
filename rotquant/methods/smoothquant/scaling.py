"""SmoothQuant (Xiao et al. 2023, Eqs. 3-4): activation outliers are divided away and multiplied into the weights.

As in the authors' code for Llama, only the sites after an RMSNorm are smoothed, because there the division costs
nothing: it is folded into the norm's weight. The function of the model never changes, and nothing is quantized here.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rotquant.methods.smoothquant import SmoothQuant
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.models.equivalent import InPlace, divide_norm, held_scale, smoothing_scale, weight_maxima
from rotquant.weights.context import QuantizationContext


@torch.no_grad()
def smooth(model: nn.Module, smoothing: SmoothQuant, maxima: Sequence[Mapping[str, Tensor]]) -> None:
    """Smooth every site that a norm feeds, in place; the model's logits stay what they were.

    Args:
        model: a causal language model of a supported family, its norms fused or not.
        smoothing: the migration strength.
        maxima: for each decoder layer, max |x| per feature by site name (`statistics.collect_statistics`).
    """
    architecture = architecture_of(model)
    sites = [site for site in architecture.sites if site.norm is not None]
    for layer, layer_maxima in zip(decoder_layers(model), maxima, strict=True):
        for site in sites:
            weights = weight_maxima(linear_of(layer, name) for name in site.linears).double()
            scale = smoothing_scale(layer_maxima[site.name].to(weights), weights, smoothing.alpha)
            divide_norm(InPlace(layer), architecture, site, held_scale(layer, architecture, site, scale))


def apply(settings: SmoothQuant, context: QuantizationContext) -> None:
    """Smooth every site that a norm feeds, by the calibration text's maxima."""
    smooth(context.model, settings, context.statistics("max"))
