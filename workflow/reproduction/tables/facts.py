"""Facts of a recipe in the words of the papers' tables of settings, derived from the recipe and from nothing else.

A fact is about a part of the network: its weights, the inputs of its linear layers, or what the KV cache stores.
"""

from collections.abc import Callable
from typing import Literal

from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme

Part = Literal["weights", "activations", "attention_output", "keys", "values", "cache"]
"""What is quantized; `cache` is keys and values."""

FactName = Literal["granularity", "group_size", "extent", "symmetry", "scales", "bits", "clipping"]

#: Of a part that a recipe leaves as it is.
UNQUANTIZED = "not quantized"


def fact(recipe: Recipe, part: Part, name: FactName) -> str:
    """One fact of a part, such as "per-token" or "asymmetric"; of keys and values both, where they differ."""
    if part != "cache":
        return _fact(recipe, part, name)
    keys, values = (_fact(recipe, one, name) for one in ("keys", "values"))
    return keys if keys == values else f"keys {keys}, values {values}"


def _fact(recipe: Recipe, part: Part, name: FactName) -> str:
    scheme = _scheme(recipe, part)
    return UNQUANTIZED if scheme is None else FACTS[name](recipe, scheme, part)


def _scheme(recipe: Recipe, part: Part) -> QuantizationScheme | None:
    """How a part is quantized; o_proj's input as those of other layers where the recipe sets nothing else."""
    if part == "weights":
        return recipe.weights and recipe.weights.scheme
    if part == "attention_output" and recipe.attention_output is None:
        return recipe.activations
    return getattr(recipe, part)


def _granularity(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """What shares a scale."""
    return f"per-{scheme.granularity}"


def _group_size(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """Of groups, "-" where scales are of something else."""
    return "-" if scheme.group_size is None else str(scheme.group_size)


def _extent(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """The same, with the size of groups."""
    return f"groups of {scheme.group_size}" if scheme.granularity == "group" else _granularity(recipe, scheme, part)


def _symmetry(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    return "symmetric" if scheme.symmetric else "asymmetric"


def _scales(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """When scales are known: those of weights before any text."""
    return "dynamic" if scheme.dynamic and part != "weights" else "static"


def _bits(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    return str(scheme.bits)


def _clipping(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """By which search or learning the range is clipped, or the share of it that is kept; "none" where it is all."""
    if part == "weights":
        chosen = (method.clips_weights(recipe) for method in recipe.methods.values())
        searched = "search" if recipe.rounded.clip_search else None
        way = next((way for way in (*chosen, searched) if way is not None), None)
        if way is not None:
            return way
    if not (scheme.dynamic or part == "weights") and recipe.has_role("scales"):
        return "search"
    return "none" if scheme.clip_ratio == 1 else f"{scheme.clip_ratio:g}"


FACTS: dict[FactName, Callable[[Recipe, QuantizationScheme, Part], str]] = {
    "granularity": _granularity,
    "group_size": _group_size,
    "extent": _extent,
    "symmetry": _symmetry,
    "scales": _scales,
    "bits": _bits,
    "clipping": _clipping,
}
