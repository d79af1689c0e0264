"""Folders of compressed-tensors read as floating-point models: this project's exports, and those of other libraries.

Of others are read whole-number weights, `pack-quantized` or `int-quantized`, and quantizers of inputs and KV cache that
this project has; what else a configuration says is refused, never left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from rotquant.formats.compressed import PARTS, library, targets_name, unpacked_weight
from rotquant.formats.export import DIGESTS, PLAIN, STEM, TRANSFORMED, running, sealed_content
from rotquant.formats.export import METHOD as OURS
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.foundation.progress import task
from rotquant.models.architectures import Architecture, architecture_of
from rotquant.models.checkpoints import first_line, load_config, load_tokenizer
from rotquant.models.folders import check_weight_files, read_config
from rotquant.models.integrity import check_finite, check_seal, checking_digests, note_unsealed, read_tensors
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, wrap
from rotquant.models.transforms import features_at
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Granularity, QuantizationScheme
from rotquant.recipes.transforms import Location, Transform
from rotquant.weights.build import quantized_forward
from rotquant.weights.storage import Manifest, QuantizedState, is_state_tensor, make_model, take_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized")


@dataclass(frozen=True)
class Declared:
    """A quantization_config of compressed-tensors, or of an export that only this project runs, as the library has it.

    config: a QuantizationConfig. group: its one QuantizationScheme. transforms: TransformSchemes by their names.
    """

    config: Any
    group: Any
    transforms: Mapping[str, Any]


@dataclass(frozen=True)
class Packed:
    """How the weights of a folder are stored: their scheme, and one of `_FORMATS`."""

    scheme: QuantizationScheme
    format: str

    def has(self, part: str) -> bool:
        """Whether a weight has a part of `PARTS`."""
        if self.format == "float-quantized":
            return part in ("weight", "weight_scale")
        return part != "weight" and (part != "weight_zero_point" or not self.scheme.symmetric)


def declared(config: Any, where: object) -> Declared:
    """A quantization_config, checked.

    Raises:
        CheckpointError: it is damaged, or has several groups.
        RecipeError: the package compressed-tensors is not installed.
    """
    quantization, transform = library("quantization"), library("transform")
    try:
        found = quantization.QuantizationConfig.model_validate(config)
        said = config.get("transform_config") or {"config_groups": {}}
        transforms = transform.TransformConfig.model_validate(said).config_groups
    except ValidationError as error:
        raise CheckpointError(
            f"the quantization_config of {where} is damaged: {first_problem(error, config)}."
        ) from None
    except Exception as error:  # the library's checks raise what they meet
        raise CheckpointError(f"the quantization_config of {where} is damaged: {first_line(error)}.") from None
    if len(found.config_groups) != 1:
        raise CheckpointError(f"{where} has {len(found.config_groups)} config groups, and one is read here.")
    return Declared(found, next(iter(found.config_groups.values())), transforms)


def packed_of(config: Declared, where: object) -> Packed:
    """How weights are stored.

    Raises:
        CheckpointError: in a way that is not read here.
    """
    weights, packing = config.group.weights, config.group.format or config.config.format
    if packing not in _FORMATS:
        raise CheckpointError(f"{where} has weights of the format {packing}: {', '.join(_FORMATS)} are read here.")
    grouped = weights is not None and weights.strategy == "group"
    if (
        weights is None
        or weights.strategy not in ("channel", "group", "tensor")
        or (weights.type == "float") != (packing == "float-quantized")
        or not _is_code(weights)
        or weights.actorder in ("group", "dynamic")
        or (grouped and (weights.group_size or 0) < 1)
    ):
        raise CheckpointError(
            f"{where} has weights that are not read here ({weights}): integers of 2 to 8 bits or floats of 8 "
            "by channel, group or tensor, without an order of columns, are."
        )
    size = weights.group_size if grouped else None
    granularity = cast(Granularity, weights.strategy)
    scheme = QuantizationScheme(
        bits=weights.num_bits,
        type=weights.type,
        symmetric=weights.symmetric,
        granularity=granularity,
        group_size=size,
    )
    return Packed(scheme, packing)


def _is_code(found: Any) -> bool:
    """Whether the library's arguments are of integers of 2 to 8 bits, or of symmetric floats of 8."""
    return found.num_bits == 8 and found.symmetric if found.type == "float" else 2 <= found.num_bits <= 8


def exported_manifest(config: Mapping[str, Any]) -> Manifest:
    """What an export of this project says of its making.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        manifest = Manifest.model_validate({**config.get("rotquant", {}), "quantized": {}})
        return manifest.model_copy(update={"recipe": running(manifest.recipe, config.get("running", {}))})
    except (ValidationError, RecipeError, TypeError, AttributeError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else first_line(error)
        raise _damaged(problem) from None


def _damaged(problem: str) -> CheckpointError:
    where = "the section rotquant of quantization_config"
    return CheckpointError(f"{where} is damaged ({problem}): export the model again.")


def check_export(folder: Path, partial: bool = False) -> dict[str, str]:
    """Check that an export of this project is the one that was written, its tensors apart.

    Args:
        partial: whether files other than tensors may be missing.

    Returns:
        SHA-256 of its files by name; of one of before they were recorded none.

    Raises:
        CheckpointError: its configuration, recipe or tokenizer was changed.
    """
    config = read_config(folder)
    section = config["quantization_config"].get("rotquant")
    if not isinstance(section, dict):
        raise _damaged("it is missing")
    if section.get("format_version") == 2 and not {*DIGESTS} & section.keys():
        note_unsealed(folder, "nothing")
        return {}
    content = sealed_content(config)
    check_seal(folder / "config.json", content, "export again, with --set for what acts at run time", partial)
    return content["digests"]


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
        quantization = RuntimeQuantization(**recipe.quantizers)
        return wrap(self.model, quantization.with_transforms(self.transforms, self.tensors))


@task("loading the model")
def load_compressed(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Loaded:
    """Load a folder of compressed-tensors with dequantized weights.

    Args:
        dtype: of the parameters; default the one that the configuration names.

    Raises:
        CheckpointError: it is damaged, or says what is not read here.
    """
    folder = Path(folder)
    config = load_config(folder, quantized=True)
    content = dict(config.quantization_config)
    del config.quantization_config
    said, architecture = declared(content, folder), architecture_of(config)
    packed, ours = packed_of(said, folder), said.config.quant_method == OURS
    foreign = None if ours else foreign_recipe(said, folder)
    named = any(folder.glob(f"{TRANSFORMED}*.safetensors"))
    files = [*check_weight_files(folder, STEM if ours else TRANSFORMED if named else PLAIN)]
    tensors: dict[str, Tensor] = {}
    digests = check_export(folder) if ours else {}
    with checking_digests(files if digests else (), digests):
        for path in files:
            tensors |= read_tensors(path)
        check_finite(folder, tensors.items())
    kind = dtype or cast("torch.dtype | None", config.dtype) or torch.float32
    state = take_state(folder, exported_manifest(content), architecture, tensors) if ours else None
    transforms, matrices = ((), {}) if ours else take_transforms(said, architecture, tensors, folder)
    unpack_all(tensors, packed, kind, folder)
    model = make_model(folder, config, tensors, kind, device)
    recipe = state.recipe if state else cast(Recipe, foreign)
    return Loaded(model, load_tokenizer(folder), recipe, state, transforms, matrices)


def unpack_all(tensors: dict[str, Tensor], packed: Packed, dtype: torch.dtype, where: object) -> None:
    """Put floating-point weights in the place of their parts, one after another.

    Raises:
        CheckpointError: parts of a weight are missing, or do not fit each other.
    """
    mark = "weight_packed" if packed.format == "pack-quantized" else "weight_scale"
    for layer in [name.removesuffix(mark) for name in tensors if name.endswith(f".{mark}")]:
        found = {part: tensors.pop(layer + part) for part in PARTS if layer + part in tensors}
        try:
            tensors[f"{layer}weight"] = unpacked_weight(found, packed.scheme, dtype)
        except (LookupError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{where} is damaged: the parts of {layer}weight do not fit each other ({first_line(error)})."
            ) from None


def foreign_recipe(config: Declared, where: object) -> Recipe:
    """What a configuration of compressed-tensors says of inputs and KV cache, as what acts at run time.

    Raises:
        CheckpointError: it says something that is not read here.
    """
    if config.group.output_activations is not None:
        raise CheckpointError(f"{where} quantizes what layers give, which is not read here.")
    cache = _scheme(config.config.kv_cache_scheme, "head", f"{where}: kv_cache_scheme")
    inputs = _scheme(config.group.input_activations, "token", f"{where}: input_activations")
    return Recipe(activations=inputs, keys=cache, values=cache)


def _scheme(found: Any, granularity: Granularity, where: str) -> QuantizationScheme | None:
    """The library's arguments of dynamic codes by token as a scheme of this project; None of nothing."""
    if found is None:
        return None
    dynamic = found.dynamic is True and found.strategy == "token"
    if not _is_code(found) or not dynamic or (found.type == "float" and granularity == "head"):
        raise CheckpointError(f"{where} is not read here ({found}): integers by token with dynamic scales are.")
    return QuantizationScheme(
        bits=found.num_bits,
        type=found.type,
        symmetric=found.symmetric,
        granularity=granularity,
        scale="full" if found.symmetric and found.type == "int" else "paper",
    )


def take_transforms(
    config: Declared, architecture: Architecture, tensors: dict[str, Tensor], where: object
) -> tuple[tuple[Transform, ...], dict[str, Tensor]]:
    """The online transforms of a configuration, and their stored matrices, taken out of `tensors`.

    Raises:
        CheckpointError: one is of another kind or place than inputs of a site's linear layers, queries and keys.
    """
    found: dict[str, Transform] = {}
    matrices: dict[str, Tensor] = {}
    of_layers: dict[str, dict[int, Tensor]] = {}
    for name, scheme in config.transforms.items():
        for one in scheme.apply:
            if one.location in ("weight_input", "weight_output"):  # which the stored weights have already
                continue
            place, layers = _place(one, architecture)
            features = None if place is None else scheme.head_dim or features_at(architecture, place)
            sylvester = scheme.type == "hadamard" and features is not None and features & features - 1 == 0
            every = len(layers) == architecture.num_layers
            stored = scheme.type == "random-hadamard" and place != "queries_keys"
            if features is None or not ((sylvester and every) or stored):
                raise CheckpointError(
                    f"{where} has a transform {name} ({scheme.type}, {one.location} of {', '.join(one.targets)}) that "
                    "is not read here: Hadamard ones of all inputs of one kind, or of queries and keys, are."
                )
            own = name if every else name.removesuffix(f"_{layers[0]}")
            if not sylvester:
                matrix = _stored_matrix(name, features, tensors, where)
                matrix = matrix.mT if one.inverse else matrix
                if every:
                    matrices[own] = matrix.expand(architecture.num_layers, features, features)
                else:
                    of_layers.setdefault(own, {})[layers[0]] = matrix
            found[own] = Transform(
                name=own,
                kind="hadamard" if sylvester else "orthogonal",
                location=cast(Location, place),
                size=scheme.head_dim,
                online=True,
                tensors=() if sylvester else (own,),
            )
    for name, several in of_layers.items():
        if len(several) != architecture.num_layers:
            raise CheckpointError(f"{where} has a transform {name} of {len(several)} layers, and not of all.")
        matrices[name] = torch.stack([several[index] for index in range(architecture.num_layers)])
    return tuple(found.values()), matrices


def _place(one: Any, architecture: Architecture) -> tuple[Location | None, tuple[int, ...]]:
    """Where a transform acts: the site whose linear layers its targets name, and in which layers, all or one."""
    every = tuple(range(architecture.num_layers))
    if one.location in ("q_attn", "k_cache"):
        return "queries_keys", every
    if one.location != "input" or one.ignore:
        return None, ()
    linears = {index: {f"model.layers.{index}.{name}" for name in architecture.linears} for index in every}
    named = {name for of_layer in linears.values() for name in of_layer if targets_name(one.targets, name)}
    layers = tuple(index for index, of_layer in linears.items() if of_layer & named)
    for site in architecture.sites:
        places = {f"model.layers.{index}.{name}" for index in layers for name in site.linears}
        if named == places and len(layers) in (1, len(every)):
            return site.name, layers
    return None, ()


def _stored_matrix(name: str, size: int, tensors: dict[str, Tensor], where: object) -> Tensor:
    """A matrix that all layers of a transform share, scaled as the format does; taken out of `tensors`."""
    names = [one for one in tensors if one.endswith(f".{name}_input.weight")]
    found = [tensors.pop(one) for one in names]
    if not found or found[0].shape != (size, size) or not all(torch.equal(one, found[0]) for one in found):
        raise CheckpointError(f"{where} has no matrix [{size}, {size}] of the transform {name} that all layers share.")
    return found[0].to(torch.float32) / size**0.5
