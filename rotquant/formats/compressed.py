"""compressed-tensors, a format of quantized checkpoints: packed weights, and a configuration of what acts on them.

A weight `<layer>.weight` [out, in] becomes `<layer>.weight_packed`, int32, codes one after another from the lowest bit
of each row, with `.weight_scale` [out, groups], `.weight_shape` and, where it is asymmetric, `.weight_zero_point`,
packed along the rows. The library of that name packs them; it is imported where it is used, since that takes seconds.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture, Site
from rotquant.models.simulation.runtime import RuntimeQuantization
from rotquant.models.transforms import Chain, features_at, of_layer
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Transform, at, at_site
from rotquant.tensors.fp4 import pack_scales, unpack_scales
from rotquant.tensors.hadamard import hadamard_matrix
from rotquant.tensors.quantization import QParams
from rotquant.weights.packing import Weight, pack_codes, unpack_codes
from rotquant.weights.rtn import QuantizedWeight

#: Name of the format in `quant_method`, and the library's version whose classes the configuration follows.
METHOD, VERSION = "compressed-tensors", "0.19.0"
#: Parts of a weight, after the name of its layer: `weight` where it is not packed.
PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale")


def targets_name(targets: Iterable[str], layer: str) -> bool:
    """Whether targets of the format name a layer: its full name, or an expression after `re:` that it begins with."""
    with suppress(re.error):  # a damaged expression names no layer
        return any(target == layer or (target[:3] == "re:" and re.match(target[3:], layer)) for target in targets)
    return False


def library(module: str) -> Any:
    """A module of the package compressed-tensors.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        return import_module(f"compressed_tensors.{module}")
    except ImportError:
        raise RecipeError(
            "compressed-tensors is read and written by the package of that name: pip install 'rotquant[serve]'."
        ) from None


def packing() -> Any:
    """The library's functions that pack integers; raises as `library`."""
    return library("compressors.pack_quantized.helpers")


def packed_weight(name: str, weight: Weight, packed: bool = True) -> dict[str, Tensor]:
    """The tensors of a weight by their full names.

    Args:
        name: of the weight, `<layer>.weight`.
        packed: else 8-bit codes are the weight itself, as the formats `int-quantized` and `float-quantized` have them.

    Raises:
        RecipeError: it is no matrix of integers with scales, or a zero point is no code.
    """
    if not isinstance(weight, QuantizedWeight) or weight.outlier_values is not None:
        raise RecipeError(f"{name} is no matrix of integers with scales alone, which compressed-tensors holds.")
    layer, bits = name.removesuffix("weight"), weight.scheme.bits
    codes, scale = weight.codes, weight.qparams.scale
    if weight.columns is not None:  # of one group a row, so that the order means nothing
        codes = torch.empty_like(codes).index_copy_(1, weight.columns, codes)
    if weight.scheme.fp4:
        whole = weight.qparams.global_scale
        shared = {} if whole is None else {f"{layer}weight_global_scale": whole.reshape(1).to(torch.float32)}
        stored = {"weight_packed": pack_codes(codes, bits), "weight_scale": pack_scales(scale, whole).squeeze(-1)}
        return shared | {layer + part: tensor for part, tensor in stored.items()}
    scale = scale.expand(len(codes), 1) if scale.dim() == 0 else scale.reshape(len(codes), -1)
    tensors = {f"{layer}weight_scale": scale.contiguous()}
    if not packed:
        return tensors | {name: codes}
    tensors[f"{layer}weight_packed"] = _packed(codes, bits, weight.scheme.symmetric)
    tensors[f"{layer}weight_shape"] = torch.tensor(weight.shape)
    if weight.qparams.zero_point is not None:
        tensors[f"{layer}weight_zero_point"] = _packed_zero_points(name, weight.qparams.zero_point, scale, bits)
    return tensors


def _packed(codes: Tensor, bits: int, symmetric: bool, dim: int = 1) -> Tensor:
    """Codes as int32, packed along a dimension; the library takes them around zero."""
    signed = codes if symmetric else (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    return packing().pack_to_int32(signed, bits, dim).contiguous()


def _packed_zero_points(name: str, zero_point: Tensor, scale: Tensor, bits: int) -> Tensor:
    found = zero_point.expand(len(scale), 1) if zero_point.dim() == 0 else zero_point.reshape(scale.shape)
    codes = found.clamp(0, 2**bits - 1).to(torch.uint8)
    if not torch.equal(codes.to(found.dtype), found):
        raise RecipeError(
            f"{name} has a zero point outside of its codes 0 to {2**bits - 1}, which compressed-tensors cannot hold: "
            "quantize with --set weights.scheme.symmetric=true, or export with --format plain."
        )
    return _packed(codes, bits, False, dim=0)


def unpacked_weight(parts: Mapping[str, Tensor], scheme: QuantizationScheme, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of its parts by the names of `PARTS`, dequantized as `QuantizedWeight.dequantize` does."""
    if scheme.fp4:
        whole = parts["weight_global_scale"].float().reshape(()) if scheme.fp4 == "NVFP4" else None
        packed, scale = parts["weight_packed"], unpack_scales(parts["weight_scale"], whole).unsqueeze(-1)
        codes = unpack_codes(packed, scheme.bits, False, 2 * packed.shape[1])
        return QuantizedWeight(codes, QParams(scale), scheme).dequantize(dtype)
    scale = parts["weight_scale"].to(torch.promote_types(parts["weight_scale"].dtype, torch.float32))
    if "weight_packed" not in parts:  # int8 or float8 codes, one scale a row
        return (parts["weight"].to(scale.dtype) * scale).to(dtype)
    shape, unpack = [int(size) for size in parts["weight_shape"]], packing().unpack_from_int32
    codes = unpack(parts["weight_packed"], scheme.bits, shape)
    zero_point = torch.zeros_like(scale)
    if "weight_zero_point" in parts:
        zero_point = unpack(parts["weight_zero_point"], scheme.bits, shape, 0).to(scale.dtype)
    qparams = QParams(scale.unsqueeze(-1), zero_point.unsqueeze(-1))
    size = shape[1] // scale.shape[1]
    grouped = QuantizationScheme(bits=scheme.bits, symmetric=False, granularity="group", group_size=size)
    return QuantizedWeight(codes, qparams, grouped).dequantize(dtype)


def arguments(scheme: QuantizationScheme, strategy: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
    """A scheme as the format's QuantizationArgs. It has no clip ratio: scales of dynamic inputs are the engine's."""
    group: dict[str, Any] = {"group_size": scheme.group_size} if scheme.granularity == "group" else {}
    when: bool | str = scheme.dynamic if dynamic is None else dynamic
    if scheme.fp4 == "NVFP4":
        strategy, group["scale_dtype"] = "tensor_group", "torch.float8_e4m3fn"
        when = "local" if dynamic is None and not scheme.dynamic else when  # the scale of the whole tensor is static
    elif scheme.fp4:
        group["scale_dtype"] = "torch.uint8"
    return {
        "num_bits": scheme.bits,
        "type": scheme.type,
        "symmetric": scheme.symmetric,
        "strategy": strategy or scheme.granularity,
        **group,
        "dynamic": when,
    }


@dataclass(frozen=True)
class Described:
    """A recipe in the words of compressed-tensors.

    config: the content of `quantization_config`.
    matrices: those of transforms that are not Sylvester's, [n, n], in units of 1 / sqrt(n), by their full names.
    """

    config: dict[str, Any]
    matrices: dict[str, Callable[[], Tensor]]


def describe(
    recipe: Recipe,
    architecture: Architecture,
    ignored: list[str],
    storage: str,
    acting: RuntimeQuantization,
    dtype: torch.dtype = torch.float32,
) -> Described:
    """Say in the format's words what a recipe does, as far as these go.

    Args:
        ignored: names of linear layers that are not quantized.
        storage: `formats.engines.storage`.
        acting: what acts while the model runs. Tensors of its transforms are read when their matrices are asked for.
        dtype: of stored matrices.
    """
    inputs = None if recipe.activations is None else arguments(recipe.activations)
    weights = recipe.rounded.scheme
    strategy = "channel" if weights.granularity == "tensor" else None
    group = {
        "targets": ["Linear"],
        "format": storage,
        "weights": arguments(weights, strategy, dynamic=False),
        "input_activations": inputs,
        "output_activations": None,
    }
    schemes, matrices = {}, {}
    for entry in _entries(acting, architecture, dtype):
        schemes[entry.name] = entry.scheme
        matrices |= entry.matrix
    config = {
        "quant_method": METHOD,
        "version": VERSION,
        "quantization_status": "compressed",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": _cache_scheme(recipe),
        "sparsity_config": {},
        "transform_config": {"config_groups": schemes} if schemes else {},
    }
    return Described(config, matrices)


def _cache_scheme(recipe: Recipe) -> dict[str, Any] | None:
    """The one scheme of keys and values; None where they have none, or two, or the format has no word for it."""
    if recipe.keys is None or recipe.keys != recipe.values or recipe.keys.rule != "own" or any(recipe.keys.kept):
        return None
    strategy = "group" if recipe.keys.granularity == "group" else "token" if recipe.keys.dynamic else "attn_head"
    static = not recipe.keys.dynamic and recipe.keys.granularity == "tensor"
    return arguments(recipe.keys, "tensor" if static else strategy)


@dataclass(frozen=True)
class _Entry:
    """A transform, or one layer's, as the format has it: its name there, its TransformScheme, and its matrix by name
    where it is stored."""

    name: str
    scheme: dict[str, Any]
    matrix: dict[str, Callable[[], Tensor]]


def _entries(acting: RuntimeQuantization, architecture: Architecture, dtype: torch.dtype) -> Iterator[_Entry]:
    """The online transforms in the format's words, as they act: the weights hold the inverses already.

    An engine takes one transform of an input, so all of a site are one; those of keys cancel where these stay floats.
    """
    for site in architecture.sites:
        if here := at_site(acting.transforms, site.name):
            if len(here) == 1 and not here[0].tensors:
                yield _hadamard(here[0], site, architecture, dtype)
            else:
                yield from _of_layers(here, site, architecture, acting.tensors, dtype)
    for one in at(acting.transforms, "queries_keys", online=True) if acting.keys is not None else ():
        if one.tensors:  # no engine runs one, and rotquant reads the recipe
            continue
        blocks = {"head_dim": one.size or architecture.head_dim}
        apply = [{"targets": [f"re:.*{architecture.attention}$"], "location": at} for at in ("q_attn", "k_cache")]
        yield _Entry(one.name, {"type": "hadamard", "apply": apply, **blocks, **_precision(one.dtype)}, {})


def _hadamard(one: Transform, site: Site, architecture: Architecture, dtype: torch.dtype) -> _Entry:
    """A Hadamard transform of a site's input in all layers, with its matrix where it is not Sylvester's."""
    order, inner = one.size or features_at(architecture, one.location), 1
    if one.location == "across_heads":
        inner = architecture.head_dim
    sylvester = order & order - 1 == 0 and inner == 1
    scheme = {"type": "hadamard" if sylvester else "random-hadamard", "apply": _apply(site, ".*")}
    scheme |= ({"head_dim": order} if one.size is not None else {}) | _precision(one.dtype)
    matrix = {} if sylvester else {_matrix_name(site, 0, one.name): partial(_matrix, order, inner, dtype)}
    return _Entry(one.name, scheme, matrix)


def _of_layers(
    here: Sequence[Transform],
    site: Site,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Iterator[_Entry]:
    """All transforms of a site's input as one matrix M [n, n] of each layer, stored as sqrt(n) M.

    It is of all features, or of blocks where these share one."""
    one, features, blocks = here[0], site.features, dict[str, Any]()
    if len(here) == 1 and one.size is not None and tensors[one.tensors[0]][0].numel() == one.size**2:
        features, blocks = one.size, {"head_dim": one.size}
    blocks |= _precision(str(dtype).removeprefix("torch."))
    for layer in range(architecture.num_layers):
        name = f"{site.name}_{layer}"
        scheme = {"type": "random-hadamard", "apply": _apply(site, rf".*layers\.{layer}\..*")}

        def make(layer: int = layer) -> Tensor:
            chain = Chain(here, of_layer(tensors, layer), architecture.num_heads)
            return (math.sqrt(features) * chain(torch.eye(features, dtype=torch.float64))).to(dtype)

        yield _Entry(name, {**scheme, **blocks}, {_matrix_name(site, layer, name): make})


def _apply(site: Site, place: str) -> list[dict[str, Any]]:
    targets = [f"re:{place}{linear.rpartition('.')[2]}$" for linear in site.linears]
    return [{"targets": targets, "location": "input"}]


def _precision(dtype: str) -> dict[str, str]:
    return {"precision": dtype} if dtype != "float32" else {}


def _matrix_name(site: Site, layer: int, name: str) -> str:
    """Where a matrix is stored that linear layers share."""
    return f"model.layers.{layer}.{site.linears[0]}.{name}_input.weight"


def _matrix(order: int, inner: int, dtype: torch.dtype) -> Tensor:
    """sqrt(n) (H (x) I) / sqrt(order), n being all features: engines divide a stored matrix by sqrt(n)."""
    matrix = hadamard_matrix(order, dtype=dtype)
    return matrix if inner == 1 else torch.kron(matrix, math.sqrt(inner) * torch.eye(inner, dtype=dtype))
