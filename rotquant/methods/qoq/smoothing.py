"""QoQ's equivalent transformations: SmoothAttention (QServe Sec. 4.2) and smoothed block outputs (Sec. 4.3.2).

Both are folded into weights, biases and gains of norms, in place, and never change the function; nothing is quantized
here. Query heads that share a key-value head share its scales, and heads that share a norm's gain share theirs.
"""

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture, Site, linear_of
from rotquant.models.equivalent import (
    InPlace,
    divide_rows,
    divide_values,
    key_scales,
    per_kv_head,
    per_query_head,
    rotary_pairs,
    scale_keys,
)


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


@torch.no_grad()
def smooth_attention(layer: nn.Module, architecture: Architecture, maxima: Tensor, alpha: float, rotary: int) -> None:
    """K / lambda and Q lambda: in k_proj and q_proj with their biases, or in the gains of their norms.

    Args:
        layer: a decoder layer.
        maxima, alpha: as for `attention_scale`. rotary: how many dimensions of a head RoPE turns.
    """
    largest = maxima.amax(dim=0, keepdim=True) if key_scales(architecture) == 1 else maxima
    scale_keys(InPlace(layer), architecture, 1 / attention_scale(largest, alpha, rotary).double())


@torch.no_grad()
def smooth_output(
    layer: nn.Module, architecture: Architecture, site: Site, maxima: Tensor, alpha: float
) -> dict[str, Tensor]:
    """Divide what o_proj or down_proj reads, in v_proj or up_proj, and multiply the weight that reads it.

    Args:
        layer: a decoder layer.
        site: `attention_output` or `mlp_output`.
        maxima: max |x| of its features over calibration tokens, [features].

    Returns:
        By what the features were divided that each linear layer reads, float64 [features].
    """
    found, parameters = {}, InPlace(layer)
    for name in site.linears:
        largest, read = maxima.double(), linear_of(layer, name).weight.detach().double().abs().amax(dim=0)
        if site.name == "mlp_output":
            found[name] = output_scale(largest, read, alpha)
            divide_rows(parameters, architecture.up_of(name), [name], found[name])
        else:
            heads = output_scale(per_kv_head(largest, architecture), per_kv_head(read, architecture), alpha)
            divide_values(parameters, architecture, heads)
            found[name] = per_query_head(heads, architecture)
    return found
