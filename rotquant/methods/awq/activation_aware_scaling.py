"""AWQ (Lin et al. 2023, Sec. 3.2): input features that see large activations are scaled up before weights are rounded.

For each group of linear layers that read one input, s = mean|x|^alpha is searched for by the error of their output
(Eqs. 4-5), then the clipping of every scale by the same error. s is folded into what produces the input, so the
function never changes before rounding. Errors are exact sums over the calibration tokens, from X^T X; the authors' code
measures them through the whole attention or MLP block, and clips by a sample of the tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rotquant.methods.awq import AWQ
from rotquant.models.architectures import Architecture, linear_of
from rotquant.models.equivalent import InPlace, divide_norm, divide_rows, held_scale, producers
from rotquant.models.simulation.runtime import wrap
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Transform
from rotquant.tensors.quantization import choose_qparams, fake_quantize, quantize
from rotquant.weights.context import QuantizationContext
from rotquant.weights.hessian import observed_hessians
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.search import output_error, search_grid, search_ratios

#: Smallest scale of a feature, so that a dead one divides nothing by zero (authors' code).
SMALLEST_SCALE = 1e-4
#: Clipping shrinks a range to no less than this share (authors' code).
SMALLEST_CLIP = 0.5


@dataclass(frozen=True)
class Inputs:
    """Statistics of a linear layer's input X [tokens, features] that the search uses.

    magnitude: mean |x| of each feature, [features]. moment: X^T X, [features, features]. tokens: how many.
    """

    magnitude: Tensor
    moment: Tensor
    tokens: int = 1

    def divided(self, scale: Tensor) -> "Inputs":
        """Return the statistics of X / s."""
        return Inputs(self.magnitude / scale, self.moment / torch.outer(scale, scale), self.tokens)


def search_scale(readers: Sequence[tuple[Tensor, Inputs]], scheme: QuantizationScheme, grid: int) -> Tensor:
    """The s = mean|x|^alpha with the least error of round(W diag(s)) diag(s)^-1 X (Eqs. 4-5).

    Each candidate is divided by sqrt(max s min s), as in the authors' code. alpha = 0 leaves the weight as it is.

    Args:
        readers: weights [out, in], float32 or float64, that share the scale, each with what it reads, of its type:
            an expert reads the tokens that are routed to it.
        scheme: of granularity channel or group.
        grid: alpha is one of 0, 1/grid, ..., 1 - 1/grid; of equally good ones the first wins.

    Returns:
        s, positive, [in].
    """
    magnitude = mean_magnitude([inputs for _, inputs in readers])

    def candidates() -> Iterator[Tensor]:
        for step in range(grid):
            scale = magnitude.clamp(min=SMALLEST_SCALE) ** (step / grid)
            yield (scale / (scale.max() * scale.min()).sqrt()).clamp(min=SMALLEST_SCALE)

    def error(scale: Tensor) -> Tensor:
        total = scale.new_zeros(())
        for weight, inputs in readers:
            difference = fake_quantize(weight * scale, scheme) / scale - weight
            total = total + output_error(difference, inputs.moment).sum()
        return total

    return search_grid(candidates(), error)[0]


def mean_magnitude(inputs: Sequence[Inputs]) -> Tensor:
    """Mean |x| over all that several linear layers read, [features]."""
    if len(inputs) == 1:
        return inputs[0].magnitude
    total = torch.stack([one.magnitude * one.tokens for one in inputs]).sum(dim=0)
    return total / max(1, sum(one.tokens for one in inputs))


def clip_ratios(grid: int) -> list[float]:
    """The shares of a range that are tried: 1, 1 - 1/grid, ... above 1/2."""
    return [1 - step / grid for step in range(grid) if step / grid < 1 - SMALLEST_CLIP]


@contextmanager
def observed(layer: nn.Module, architecture: Architecture) -> Iterator[dict[str, Inputs]]:
    """While open, measure what each linear layer reads; complete, by its name, when the block is left."""
    totals: dict[str, Tensor] = {}
    found: dict[str, Inputs] = {}

    def update(name: str, x: Tensor) -> None:
        totals[name] = totals.get(name, 0) + x.flatten(0, -2).abs().sum(0, dtype=hessians[name].matrix.dtype)

    with observed_hessians(layer, architecture, update) as hessians:
        yield found
    for readers in (names for site in architecture.sites for names in site.sharing):
        hessian = hessians[readers[0]]
        magnitude = totals.get(readers[0], torch.zeros_like(hessian.matrix[0])) / max(1, hessian.tokens)
        found |= dict.fromkeys(readers, Inputs(magnitude, hessian.matrix, hessian.tokens))


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
        inputs: of every linear layer, by name.
        scheme: of the weights. transforms: of the model.
    """
    inputs, parameters = dict(inputs), InPlace(layer)

    def searched(sharing: Iterable[Sequence[str]]) -> Tensor:
        """Search the scale of what linear layers read, given those that read one input together."""
        readers = [(torch.cat([linear_of(layer, name).weight for name in names]), names[0]) for names in sharing]
        known = [(weight.to(inputs[name].moment.dtype), inputs[name]) for weight, name in readers]
        return search_scale(known, scheme, settings.grid)

    def divided(sharing: Iterable[Sequence[str]], scale: Tensor) -> None:
        for names in sharing:
            scaled = inputs[names[0]].divided(scale.to(inputs[names[0]].moment))
            inputs.update(dict.fromkeys(names, scaled))

    for site in architecture.sites:
        if site.norm is not None:
            scale = held_scale(layer, architecture, site, searched(site.sharing))
            divide_norm(parameters, architecture, site, scale)
            divided(site.sharing, scale)
        for name, before in (producers(architecture, site, transforms) or {}).items():
            scale = searched([[name]])
            divide_rows(parameters, before, [name], scale.double())
            divided([[name]], scale)
    weights, ratios = {}, clip_ratios(settings.grid)
    unclipped = {architecture.query.name, architecture.key.name}  # their error counts by attention scores, not outputs
    for site in architecture.sites:
        for name in site.linears:
            parameter, moment = linear_of(layer, name).weight, inputs[name].moment
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
