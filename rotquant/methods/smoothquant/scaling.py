"""SmoothQuant (Xiao et al. 2023, Eqs. 3-4): activation outliers are divided away and multiplied into the weights.

As in the authors' code for Llama, only the sites after an RMSNorm are smoothed, because there the division costs
nothing: it is folded into the norm's weight. The function of the model never changes, and nothing is quantized here.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rotquant.methods.smoothquant import SmoothQuant
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.models.equivalent import InPlace, divide_norm, held_scale
from rotquant.weights.context import QuantizationContext

#: Smallest factor and smallest weight maximum, so that a dead channel divides nothing by zero.
SMALLEST = 1e-5


def smoothing_scale(activation_maxima: Tensor, weight_maxima: Tensor, alpha: float) -> Tensor:
    """Eq. 4: s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), at least 1e-5.

    Args:
        activation_maxima: max |x| over the calibration tokens, [features].
        weight_maxima: max |w| over the outputs of every linear layer that reads these features, [features].
        alpha: migration strength in [0, 1]; 0 leaves all difficulty to the activations.
    """
    weight_maxima = weight_maxima.clamp(min=SMALLEST)
    return (activation_maxima**alpha / weight_maxima ** (1 - alpha)).clamp(min=SMALLEST)


def weight_maxima(linears: Iterable[nn.Linear]) -> Tensor:
    """max |w| of each input feature over all linear layers that share one input: [features]."""
    return torch.stack([linear.weight.detach().abs().amax(dim=0) for linear in linears]).amax(dim=0)


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
