"""QoQ's rounding of weights: the order of features (QServe Sec. 4.3.3), the clipping (Sec. 4.3.4), and the codes.

Layer by layer, on inputs of the full-precision model, which all of QoQ's transformations leave as they are. Errors of a
layer's output are exact sums over the calibration tokens, from X^T X; those of the attention block are measured by
running it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.methods.qoq import QoQ
from rotquant.methods.qoq.progressive import QuantizationGrid, choose_grid
from rotquant.methods.qoq.smoothing import smooth_attention, smooth_output
from rotquant.models.architectures import Architecture, Site, linear_of
from rotquant.models.simulation.kv_cache import TransientCache
from rotquant.models.simulation.runtime import wrap
from rotquant.models.statistics import observe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.quantization import QParams, choose_qparams, fake_quantize, quantize
from rotquant.weights.context import QuantizationContext
from rotquant.weights.error_feedback import error_spread, round_blocks, round_columns
from rotquant.weights.hessian import observed_hessians
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.search import search_ratios

#: Clipping shrinks a range to no less than this share (authors' code).
SMALLEST_CLIP = 0.2
#: Columns whose errors are spread over the later ones by one product.
_BLOCK = 128


@dataclass
class LayerStats:
    """Statistics of a decoder layer on calibration text.

    maxima: max |x| of each site's features, by name. moments: X^T X of what each linear layer reads, by name.
    keys: max |k| of each dimension after RoPE, [kv heads, head_dim].
    attention: the attention block's inputs, [batch, tokens, hidden] each, and with what else it was called.
    """

    maxima: dict[str, Tensor]
    moments: dict[str, Tensor]
    keys: Tensor
    attention: list[Tensor] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


class _Watched:
    """The attention block's hook: remembers its inputs, and gives it a cache that keeps the largest keys."""

    def __init__(self, stats: LayerStats, keep: bool, home: torch.device) -> None:
        self.stats, self.keep, self.home = stats, keep, home

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.stats.arguments = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        if self.keep:
            hidden: Tensor = kwargs["hidden_states"]
            self.stats.attention += hidden.to(self.home).split(1 if hidden.device.type == "cpu" else len(hidden))
        return args, {**kwargs, "past_key_values": TransientCache(self)}

    def fake(self, keys: Tensor, values: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv heads, tokens, head_dim] as they are."""
        self.stats.keys = torch.maximum(self.stats.keys, keys.abs().amax(dim=(0, 2)).to(self.stats.keys))
        return keys, values


@contextmanager
def watched(layer: nn.Module, architecture: Architecture, keep: bool, home: torch.device) -> Iterator[LayerStats]:
    """While open, watch a decoder layer; complete when the block is left.

    Args:
        keep: whether the attention block's inputs are kept, on `home`.
    """
    weight = linear_of(layer, architecture.attention_output).weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    stats = LayerStats(
        {}, {}, torch.zeros(architecture.num_kv_heads, architecture.head_dim, dtype=dtype).to(weight.device)
    )

    attention = layer.get_submodule(architecture.attention)
    hook = attention.register_forward_pre_hook(_Watched(stats, keep, home), with_kwargs=True)
    try:
        with observed_hessians(layer, architecture) as hessians, observe(layer, architecture, "max") as stats.maxima:
            yield stats
    finally:
        hook.remove()
    for site in architecture.sites:
        found = {name: hessians[name] for name in site.linears}
        stats.moments |= {name: one.shrunk() if site.experts else one.matrix for name, one in found.items()}


def salience_order(maxima: Tensor, site: Site, architecture: Architecture) -> Tensor:
    """The features of a site from the least to the most salient, int64 [features]; equal ones in natural order.

    What o_proj reads is ordered within each head, alike for the query heads that share a key-value head, so that rows
    of v_proj can be put in this order (authors' code).

    Args:
        maxima: max |x| of each feature, [features].
    """
    if site.name != "attention_output":
        return maxima.argsort(stable=True)
    heads, size = architecture.num_heads, architecture.head_dim
    largest = maxima.view(architecture.num_kv_heads, -1, size).amax(dim=1)
    ranks = largest.argsort(dim=1, stable=True).repeat_interleave(heads // architecture.num_kv_heads, dim=0)
    return (ranks + size * torch.arange(heads, device=maxima.device).unsqueeze(1)).flatten()


@dataclass(frozen=True)
class AttentionBlock:
    """The attention block of a decoder layer and what it was called with."""

    module: nn.Module
    inputs: Sequence[Tensor]
    arguments: dict[str, Any]
    device: torch.device

    def _run(self, hidden: Tensor) -> Tensor:
        with FasterKernels():
            return self.module(hidden_states=hidden.to(self.device), **self.arguments)[0]

    def outputs(self) -> list[Tensor]:
        """[batch, tokens, hidden] for each batch, where its input lies."""
        return [self._run(hidden).to(hidden.device) for hidden in self.inputs]

    def error(self, targets: Sequence[Tensor], bound: float = math.inf) -> float:
        """Sum of squared differences of the outputs now from `targets`, or some number from `bound` on that it exceeds.

        Most shares are far from the best, and end so after a few of the inputs.
        """
        total = 0.0
        for hidden, target in zip(self.inputs, targets, strict=True):
            total += (self._run(hidden).double() - target.to(self.device).double()).square().sum().item()
            if total >= bound:
                break
        return total


def clip_ratios(grid: int) -> list[float]:
    """The shares of a range that are tried: 1 first, so that of equally good ones the largest wins."""
    return [1 - step / grid * (1 - SMALLEST_CLIP) for step in range(grid + 1)]


@torch.no_grad()
def search_block_clip(
    block: AttentionBlock, parameter: Tensor, rows: slice, rounded: Callable[[float], Tensor], ratios: Sequence[float]
) -> float:
    """The one share of the ranges of some rows of a weight with the least error of the attention block's output.

    Args:
        parameter: a linear layer's weight, whose rows are tried one share after the other, and left as they were.
        rounded: those rows under a share, [rows, in].
        ratios: the shares; of equally good ones the first wins.
    """
    exact, targets = parameter[rows].clone(), block.outputs()
    best, least = ratios[0], math.inf
    for ratio in ratios:
        parameter[rows] = rounded(ratio).to(parameter.dtype)
        error = block.error(targets, least)
        if error < least:
            best, least = ratio, error
    parameter[rows] = exact
    return best


def gptq_codes(weight: Tensor, grid: QuantizationGrid, hessian: Tensor, damping: float) -> Tensor:
    """4-bit codes column by column in falling order of the Hessian's diagonal, errors spread over the columns to come.

    Scales stay as they were chosen (authors' code).

    Args:
        weight: [out, in]. hessian: X^T X, [in, in], in the same order of columns.
        damping: share of the Hessian's mean diagonal that is added to its diagonal.

    Raises:
        RotquantError: the hessian is not finite, or not positive definite after damping.
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    spread = error_spread(hessian[order[:, None], order], damping).to(weight.dtype)
    columns = (weight / grid.unit)[:, order].T
    size = grid.scheme.group_size or len(columns)
    scale, zero_point = (part.flatten(1).repeat_interleave(size, dim=1)[:, order].T for part in grid.pair)
    row = grid.scheme.model_copy(update={"granularity": "channel", "group_size": None})

    def round_block(start: int, stop: int) -> Tensor:
        qparams = [QParams(*column) for column in zip(scale[start:stop], zero_point[start:stop], strict=True)]

        def rounded(j: int, column: Tensor) -> Tensor:
            return fake_quantize(grid.bounded(column), row, qparams[j])

        return round_columns(columns[start:stop], spread[start:stop, start:stop], rounded, fused=False)

    round_blocks(columns, spread, range(len(columns)), _BLOCK, round_block, fused=False)
    codes = quantize(grid.bounded(columns), QParams(scale, zero_point), row).T.contiguous()
    return torch.empty_like(codes).index_copy_(1, order, codes)


def smooth_layer(
    layer: nn.Module, architecture: Architecture, stats: LayerStats, settings: QoQ, rotary_dim: int
) -> dict[str, Tensor]:
    """SmoothAttention and the smoothing of block outputs, in place.

    Args:
        rotary_dim: how many dimensions of a head RoPE turns.

    Returns:
        X^T X of what every linear layer reads afterwards, by name.
    """
    moments = dict(stats.moments)
    if settings.attention_alpha:
        smooth_attention(layer, architecture, stats.keys, settings.attention_alpha, rotary_dim)
    for place in settings.smoothed:
        scales = smooth_output(
            layer, architecture, architecture.site(place), stats.maxima[place], settings.output_alpha
        )
        for name, scale in scales.items():
            moments[name] = (moments[name] / torch.outer(scale, scale)).to(moments[name].dtype)
    return moments


@dataclass(frozen=True)
class Rounder:
    """State of one call of `quantize_layer` after the smoothing: a layer whose weights are still of full precision.

    moments: X^T X by linear layer. orders: the features' by site, where they are ordered.
    """

    layer: nn.Module
    architecture: Architecture
    settings: QoQ
    scheme: QuantizationScheme
    moments: dict[str, Tensor]
    orders: dict[str, Tensor]
    block: AttentionBlock

    def quantized(self, site: Site, name: str) -> QuantizedWeight:
        """Clip and round one weight of a site."""
        weight, moment, order = linear_of(self.layer, name).weight, self.moments[name], self.orders.get(site.name)
        weight = weight.to(moment.dtype)
        if order is not None:
            weight, moment = weight[:, order], moment[order[:, None], order]
        ratio = self._shares(name, weight, moment, order) if self.settings.clip_search else 1.0
        grid = self._grid(weight, ratio)
        if self.settings.rounding == "gptq":
            codes = gptq_codes(weight, grid, moment, self.settings.damping)
        else:
            codes = grid.codes(weight)
        return QuantizedWeight(codes, grid.qparams, self.scheme, order)

    def _grid(self, weight: Tensor, ratio: float | Tensor) -> QuantizationGrid:
        return choose_grid(weight, self.scheme, ratio, self.settings.intermediate)

    def _shares(self, name: str, weight: Tensor, moment: Tensor, order: Tensor | None) -> Tensor:
        """Search the share of every scale's range: of queries and keys by the attention block's output, of other rows
        by their own."""
        ratios, shape = clip_ratios(self.settings.clip_grid), self.architecture
        shares = torch.ones_like(choose_qparams(weight, self.scheme).scale)
        others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
        for projection in (shape.query, shape.key):
            if projection.name == name:
                rows = slice(*(projection.rows or (None,)))
                rounded = partial(self._rounded, weight[rows], order)
                parameter = linear_of(self.layer, name).weight
                shares[rows] = search_block_clip(self.block, parameter, rows, rounded, ratios)
                others[rows] = False
        if others.any():
            own = weight[others]
            shares[others] = search_ratios(
                own, moment, self.scheme, ratios, lambda ratio: self._grid(own, ratio).rounded(own)
            )
        return shares

    def _rounded(self, weight: Tensor, order: Tensor | None, ratio: float) -> Tensor:
        """Rows of a weight under a share of their ranges, columns in natural order."""
        values = self._grid(weight, ratio).rounded(weight)
        return values if order is None else torch.empty_like(values).index_copy_(1, order, values)


@torch.no_grad()
def quantize_layer(
    layer: nn.Module,
    architecture: Architecture,
    stats: LayerStats,
    settings: QoQ,
    scheme: QuantizationScheme,
    rotary_dim: int,
) -> dict[str, QuantizedWeight]:
    """Smooth, search and round one decoder layer, in place; its integer weights by name.

    Args:
        stats: of the layer in full precision.
        scheme: of the weights. rotary_dim: how many dimensions of a head RoPE turns.
    """
    moments = smooth_layer(layer, architecture, stats, settings, rotary_dim)
    orders = {
        site.name: salience_order(stats.maxima[site.name], site, architecture)
        for site in architecture.sites
        if scheme.granularity == "group"
        and (settings.reorder == "all" or (settings.reorder == "outputs" and site.norm is None))
    }
    module, device = layer.get_submodule(architecture.attention), stats.keys.device
    block = AttentionBlock(module, stats.attention, stats.arguments, device)
    rounder = Rounder(layer, architecture, settings, scheme, moments, orders, block)
    weights = {name: rounder.quantized(site, name) for site in architecture.sites for name in site.linears}
    for name, weight in weights.items():  # after all searches, which see the others in full precision
        parameter = linear_of(layer, name).weight
        parameter.copy_(weight.dequantize(parameter.dtype))
    return weights


def apply(settings: QoQ, context: QuantizationContext) -> None:
    """Smooth, search and round layer by layer, on inputs of the full-precision model.

    Activations and KV cache are not quantized meanwhile.
    """
    context.keep_layers(_quantized_layers(settings, context))


def _quantized_layers(settings: QoQ, context: QuantizationContext) -> Iterator[dict[str, QuantizedWeight]]:
    architecture, scheme, stream = context.architecture, context.recipe.rounded.scheme, context.capture()
    with wrap(context.model, context.online):
        watch = partial(watched, architecture=architecture, keep=settings.clip_search, home=stream.hidden.device)
        # Every layer reads what full precision gives.
        for index, layer, stats in stream.observed_layers("QoQ", watch):
            rotary_dim = stream.kwargs[index]["position_embeddings"][0].shape[-1]
            yield quantize_layer(layer, architecture, stats, settings, scheme, rotary_dim)
