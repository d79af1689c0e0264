"""SmoothQuant (Xiao et al. 2023, Eqs. 3-4): activation outliers are divided away and multiplied into the weights.

As in the authors' code for Llama, only the sites after an RMSNorm are smoothed, because there the division costs
nothing: it is folded into the norm's weight. The function of the model never changes, and nothing is quantized here.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rotquant.methods.smoothquant import SmoothQuant
from rotquant.models.architectures import Site, architecture_of, decoder_layers, linear_of, norm_of
from rotquant.models.rotation.fusing import fuse_inverse
from rotquant.models.transforms import scaling
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
def smooth_site(layer: nn.Module, site: Site, scale: Tensor) -> None:
    """Fold x / s into the norm before the site and s * W into every linear layer that reads it, in place.

    Args:
        layer: a decoder layer.
        site: an input site with a norm.
        scale: s of Eq. 3, positive, [features].

    Raises:
        ValueError: when no norm precedes the site, so that the division has no place to go.
    """
    if site.norm is None:
        raise ValueError(f"site {site.name} has no norm that could absorb the smoothing scale")
    norm = norm_of(layer, site).weight
    scale = scale.to(device=norm.device, dtype=torch.float64)
    chain = scaling(site.name, scale)
    norm.copy_(chain(norm.double()))
    fuse_inverse(layer, site, chain)


def smooth(model: nn.Module, smoothing: SmoothQuant, maxima: Sequence[Mapping[str, Tensor]]) -> None:
    """Smooth every site that a norm feeds, in place; the model's logits stay what they were.

    Args:
        model: a causal language model of a supported family, its norms fused or not.
        smoothing: the migration strength.
        maxima: for each decoder layer, max |x| per feature by site name (`statistics.collect_statistics`).
    """
    sites = [site for site in architecture_of(model).sites if site.norm is not None]
    for layer, layer_maxima in zip(decoder_layers(model), maxima, strict=True):
        for site in sites:
            weights = weight_maxima(linear_of(layer, name) for name in site.linears).double()
            activations = layer_maxima[site.name].to(weights)
            smooth_site(layer, site, smoothing_scale(activations, weights, smoothing.alpha))


def apply(settings: SmoothQuant, context: QuantizationContext) -> None:
    """Smooth every site that a norm feeds, by the calibration text's maxima."""
    smooth(context.model, settings, context.statistics("max"))
