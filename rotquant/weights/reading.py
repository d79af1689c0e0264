"""Folders of compressed-tensors read as floating-point models: this project's exports, and those of other libraries.

Of others are read whole-number weights, `pack-quantized` or `int-quantized`, and quantizers of inputs and KV cache that
this project has; what else a configuration says is refused, never left out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import read_json
from rotquant.foundation.progress import task
from rotquant.models.architectures import Architecture, architecture_of
from rotquant.models.checkpoints import check_weight_files, load_config, load_tokenizer
from rotquant.models.integrity import check_finite, read_tensors
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, wrap
from rotquant.models.transforms import features_at
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.recipes.transforms import Location, Transform
from rotquant.tensors.quantization import share_of_all_steps
from rotquant.weights.build import quantized_forward
from rotquant.weights.compressed import METHOD, PARTS, unpacked_weight, weight_scheme
from rotquant.weights.context import runtime_schemes
from rotquant.weights.export import METHOD as OURS
from rotquant.weights.export import STEM
from rotquant.weights.storage import Manifest, QuantizedState, is_state_tensor, make_model, take_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FORMATS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True)
class Packed:
    """How the weights of a folder are stored: their scheme, and `pack-quantized` or `int-quantized`."""

    scheme: QuantizationScheme
    format: str

    def has(self, part: str) -> bool:
        """Whether a weight has a part of `PARTS`."""
        return part != "weight_zero_point" or not self.scheme.symmetric


def quantization_of(folder: str | Path) -> dict[str, Any] | None:
    """The quantization_config of a folder that this module reads; None of any other."""
    path = Path(folder) / "config.json"
    config = read_json(path, "configuration", CheckpointError) if path.is_file() else None
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) and found.get("quant_method") in (METHOD, OURS) else None


def packed_of(config: Mapping[str, Any], where: object) -> Packed:
    """How a quantization_config says that weights are stored.

    Raises:
        CheckpointError: in a way that is not read here.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise CheckpointError(f"{where} has {len(groups or ())} config groups, and one is read here.")
    group = next(iter(groups.values()))
    scheme = weight_scheme(group, where)
    found = group.get("format") or config.get("format")
    if found not in _FORMATS:
        raise CheckpointError(f"{where} has weights of the format {found}: {' and '.join(_FORMATS)} are read here.")
    return Packed(scheme, found)


def exported_manifest(config: Mapping[str, Any]) -> Manifest:
    """What an export of this project says of its making.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return Manifest.model_validate({**config.get("rotquant", {}), "quantized": {}})
    except (ValidationError, TypeError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else "it is no object"
        raise CheckpointError(f"the section rotquant of quantization_config is damaged ({problem}): export again.") from None


def state_files(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files that quantizers and methods read at run time."""
    from safetensors import safe_open

    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if is_state_tensor(name)]  # noqa: SIM118 - not a mapping
            found |= {name: file.get_tensor(name) for name in names}
    return found


@dataclass(frozen=True)
class Loaded:
    """A model of a folder of compressed-tensors, in floating point, and what acts while it runs.

    recipe: of the weights where they are ours, else quantizers of inputs and KV cache alone.
    state: of the weights where they are ours.
    transforms, tensors: the online transforms that a folder of others says, and what they are made of.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    recipe: Recipe
    state: QuantizedState | None
    transforms: tuple[Transform, ...]
    tensors: dict[str, Tensor]

    def run(self, recipe: Recipe) -> Handle:
        """Install what acts at run time, by a recipe that may differ there."""
        if self.state is not None or not self.transforms:
            return quantized_forward(self.model, recipe, self.state)
        quantization = RuntimeQuantization(**runtime_schemes(recipe))
        return wrap(self.model, quantization.with_transforms(self.transforms, self.tensors))


@task("loading the model")
def load_compressed(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Loaded:
    """Load a folder of compressed-tensors with dequantized weights.

    Args:
        dtype: of the parameters; default the one that the configuration names.

    Raises:
        CheckpointError: it is damaged, or says what is not read here.
    """
    folder = Path(folder)
    config = load_config(folder, quantized=True)
    declared = dict(config.quantization_config)
    del config.quantization_config
    architecture, packed = architecture_of(config), packed_of(declared, folder)
    ours = declared["quant_method"] == OURS
    foreign = None if ours else foreign_recipe(declared, folder)
    files = [*check_weight_files(folder, STEM if ours else "model")]
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= read_tensors(path)
    check_finite(folder, tensors.items())
    dtype = dtype or config.dtype or torch.float32
    state = take_state(folder, exported_manifest(declared), architecture, tensors) if ours else None
    transforms, matrices = ((), {}) if ours else take_transforms(declared, architecture, tensors, folder)
    unpack_all(tensors, packed, dtype)
    model = make_model(folder, config, tensors, dtype).to(device)  # pyright: ignore[reportArgumentType]
    recipe = state.recipe if state else cast(Recipe, foreign)
    return Loaded(model, load_tokenizer(folder), recipe, state, transforms, matrices)


def unpack_all(tensors: dict[str, Tensor], packed: Packed, dtype: torch.dtype) -> None:
    """Put floating-point weights in the place of their parts, one after another."""
    mark = "weight_packed" if packed.format == "pack-quantized" else "weight_scale"
    for layer in [name.removesuffix(mark) for name in tensors if name.endswith(f".{mark}")]:
        found = {part: tensors.pop(layer + part) for part in PARTS if layer + part in tensors}
        if packed.format == "pack-quantized":
            tensors[f"{layer}weight"] = unpacked_weight(found, packed.scheme, dtype)
        else:
            scale = found["weight_scale"].to(torch.float32)
            tensors[f"{layer}weight"] = (tensors[f"{layer}weight"].to(torch.float32) * scale).to(dtype)


def foreign_recipe(config: Mapping[str, Any], where: object) -> Recipe:
    """What a configuration of compressed-tensors says of inputs and KV cache, as what acts at run time.

    Its symmetric dynamic scale is max|x| / ((2^b - 1) / 2), this project's of a smaller clip ratio.

    Raises:
        CheckpointError: it says something that is not read here.
    """
    group = next(iter(config["config_groups"].values()))
    if group.get("output_activations"):
        raise CheckpointError(f"{where} quantizes what layers give, which is not read here.")
    cache = _scheme(config.get("kv_cache_scheme"), "head", f"{where}: kv_cache_scheme")
    inputs = _scheme(group.get("input_activations"), "token", f"{where}: input_activations")
    return Recipe(activations=inputs, keys=cache, values=cache)


def _scheme(found: Any, granularity: str, where: str) -> QuantizationScheme | None:
    """Dynamic integers by token as a scheme of this project; None of nothing."""
    if found is None:
        return None
    if found.get("type") != "int" or not found.get("dynamic") or found.get("strategy") != "token":
        raise CheckpointError(f"{where} is not read here ({found}): integers by token with dynamic scales are.")
    bits, symmetric = found["num_bits"], bool(found.get("symmetric", True))
    scheme = QuantizationScheme(bits=bits, symmetric=symmetric, granularity=granularity)  # pyright: ignore[reportArgumentType]
    return scheme.model_copy(update={"clip_ratio": share_of_all_steps(scheme)})


def take_transforms(
    config: Mapping[str, Any], architecture: Architecture, tensors: dict[str, Tensor], where: object
) -> tuple[tuple[Transform, ...], dict[str, Tensor]]:
    """The online transforms of a transform_config, and their stored matrices, taken out of `tensors`.

    Raises:
        CheckpointError: one is of another kind or place than inputs of a site's linear layers, queries and keys.
    """
    found: dict[str, Transform] = {}
    matrices: dict[str, Tensor] = {}
    for name, scheme in ((config.get("transform_config") or {}).get("config_groups") or {}).items():
        for one in scheme["apply"]:
            if one["location"] in ("weight_input", "weight_output"):  # which the stored weights have already
                continue
            place = _place(one, architecture)
            size, kind = scheme.get("head_dim"), scheme["type"]
            features = None if place is None else size or features_at(architecture, place)
            sylvester = kind == "hadamard" and features is not None and features & features - 1 == 0
            if features is None or not (sylvester or (kind == "random-hadamard" and place != "queries_keys")):
                raise CheckpointError(
                    f"{where} has a transform {name} ({kind}, {one['location']} of {', '.join(one['targets'])}) that is "
                    "not read here: Hadamard ones of the input of layers that read the same, or of queries and keys, are."
                )
            stored = () if sylvester else (name,)
            about = {"name": name, "location": place, "size": size, "online": True, "tensors": stored}
            if stored:
                matrix = _stored_matrix(name, features, tensors, where)
                matrix = matrix.mT if one.get("inverse") else matrix
                matrices[name] = matrix.expand(architecture.num_layers, features, features)
            found[name] = Transform(kind="orthogonal" if stored else "hadamard", **about)
    return tuple(found.values()), matrices


def _place(one: Mapping[str, Any], architecture: Architecture) -> Location | None:
    """Where a transform acts: the site whose linear layers, of every decoder layer, its targets name."""
    patterns = [target.removeprefix("re:") for target in one["targets"] if target.startswith("re:")]
    if one["location"] in ("q_attn", "k_cache"):
        return "queries_keys"
    layers = [f"model.layers.{i}" for i in range(architecture.num_layers)]
    for site in architecture.sites if one["location"] == "input" and not one.get("ignore") else ():
        inside = {f"{layer}.{name}" for layer in layers for name in site.linears}
        every = {f"{layer}.{name}" for layer in layers for name in architecture.linears}
        if inside == {name for name in every if any(re.match(pattern, name) for pattern in patterns)}:
            return site.name
    return None


def _stored_matrix(name: str, size: int, tensors: dict[str, Tensor], where: object) -> Tensor:
    """A matrix that all layers share, scaled as the format scales it; taken out of `tensors`."""
    names = [one for one in tensors if one.endswith(f".{name}_input.weight")]
    found = [tensors.pop(one) for one in names]
    if not found or found[0].shape != (size, size) or not all(torch.equal(one, found[0]) for one in found):
        raise CheckpointError(f"{where} has no matrix [{size}, {size}] of the transform {name} that all layers share.")
    return found[0].to(torch.float32) / size**0.5
