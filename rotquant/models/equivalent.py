"""Equivalent scalings of a decoder layer: one number moves from a weight to another, and the function stays.

SmoothQuant, AWQ, OmniQuant, DuQuant and QoQ choose scales; what a scale does to norms, weights and biases is here. The
functions change a mapping of parameters by name: a dictionary, of which training differentiates, or `InPlace`.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import cast

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture, Projection, Site, norm_of
from rotquant.recipes.transforms import Transform, at_site

Parameters = MutableMapping[str, Tensor]
#: Smallest factor and smallest weight maximum, so that a dead channel divides nothing by zero.
SMALLEST = 1e-5


class InPlace(Parameters):
    """The parameters of a decoder layer by name, as float64; what is assigned is written into the layer at once."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def _parameter(self, name: str) -> Tensor | None:
        owner, _, own = name.rpartition(".")
        return getattr(self.layer.get_submodule(owner), own, None)

    def __getitem__(self, name: str) -> Tensor:
        return cast(Tensor, self._parameter(name)).detach().double()

    @torch.no_grad()
    def __setitem__(self, name: str, value: Tensor) -> None:
        cast(Tensor, self._parameter(name)).copy_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a layer keeps its parameters")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._parameter(name) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.layer.named_parameters())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def scaled_gain(weight: Tensor, factor: Tensor, offset: float) -> Tensor:
    """The weight of an RMSNorm whose gain, weight + offset, is multiplied by `factor` [features]."""
    return (weight + offset) * factor - offset


def held_scale(layer: nn.Module, architecture: Architecture, site: Site, scale: Tensor) -> Tensor:
    """The scale nearest to `scale` [features] by which the norm before a site can be divided in its own type, float64.

    A weight of 16 bits rounds (1 + w) / s - 1 coarsely where the gain becomes small beside 1. What reads the norm is
    then multiplied by what the gain was really divided by, so that the function stays. Wider types hold any scale.
    """
    weight, offset, scale = norm_of(layer, site).weight.detach(), architecture.norm_offset, scale.double()
    if weight.dtype.itemsize >= 4:
        return scale
    scale = scale.to(weight.device)
    gain = weight.double() + offset
    least = torch.finfo(weight.dtype).eps / 2 * offset  # the smallest gain next to none
    wanted = torch.where(gain == 0, gain, (gain / scale).abs().clamp(min=least) * gain.sign())
    found = (wanted - offset).to(weight.dtype).double() + offset
    return torch.where(found == 0, scale, gain / found)


def divide_norm(parameters: Parameters, architecture: Architecture, site: Site, scale: Tensor) -> None:
    """x / s for what a site's norm gives, and W diag(s) for all that reads it, a router too; scale: [features].

    Raises:
        ValueError: no norm precedes the site, so that the division has no place to go.
    """
    if site.norm is None:
        raise ValueError(f"site {site.name} has no norm that could absorb the smoothing scale")
    name = f"{site.norm}.weight"
    parameters[name] = scaled_gain(parameters[name], 1 / scale, architecture.norm_offset)
    scale_columns(parameters, site.readers, scale)


def divide_rows(parameters: Parameters, before: Projection, readers: Iterable[str], scale: Tensor) -> None:
    """x / s for what a projection gives, in its rows, and W diag(s) for the linear layers that read it."""
    scale_rows(parameters, before, 1 / scale)
    scale_columns(parameters, readers, scale)


def divide_values(parameters: Parameters, architecture: Architecture, scale: Tensor) -> None:
    """v / s, and o_proj's columns times s: scale [kv heads, head_dim], which the query heads of a value head share."""
    scale_rows(parameters, architecture.value, 1 / scale.flatten())
    scale_columns(parameters, [architecture.attention_output], per_query_head(scale, architecture))


def scale_keys(parameters: Parameters, architecture: Architecture, factor: Tensor) -> None:
    """Keys times a factor and queries divided by it, which leaves their products: [`key_scales`, head_dim].

    Equal for the two dimensions that RoPE turns into each other (`rotary_pairs`). Norms of queries and keys would undo
    a factor in the projections before them, so their gains take it.
    """
    of_queries, of_keys = 1 / per_query_head(factor, architecture), factor.flatten()
    if architecture.head_norms is None:
        scale_rows(parameters, architecture.query, of_queries)
        scale_rows(parameters, architecture.key, of_keys)
        return
    if architecture.head_norms == "head":
        of_queries, of_keys = 1 / factor[0], factor[0]
    for norm, own in zip(architecture.head_norm_names, (of_queries, of_keys), strict=True):
        parameters[f"{norm}.weight"] = scaled_gain(parameters[f"{norm}.weight"], own, architecture.norm_offset)


def key_scales(architecture: Architecture) -> int:
    """How many heads of keys have scales of their own: one where all share the gain of a norm."""
    return 1 if architecture.head_norms == "head" else architecture.num_kv_heads


def scale_rows(parameters: Parameters, projection: Projection, factor: Tensor) -> None:
    """Multiply the outputs of a projection, rows of its weight and bias, by `factor` [rows]."""
    for name in (f"{projection.name}.weight", f"{projection.name}.bias"):
        if name not in parameters:
            continue
        value = parameters[name]
        own = factor.to(value.device)
        own = own if value.ndim == 1 else own.unsqueeze(-1)
        if projection.rows is None:
            parameters[name] = value * own
        else:
            start, stop = projection.rows
            parameters[name] = torch.cat([value[:start], value[start:stop] * own, value[stop:]])


def scale_columns(parameters: Parameters, linears: Iterable[str], factor: Tensor) -> None:
    """Multiply the input features of linear layers by `factor` [features]."""
    for name in linears:
        weight = parameters[f"{name}.weight"]
        parameters[f"{name}.weight"] = weight * factor.to(weight.device)


def producers(
    architecture: Architecture, site: Site, transforms: Iterable[Transform] = ()
) -> dict[str, Projection] | None:
    """Of a site without norm, for each linear layer the projection whose rows it reads feature by feature, or None.

    o_proj reads v_proj's where every query head has a value head of its own (as in AWQ's code), down_proj up_proj's
    (times the activated gate), of the same expert. An online transform in between mixes the features, and the residual
    stream is nobody's own.
    """
    if site.name == "mlp_output" and not at_site(transforms, site.name):
        return {name: architecture.up_of(name) for name in site.linears}
    shared = architecture.num_heads != architecture.num_kv_heads
    if site.name != "attention_output" or shared or at_site(transforms, site.name):
        return None
    return {architecture.attention_output: architecture.value}


def smoothing_scale(activation_maxima: Tensor, weight_maxima: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's scale (Xiao et al. 2023, Eq. 4): s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), at least 1e-5.

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


def per_query_head(scale: Tensor, architecture: Architecture) -> Tensor:
    """[kv heads, head_dim] repeated for the query heads that share a kv head: [heads * head_dim]."""
    return scale.repeat_interleave(architecture.num_heads // architecture.num_kv_heads, dim=0).flatten()


def per_kv_head(features: Tensor, architecture: Architecture) -> Tensor:
    """Largest over the query heads that share a kv head: [heads * head_dim] -> [kv heads, head_dim]."""
    return features.view(architecture.num_kv_heads, -1, architecture.head_dim).amax(dim=1)


def rotary_pairs(head_dim: int, rotary_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Index of the scale of each dimension of a head: one for the two that RoPE turns into each other, int64
    [head_dim].

    RoPE mixes dimensions i and i + rotary_dim / 2, so only a scale that both share commutes with it.
    """
    channels = torch.arange(head_dim, device=device)
    half = rotary_dim // 2
    return torch.where(channels < rotary_dim, channels % half, channels - half)
