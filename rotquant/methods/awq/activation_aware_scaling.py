"""AWQ (Lin et al. 2023, Sec. 3.2): input features that see large activations are scaled up before weights are rounded.

For each group of linear layers that read one input, s = mean|x|^alpha is searched for by the error of their output
(Eqs. 4-5), then the clipping of every scale by the same error. s is folded into what produces the input, so the
function never changes before rounding. Errors are exact sums over the calibration tokens, from X^T X; the authors' code
measures them through the whole attention or MLP block, and clips by a sample of the tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rotquant.methods.awq import AWQ
from rotquant.methods.smoothquant.scaling import smooth_site
from rotquant.models.architectures import Architecture, Projection, Site, linear_of
from rotquant.models.rotation.fusing import fuse_inverse
from rotquant.models.simulation.runtime import wrap
from rotquant.models.stream import observed_inputs
from rotquant.models.transforms import scaling
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Transform, at_site
from rotquant.tensors.quantization import choose_qparams, fake_quantize, quantize
from rotquant.weights.context import QuantizationContext
from rotquant.weights.grid_search import search_grid
from rotquant.weights.hessian import observed_hessians
from rotquant.weights.output_error import output_error, search_ratios
from rotquant.weights.rtn import QuantizedWeight

#: Smallest scale of a feature, so that a dead one divides nothing by zero (authors' code).
SMALLEST_SCALE = 1e-4
#: Clipping shrinks a range to no less than this share (authors' code).
SMALLEST_CLIP = 0.5


@dataclass(frozen=True)
class Inputs:
    """Statistics of a site's input X [tokens, features] that the search uses.

    magnitude: mean |x| of each feature, [features]. moment: X^T X, [features, features].
    """

    magnitude: Tensor
    moment: Tensor

    def divided(self, scale: Tensor) -> "Inputs":
        """Return the statistics of X / s."""
        return Inputs(self.magnitude / scale, self.moment / torch.outer(scale, scale))


def search_scale(weight: Tensor, inputs: Inputs, scheme: QuantizationScheme, grid: int) -> Tensor:
    """The s = mean|x|^alpha with the least error of round(W diag(s)) diag(s)^-1 X (Eqs. 4-5).

    Each candidate is divided by sqrt(max s min s), as in the authors' code. alpha = 0 leaves the weight as it is.

    Args:
        weight: of all linear layers that read the input, stacked, [out, in], float32 or float64.
        inputs: of the site, of the same type.
        scheme: of granularity channel or group.
        grid: alpha is one of 0, 1/grid, ..., 1 - 1/grid; of equally good ones the first wins.

    Returns:
        s, positive, [in].
    """

    def candidates() -> Iterator[Tensor]:
        for step in range(grid):
            scale = inputs.magnitude.clamp(min=SMALLEST_SCALE) ** (step / grid)
            yield (scale / (scale.max() * scale.min()).sqrt()).clamp(min=SMALLEST_SCALE)

    def error(scale: Tensor) -> Tensor:
        difference = fake_quantize(weight * scale, scheme) / scale - weight
        return output_error(difference, inputs.moment).sum()

    return search_grid(candidates(), error)[0]


def clip_ratios(grid: int) -> list[float]:
    """The shares of a range that are tried: 1, 1 - 1/grid, ... above 1/2."""
    return [1 - step / grid for step in range(grid) if step / grid < 1 - SMALLEST_CLIP]


def producer(architecture: Architecture, site: Site, transforms: tuple[Transform, ...]) -> Projection | None:
    """The projection whose output rows a site without norm reads feature by feature, or None.

    o_proj reads v_proj's where every query head has a value head of its own (as in the authors' code), down_proj
    reads up_proj's (times the activated gate). An online transform in between mixes the features.
    """
    shared = site.name == "attention_output" and architecture.num_heads != architecture.num_kv_heads
    if shared or at_site(transforms, site.name):
        return None
    return architecture.value if site.name == "attention_output" else architecture.up


@torch.no_grad()
def scale_site(layer: nn.Module, site: Site, before: Projection | None, scale: Tensor) -> None:
    """Fold x / s into the norm or the projection before a site, and W diag(s) into its linear layers, in place.

    Args:
        layer: a decoder layer.
        before: `producer` of a site without norm.
        scale: positive, [features].
    """
    if before is None:
        smooth_site(layer, site, scale)
        return
    linear, rows = linear_of(layer, before.name), slice(*(before.rows or (None,)))
    scale = scale.to(linear.weight.device, torch.float64)
    linear.weight[rows] = (linear.weight[rows].double() / scale.unsqueeze(1)).to(linear.weight.dtype)
    if linear.bias is not None:
        linear.bias[rows] = (linear.bias[rows].double() / scale).to(linear.bias.dtype)
    fuse_inverse(layer, site, scaling(site.name, scale))


@contextmanager
def observed(layer: nn.Module, architecture: Architecture) -> Iterator[dict[str, Inputs]]:
    """While open, measure what each site of a layer reads; complete, by site name, when the block is left."""
    totals: dict[str, Tensor] = {}
    found: dict[str, Inputs] = {}

    def update(site: str, x: Tensor) -> None:
        magnitude = x.flatten(0, -2).abs().sum(0, dtype=hessians[site].matrix.dtype)
        totals[site] = totals[site] + magnitude if site in totals else magnitude

    with observed_hessians(layer, architecture) as hessians, observed_inputs(layer, architecture.sites, update):
        yield found
    for name, hessian in hessians.items():
        found[name] = Inputs(totals[name] / hessian.tokens, hessian.matrix)


@torch.no_grad()
def quantize_layer(
    layer: nn.Module,
    architecture: Architecture,
    inputs: dict[str, Inputs],
    settings: AWQ,
    scheme: QuantizationScheme,
    transforms: tuple[Transform, ...],
) -> dict[str, QuantizedWeight]:
    """Scale, clip and round one decoder layer, in place; its integer weights by name.

    Args:
        inputs: of every site, by name.
        scheme: of the weights. transforms: of the model.
    """
    inputs = dict(inputs)
    for site in architecture.sites:
        before = None if site.norm is not None else producer(architecture, site, transforms)
        if site.norm is None and before is None:
            continue
        stacked = torch.cat([linear_of(layer, name).weight for name in site.linears])
        known = inputs[site.name]
        scale = search_scale(stacked.to(known.moment.dtype), known, scheme, settings.grid)
        scale_site(layer, site, before, scale)
        inputs[site.name] = known.divided(scale)
    weights, ratios = {}, clip_ratios(settings.grid)
    unclipped = {architecture.query.name, architecture.key.name}  # their error counts by attention scores, not outputs
    for site in architecture.sites:
        for name in site.linears:
            parameter, moment = linear_of(layer, name).weight, inputs[site.name].moment
            weight = parameter.to(moment.dtype)
            clips = settings.clip_search and name not in unclipped
            ratio = search_ratios(weight, moment, scheme, ratios) if clips else None
            qparams = choose_qparams(weight, scheme, ratio)
            weights[name] = QuantizedWeight(quantize(weight, qparams, scheme), qparams, scheme)
            parameter.copy_(weights[name].dequantize(parameter.dtype))
    return weights


def apply(settings: AWQ, context: QuantizationContext) -> None:
    """Scale, clip and round layer by layer, on inputs of the full-precision model.

    Activations and KV cache are not quantized meanwhile.
    """
    scheme, transforms, stream = context.recipe.rounded.scheme, context.recipe.transforms, context.capture()
    watch = partial(observed, architecture=context.architecture)
    with wrap(context.model, context.online):
        # Every layer reads what the full-precision model gives.
        context.keep_layers(
            quantize_layer(layer, context.architecture, inputs, settings, scheme, transforms)
            for _, layer, inputs in stream.observed_layers("AWQ", watch)
        )
