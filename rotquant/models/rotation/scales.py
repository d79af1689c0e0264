"""Scales that are merged into a model's weights with its rotations (OSTQuant, Hu et al. 2025, Sec. 4.1).

A feature is divided by a positive number where it is made, and the weights that read it are multiplied by that. What
norms give is divided behind R1, in the norms' gains; values, keys and the products of gate and up before R2, R3 and R4,
in the rows of their projections. The function of the model stays.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture
from rotquant.models.equivalent import (
    InPlace,
    divide_norm,
    divide_rows,
    divide_values,
    held_scale,
    key_scales,
    scale_keys,
)


def scale_shapes(architecture: Architecture, residual: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's scales by what they divide.

    `attention_input` and `mlp_input` [hidden] where there is an R1; `values` [kv heads, head_dim]; `keys` [number of
    `key_scales`, head_dim], where the two dimensions that RoPE turns into each other have one number; `mlp_output`
    [intermediate], which all experts share.
    """
    shape = architecture
    sites = {site.name: (shape.hidden_size,) for site in shape.sites if residual and site.norm is not None}
    heads = {"values": (shape.num_kv_heads, shape.head_dim), "keys": (key_scales(shape), shape.head_dim)}
    return {**sites, **heads, "mlp_output": (shape.intermediate_size,)}


def check_scales(architecture: Architecture, residual: bool, scales: Mapping[str, tuple[Tensor, ...]]) -> None:
    """Raise `RecipeError` unless these are positive numbers of the model's shapes for every layer."""
    shapes = scale_shapes(architecture, residual)
    for name, every in scales.items():
        if len(every) != architecture.num_layers or any(tuple(one.shape) != shapes.get(name) for one in every):
            raise RecipeError(f"the scales of {name} do not belong to this recipe and {architecture.family} model.")
        if not all(bool((one > 0).all()) for one in every):
            raise RecipeError(f"the scales of {name} are not positive.")


@torch.no_grad()
def divide_inside(layer: nn.Module, architecture: Architecture, scales: Mapping[str, Tensor]) -> None:
    """Divide keys, values and the products of gate and up of a layer that is not rotated yet, in place."""
    parameters = InPlace(layer)
    if "values" in scales:
        divide_values(parameters, architecture, scales["values"])
    if "keys" in scales:
        scale_keys(parameters, architecture, 1 / scales["keys"])
    if "mlp_output" in scales:
        for down in architecture.site("mlp_output").linears:
            divide_rows(parameters, architecture.up_of(down), [down], scales["mlp_output"])


@torch.no_grad()
def divide_norms(layer: nn.Module, architecture: Architecture, scales: Mapping[str, Tensor]) -> None:
    """Divide what the norms of a layer give behind R1, in place: after `divide_inside` and the rotation."""
    for site in architecture.sites:
        if site.norm is not None and site.name in scales:
            divide_norm(InPlace(layer), architecture, site, held_scale(layer, architecture, site, scales[site.name]))
