"""Bytes of the folder that quantizing a model writes, by the storage format of `weights.packing`.

Exact but for what only the work decides: the length of a prefix, tables of levels that are stored shorter, zero points
beyond a byte; and for the manifest's and the headers' texts, of which the lengths are estimated.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from rotquant.costs.memory import Part
from rotquant.costs.work import Work, online_matrices
from rotquant.models.folders import settings_files
from rotquant.models.simulation.kv_cache import static_shape
from rotquant.weights.actions import hooks
from rotquant.weights.bits import weight_bits
from rotquant.weights.ranges import static_schemes

#: Bytes of a tensor's entry in a file's header, and of a weight's in the manifest, names and shapes in them.
_ENTRY, _LISTED = 130, 105
#: Bytes of the manifest beside that, and of the configurations.
_MANIFEST, _CONFIGURATIONS = 4000, 1500
#: Tokens of a prefix that is not found yet.
_PREFIX = 4


def disk(work: Work, folder: Path | None = None) -> list[Part]:
    """What the folder of a quantized model takes, part by part.

    Args:
        folder: of the checkpoint, whose tokenizer is copied; None where it is not here.
    """
    shapes, recipe = work.shapes, work.recipe
    bits = stored_bits(work)
    weights = sum(bits.values()) // 8
    per_weight = 8 * weights / shapes.quantized_parameters if shapes.quantized else 0.0
    floats = (work.parameters - shapes.quantized_parameters) * work.kept
    apart = ", head apart from the embedding" if shapes.tied and work.parameters > shapes.parameters else ""
    state = sum(_state(work))
    tensors = len(shapes.quantized) * sum(map(bool, bits.values())) + len(shapes.floats)
    texts = _ENTRY * tensors + _LISTED * len(shapes.quantized) + _MANIFEST + _CONFIGURATIONS
    parts = [
        Part("quantized weights", weights, f"{shapes.quantized_parameters:,} x {per_weight:.3g} bits: {_words(bits)}"),
        Part("other parameters", floats, f"embedding, head, norms of {8 * work.kept} bits{apart}"),
        Part("run-time tensors", state, f"{', '.join(recipe.methods) or 'recipe'}: static scales, transforms, prefix"),
        Part("manifest and headers", texts, f"{tensors:,} tensors"),
    ]
    if folder is not None:
        size = sum(path.stat().st_size for path in settings_files(folder) if path.name.startswith("tokenizer"))
        parts.append(Part("tokenizer", size, "copied from the checkpoint"))
    return [part for part in parts if part.bytes]


def stored_bits(work: Work) -> dict[str, int]:
    """Bits of all quantized weights by part as files hold them: integers of 2 and 3 bits in half bytes, rows in whole
    bytes."""
    recipe, found = work.recipe, dict[str, int]()
    if recipe.weights is None:
        return {"floats": 8 * work.itemsize * work.shapes.quantized_parameters}
    integers = all(method.stored_as == "integers" for method in recipe.methods.values() if "rounding" in method.roles)
    sites = {name: site for site in work.shapes.architecture.sites for name in site.linears}
    for name, (rows, columns) in work.shapes.quantized.items():
        site = next(sites[own] for own in sites if name.endswith(f".{own}.weight"))
        parts = weight_bits(recipe, rows, columns, 8 * work.itemsize, site)
        if integers and recipe.weights.scheme.bits < 8:
            normal = columns - recipe.outlier_features(site.name, columns)
            parts["codes"] = 8 * rows * ((normal + 1) // 2 if recipe.weights.scheme.bits <= 4 else normal)
        for part, count in parts.items():
            found[part] = found.get(part, 0) + count
    return found


def _state(work: Work) -> Iterator[int]:
    """Bytes of the tensors that are read at run time: those of methods, and static scales."""
    architecture = work.shapes.architecture
    for method in work.recipe.methods.values():
        for shape in hooks(method).tensors(method, architecture).values():
            yield 4 * prod(_PREFIX if size == -1 else size for size in shape)
    yield from online_matrices(work).values()
    for name, scheme in static_schemes(work.recipe, architecture).items():
        heads = static_shape(scheme, architecture.num_kv_heads) if name in ("keys", "values") else ()
        yield architecture.num_layers * 4 * prod(heads) * (1 if scheme.symmetric else 2)


def _words(bits: dict[str, int]) -> str:
    """The parts with their shares, as "codes 97 %, scales 3 %"."""
    every = sum(bits.values())
    return ", ".join(f"{part.replace('_', ' ')} {count / every:.2g}" for part, count in bits.items() if count)
