"""Facts of a recipe in the words of the papers' tables of settings, derived only from the recipe.

A fact concerns a part of the network: the weights, the inputs of linear layers, or the KV cache.
"""

from collections.abc import Callable
from typing import Literal

from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme

Part = Literal["weights", "activations", "attention_output", "keys", "values", "cache"]
"""The quantized part; `cache` is keys and values."""

FactName = Literal["granularity", "group_size", "extent", "symmetry", "scales", "bits", "clipping"]

#: Text for a part that a recipe does not quantize.
UNQUANTIZED = "not quantized"


def fact(recipe: Recipe, part: Part, name: FactName) -> str:
    """One fact of a part, such as "per-token" or "asymmetric"; both keys' and values' where they differ."""
    if part != "cache":
        return _fact(recipe, part, name)
    keys, values = (_fact(recipe, one, name) for one in ("keys", "values"))
    return keys if keys == values else f"keys {keys}, values {values}"


def _fact(recipe: Recipe, part: Part, name: FactName) -> str:
    scheme = _scheme(recipe, part)
    return UNQUANTIZED if scheme is None else FACTS[name](recipe, scheme, part)


def _scheme(recipe: Recipe, part: Part) -> QuantizationScheme | None:
    """The quantization scheme of a part; by default o_proj's input has the scheme of other layers' inputs."""
    if part == "weights":
        return recipe.weights and recipe.weights.scheme
    if part == "attention_output" and recipe.attention_output is None:
        return recipe.activations
    return getattr(recipe, part)


def _clipping(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """The search or learning that clips the range, or the share of the range that is kept; "none" without clipping."""
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
    "granularity": lambda recipe, scheme, part: f"per-{scheme.granularity}",
    "group_size": lambda recipe, scheme, part: "-" if scheme.group_size is None else str(scheme.group_size),
    "extent": lambda recipe, scheme, part: (
        f"groups of {scheme.group_size}" if scheme.granularity == "group" else f"per-{scheme.granularity}"
    ),
    "symmetry": lambda recipe, scheme, part: "symmetric" if scheme.symmetric else "asymmetric",
    "scales": lambda recipe, scheme, part: "dynamic" if scheme.dynamic and part != "weights" else "static",
    "bits": lambda recipe, scheme, part: str(scheme.bits),
    "clipping": _clipping,
}
"""Each fact of a part. granularity: the numbers that share a scale; extent: the same, with the size of groups; weights'
scales are static."""
