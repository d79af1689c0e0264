"""Models whose weights are codes into random tables: what a method that learns levels would store, without learning."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.tensors.codebook import CodebookWeight
from rotquant.weights.build import build_weights
from rotquant.weights.storage import StoredModel


def table_recipe(group_size: int | None, bits: int = 2, **changes: Any) -> Recipe:
    """QuaRot's rotations and its quantizers of inputs and cache, which RCP has too, around such weights.

    group_size: None for whole rows.
    """
    granularity = "channel" if group_size is None else "group"
    scheme = {"bits": bits, "symmetric": False, "granularity": granularity, "group_size": group_size}
    recipe = override(preset("quarot-rtn"), {"weights": {"scheme": scheme, "clip_search": False}}, "")
    return override(recipe, changes, "") if changes else recipe


def random_codebook(weight: Tensor, group_size: int | None, bits: int, generator: torch.Generator) -> CodebookWeight:
    """A weight [out, in] rounded to ascending levels of its groups: their ends, and random numbers between."""
    groups = weight.detach().float().unflatten(1, (-1, group_size or weight.shape[1]))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    inner = torch.rand(*groups.shape[:2], 2**bits - 2, generator=generator).sort(-1).values
    levels = torch.cat([low, low + inner * (high - low), high], dim=-1).half()
    middles = (levels[..., 1:].float() + levels[..., :-1].float()) / 2
    codes = sum((groups > middle).to(torch.uint8) for middle in middles.split(1, dim=-1))
    return CodebookWeight(codes.flatten(1), levels)


def build_levels(model: Any, recipe: Recipe, tokenizer: Any = None, seed: int = 0, **options: Any) -> StoredModel:
    """`build_weights`, its weights rounded anew to random levels; `model` then has these."""
    stored, generator = build_weights(model, tokenizer, recipe, seed, **options), torch.Generator().manual_seed(seed)
    scheme, parameters = recipe.weights.scheme, dict(model.named_parameters())
    weights = {
        name: random_codebook(parameters[name], scheme.group_size, scheme.bits, generator) for name in stored.weights
    }
    for name, weight in weights.items():
        parameters[name].data = weight.dequantize(parameters[name].dtype)
    return replace(stored, weights=weights)
