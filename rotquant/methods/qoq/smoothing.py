"""QoQ's equivalent transformations: SmoothAttention (QServe Sec. 4.2) and smoothed block outputs (Sec. 4.3.2).

Both are folded into weights and biases, in place, and never change the function; nothing is quantized here. Query heads
that share a key-value head share its scales.
"""

import torch
from torch import Tensor, nn

from rotquant.methods.omniquant.block_reconstruction import per_kv_head, per_query_head, rotary_pairs
from rotquant.models.architectures import Architecture, Projection, Site, linear_of


def attention_scale(maxima: Tensor, alpha: float, rotary_dim: int) -> Tensor:
    """lambda_i = max|K_i|^alpha, over the two dimensions that RoPE turns into each other (Sec. 4.2).

    Args:
        maxima: max |k| of each dimension over calibration tokens, as the cache has them, [kv heads, head_dim].
        alpha: 0 gives ones.
        rotary_dim: how many dimensions of a head RoPE turns, always the first ones.

    Returns:
        [kv heads, head_dim], positive; one where a key is always zero.
    """
    pairs = rotary_pairs(maxima.shape[1], rotary_dim, maxima.device)
    largest = maxima.new_zeros(len(maxima), int(pairs.max()) + 1)
    largest.scatter_reduce_(1, pairs.expand_as(maxima), maxima, "amax")
    return _usable(largest**alpha)[:, pairs]


def output_scale(maxima: Tensor, weight_maxima: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), which near alpha = 0 the weights decide; any shape.

    One where a feature is always zero or no weight reads it.
    """
    scale = maxima**alpha / weight_maxima ** (1 - alpha)
    return _usable(torch.where(maxima > 0, scale, torch.ones_like(scale)))


def _usable(scale: Tensor) -> Tensor:
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def smooth_attention(layer: nn.Module, architecture: Architecture, scale: Tensor) -> None:
    """K / lambda and Q lambda by the rows of k_proj and q_proj, with their biases.

    Args:
        layer: a decoder layer.
        scale: lambda of `attention_scale`.
    """
    scale_rows(layer, architecture.key, 1 / scale.double().flatten())
    scale_rows(layer, architecture.query, per_query_head(scale.double(), architecture))


def smooth_output(layer: nn.Module, architecture: Architecture, site: Site, maxima: Tensor, alpha: float) -> Tensor:
    """Divide what o_proj or down_proj reads, in v_proj or up_proj, and multiply the weight that reads it.

    Args:
        layer: a decoder layer.
        site: `attention_output` or `mlp_output`.
        maxima: max |x| of its features over calibration tokens, [features].

    Returns:
        By what the site's features were divided, float64 [features].
    """
    weight = linear_of(layer, site.linears[0]).weight
    largest, read = maxima.double(), weight.detach().double().abs().amax(dim=0)
    if site.name == "mlp_output":
        scale = rows = output_scale(largest, read, alpha)
        before = architecture.up
    else:
        largest, read = (per_kv_head(features, architecture) for features in (largest, read))
        rows = output_scale(largest, read, alpha)
        scale, before = per_query_head(rows, architecture), architecture.value
    scale_rows(layer, before, 1 / rows.flatten())
    with torch.no_grad():
        weight.copy_(weight.double() * scale)
    return scale


@torch.no_grad()
def scale_rows(layer: nn.Module, projection: Projection, factor: Tensor) -> None:
    """Multiply the outputs of a projection, rows of its weight and bias, by `factor` [rows], in place."""
    linear, rows = linear_of(layer, projection.name), slice(*(projection.rows or (None,)))
    factor = factor.to(linear.weight.device, torch.float64)
    linear.weight[rows] = (linear.weight[rows].double() * factor.unsqueeze(1)).to(linear.weight.dtype)
    if linear.bias is not None:
        linear.bias[rows] = (linear.bias[rows].double() * factor).to(linear.bias.dtype)
