"""Effective bits per weight: what a stored weight costs with scales, zero points, outliers, tables and permutations.
And of a number in the KV cache.

Derived from a recipe and the shapes of the linear layers, by the storage format of `weights.packing`; a test compares
it with stored files. Scales are float32, those of 4-bit floats 8 bits with a float32 a weight of NVFP4, whole zero
points one byte, permutations int16 up to 32,768 features, tables of levels float16. Outlier features of 16 bits are
stored in the model's own type, which is float32 in simulations on a
CPU. Codes count at their own width: the padding of rows to whole bytes, and of 2- and 3-bit integers to half a byte, is
no part of it. A table of RCP whose partitions have not moved is stored shorter than is counted here.
"""

from collections.abc import Mapping

from torch import Tensor

from rotquant.models.architectures import Architecture, Site
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import UNQUANTIZED_BITS

#: Roles whose stored tensors belong to the weights; a prefix belongs to the cache, and scales to the inputs.
_OF_WEIGHTS = {"transformation", "selection", "rounding"}
_SCALE = 32
_LEVEL = 16
#: Features that int16 can number.
_SHORT = 2**15


def bits_per_weight(
    recipe: Recipe,
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, int]],
    float_bits: int = 32,
    stored: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, float]:
    """Bits per weight of the quantized linear layers by what they are for, and their sum under `total`.

    Args:
        recipe: of the stored weights. architecture: of the model.
        shapes: [out, in] of every quantized weight by its full name; none where weights are not quantized.
        float_bits: of a number of the model's floating-point type.
        stored: tensors that methods store, by the methods' names: rotations and permutations are counted.
    """
    if not shapes:
        return {"codes": float(UNQUANTIZED_BITS), "total": float(UNQUANTIZED_BITS)}
    sites = {f"{name}.weight": site for site in architecture.sites for name in site.linears}
    bits: dict[str, float] = {}
    for name, (rows, columns) in shapes.items():
        site = next(sites[own] for own in sites if name.endswith(f".{own}"))
        for part, count in weight_bits(recipe, rows, columns, float_bits, site).items():
            bits[part] = bits.get(part, 0) + count
    for method, tensors in (stored or {}).items():
        if _OF_WEIGHTS & recipe.methods[method].roles:
            bits["transforms"] = bits.get("transforms", 0) + sum(8 * tensor.nbytes for tensor in tensors.values())
    weights = sum(rows * columns for rows, columns in shapes.values())
    found = {part: count / weights for part, count in bits.items() if count}
    return {**found, "total": sum(found.values())}


def bits_per_cached(recipe: Recipe, head_dim: int, kv_heads: int) -> float:
    """Bits of a number in the KV cache with its share of scales and zero points, a mean of keys and values.

    Each has 16 bits, as the decoder stores them; by vLLM's rule a scale has 32, with the zero point in it. Static ones
    cost nothing a token. What the first and recent tokens keep does not grow with the text and is not counted.
    """
    found = []
    for scheme in (recipe.keys, recipe.values):
        if scheme is None:
            found.append(float(UNQUANTIZED_BITS))
            continue
        size = scheme.group_size or (head_dim if scheme.granularity == "head" else kv_heads * head_dim)
        scale = 32 if scheme.rule == "vllm" or not scheme.symmetric else 16
        found.append(scheme.bits + (scale / size if scheme.dynamic else 0.0))
    return sum(found) / len(found)


def weight_bits(recipe: Recipe, rows: int, columns: int, float_bits: int, site: Site) -> dict[str, int]:
    """Bits of one stored weight [rows, columns] by part.

    Args:
        float_bits: of an outlier that stays floating point.
        site: what the weight reads.
    """
    scheme = recipe.rounded.scheme
    rounding = next((method for method in recipe.methods.values() if "rounding" in method.roles), None)
    form = "integers" if rounding is None else rounding.stored_as
    if form == "lattice":  # a sign for every row and column, one scale
        return {"codes": scheme.bits * rows * columns, "scales": _SCALE, "signs": 8 * (rows + columns)}
    outliers = recipe.outlier_features(site.name, columns)
    normal = columns - outliers
    groups = rows * -(-normal // (scheme.group_size or normal)) if scheme.granularity != "tensor" else 1
    codes = {"codes": scheme.bits * rows * normal}
    if rounding is not None and form == "codebook":
        return {**codes, "tables": _LEVEL * rounding.codebook_entries(recipe) * groups}
    eight = outliers > 0 and any(getattr(method, "bits", 16) == 8 for method in recipe.methods.values())
    ordered = outliers > 0 or (rounding is not None and rounding.orders_columns(recipe, site.norm is not None))
    return {
        **codes,
        "scales": 8 * groups + _SCALE * (scheme.fp4 == "NVFP4") if scheme.fp4 else _SCALE * groups,
        "zero_points": 0 if scheme.symmetric else 8 * groups,
        "outliers": rows * (8 * outliers + _SCALE if eight else float_bits * outliers),
        "order": (16 if columns <= _SHORT else 32) * columns if ordered else 0,
    }
