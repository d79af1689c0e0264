"""Folders of packed weights read as floating-point models: this project's exports, and those of other libraries.

Of others' compressed-tensors are read whole-number weights, `pack-quantized` or `int-quantized`, quantizers of inputs
and KV cache that this project has, and transforms; what else a configuration says is refused, never left out. Folders
in GPTQ's and AWQ's formats have weights alone (`rotquant.formats.gptq`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from rotquant.formats import gptq
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
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, SiteKey, wrap
from rotquant.models.transforms import features_at
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, Granularity, QuantizationScheme
from rotquant.recipes.transforms import Location, Transform
from rotquant.tensors.hadamard.constructions import hadamard_matrix
from rotquant.tensors.quantization import QParams
from rotquant.weights.build import quantized_forward
from rotquant.weights.storage import Manifest, QuantizedState, is_state_tensor, make_model, take_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Formats of 4-bit floats, by what a scheme calls them.
_FP4 = {"MXFP4": "mxfp4-pack-quantized", "NVFP4": "nvfp4-pack-quantized"}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", *_FP4.values())
#: Locations of transforms that share a matrix, which is stored at one of them.
_SHARED = dict.fromkeys(("q_attn", "k_cache"), ("q_attn", "k_cache"))


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
        if self.scheme.fp4:
            shared = ("weight_global_scale",) if self.scheme.fp4 == "NVFP4" else ()
            return part in ("weight_packed", "weight_scale", *shared)
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
    scheme = _fp4_scheme(weights)
    if scheme is not None and scheme.fp4 and packing == _FP4[scheme.fp4]:
        return Packed(scheme, packing)
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


def _fp4_scheme(found: Any) -> QuantizationScheme | None:
    """The library's arguments of MXFP4 or NVFP4, of which the tensor's scale is static; None of anything else."""
    if found is None or found.type != "float" or found.num_bits != 4 or not found.symmetric:
        return None
    kind = {("group", 32): "MXFP4", ("tensor_group", 16): "NVFP4"}.get((found.strategy, found.group_size))
    if kind is None or (kind == "NVFP4" and found.dynamic is True):
        return None
    local = kind == "NVFP4" and found.dynamic == "local"
    size = {"granularity": "group", "group_size": found.group_size}
    return QuantizationScheme.model_validate({"bits": 4, "type": "float", "dynamic": not local, **size})


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
    static: scales of its static quantizers of inputs, by (layer, site).
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    recipe: Recipe
    state: QuantizedState | None
    transforms: tuple[Transform, ...]
    tensors: dict[str, Tensor]
    static: dict[SiteKey, QParams] = field(default_factory=dict)

    def run(self, recipe: Recipe) -> Handle:
        """Install what acts at run time, by a recipe that may differ there."""
        if self.state is not None or not (self.transforms or self.static):
            return quantized_forward(self.model, recipe, self.state)
        quantization = RuntimeQuantization(**recipe.quantizers, static=self.static)
        return wrap(self.model, quantization.with_transforms(self.transforms, self.tensors))


@task("loading the model")
def load_compressed(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Loaded:
    """Load a folder of packed weights, dequantized.

    Args:
        dtype: of the parameters; default the one that the configuration names.

    Raises:
        CheckpointError: it is damaged, or says what is not read here.
    """
    folder = Path(folder)
    config = load_config(folder, quantized=True)
    content = dict(config.quantization_config)
    del config.quantization_config
    if content.get("quant_method") in gptq.METHODS:
        return _load_gptq(folder, config, content, device, dtype)
    said, architecture = declared(content, folder), architecture_of(config)
    packed, ours = packed_of(said, folder), said.config.quant_method == OURS
    if not ours:
        foreign_recipe(said, folder)  # refused before weights are read
    named = any(folder.glob(f"{TRANSFORMED}*.safetensors"))
    files = [*check_weight_files(folder, STEM if ours else TRANSFORMED if named else PLAIN)]
    tensors: dict[str, Tensor] = {}
    digests = check_export(folder) if ours else {}
    with checking_digests(files if digests else (), digests):
        for path in files:
            tensors |= read_tensors(path)
        check_finite(folder, tensors.items())
    kind = dtype or cast("torch.dtype | None", config.dtype) or torch.float32
    if ours:
        state = take_state(folder, exported_manifest(content), architecture, tensors)
        unpack_all(tensors, packed, kind, folder)
        model = make_model(folder, config, tensors, kind, device)
        return Loaded(model, load_tokenizer(folder), state.recipe, state, (), {})
    recipe = foreign_recipe(said, folder)
    static = take_static(recipe, architecture, tensors, folder)
    transforms = take_transforms(said, architecture, tensors, folder)
    unpack_all(tensors, packed, kind, folder)
    transforms.fuse_outputs(tensors)
    model = make_model(folder, config, tensors, kind, device)
    return Loaded(model, load_tokenizer(folder), recipe, None, tuple(transforms.inputs), transforms.tensors, static)


def _load_gptq(
    folder: Path, config: Any, content: Mapping[str, Any], device: torch.device | str, dtype: torch.dtype | None
) -> Loaded:
    """A folder in GPTQ's or AWQ's format: nothing acts while it runs."""
    layout, tensors = gptq.layout_of(content, folder), {}
    for path in check_weight_files(folder, PLAIN):
        tensors |= read_tensors(path)
    check_finite(folder, tensors.items())
    kind = dtype or cast("torch.dtype | None", config.dtype) or torch.float32
    gptq.unpack_all(tensors, layout, kind, folder)
    model = make_model(folder, config, tensors, kind, device)
    return Loaded(model, load_tokenizer(folder), Recipe(), None, (), {})


def unpack_all(tensors: dict[str, Tensor], packed: Packed, dtype: torch.dtype, where: object) -> None:
    """Put floating-point weights in the place of their parts, one after another.

    Raises:
        CheckpointError: parts of a weight are missing, or do not fit each other.
    """
    mark = "weight_packed" if packed.format.endswith("pack-quantized") else "weight_scale"
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
    found = config.group.input_activations
    inputs = _fp4_scheme(found)
    if inputs is not None and found.dynamic in (True, "local"):
        pass
    elif found is not None and _is_code(found) and found.strategy == "tensor" and found.dynamic is False:
        kind = {"bits": found.num_bits, "type": found.type, "symmetric": found.symmetric}
        inputs = QuantizationScheme.model_validate({**kind, "granularity": "tensor", "dynamic": False})
    else:
        inputs = _scheme(found, "token", f"{where}: input_activations")
    calibrated = None if inputs is None or inputs.dynamic else Calibration()  # of a text that nobody told
    return Recipe(activations=inputs, keys=cache, values=cache, calibration=calibrated)


def _scheme(found: Any, granularity: Granularity, where: str) -> QuantizationScheme | None:
    """The library's arguments of dynamic codes by token as a scheme of this project; None of nothing."""
    if found is None:
        return None
    dynamic = found.dynamic is True and found.strategy == "token"
    if not _is_code(found) or not dynamic or (found.type == "float" and granularity == "head"):
        raise CheckpointError(f"{where} is not read here ({found}): codes by token with dynamic scales are.")
    return QuantizationScheme(
        bits=found.num_bits,
        type=found.type,
        symmetric=found.symmetric,
        granularity=granularity,
        scale="full" if found.symmetric and found.type == "int" else "paper",
    )


def take_static(
    recipe: Recipe, architecture: Architecture, tensors: dict[str, Tensor], where: object
) -> dict[SiteKey, QParams]:
    """Static scales of sites' inputs, taken out of `tensors`, where each linear layer has its own.

    Raises:
        CheckpointError: one is missing, or layers that read one input have different ones.
    """
    if recipe.activations is None or recipe.activations.dynamic:
        return {}
    found: dict[SiteKey, QParams] = {}
    for index in range(architecture.num_layers):
        for site in architecture.sites:
            places = [f"model.layers.{index}.{linear}.input" for linear in site.linears]
            kind = "global_scale" if recipe.activations.fp4 else "scale"
            scales = [tensors.pop(f"{place}_{kind}", None) for place in places]
            points = [tensors.pop(f"{place}_zero_point", None) for place in places]
            scale, point = scales[0], points[0]
            same = scale is not None and all(one is not None and torch.equal(one, scale) for one in scales)
            if scale is None or not same or any((one is None) != (point is None) for one in points):
                raise CheckpointError(f"{where} has no static scale of {places[0]} that all who read it share.")
            zero_point = None
            if not recipe.activations.symmetric:
                code = torch.zeros(()) if point is None else point
                zero_point = code.to(torch.float32).reshape(()) + 2 ** (recipe.activations.bits - 1)
            found[index, site.name] = QParams(scale.to(torch.float32).reshape(()), zero_point)
    return found


@dataclass
class FoundTransforms:
    """The transforms of a configuration that act while the model runs.

    inputs, tensors: of what linear layers read, queries and keys, and what they are made of.
    outputs: matrices by the names of the linear layers that give y M, [size, size] for each block of features.
    """

    inputs: list[Transform] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)

    def fuse_outputs(self, tensors: dict[str, Tensor]) -> None:
        """Give each such layer the weight M^T W and the bias M^T b: the same function, since nothing is between."""
        for layer, matrix in self.outputs:
            for name in {f"{layer}.weight", f"{layer}.bias"} & tensors.keys():
                rows = tensors[name].to(torch.float64)
                blocks = rows.reshape(-1, len(matrix), rows[0].numel())
                fused = matrix.to(torch.float64).mT @ blocks
                tensors[name] = fused.reshape(rows.shape).to(tensors[name].dtype)


def take_transforms(
    config: Declared, architecture: Architecture, tensors: dict[str, Tensor], where: object
) -> FoundTransforms:
    """The transforms of a configuration that act while it runs, their stored matrices taken out of `tensors`.

    Raises:
        CheckpointError: one is of inputs of some of the linear layers that read them, or of another place.
    """
    found, stored = FoundTransforms(), set[str]()
    of_layers: dict[str, dict[int, Tensor]] = {}
    for name, scheme in config.transforms.items():
        for one in scheme.apply:
            if one.location in ("weight_input", "weight_output"):  # which the stored weights have already
                continue
            ends = [f".{name}_{place}.weight" for place in _SHARED.get(one.location, (one.location,))]
            matrices = {key: value for key, value in tensors.items() if key.endswith(tuple(ends))}
            stored |= matrices.keys()
            if one.location == "output":
                for layer in _named(one, architecture):
                    size = scheme.head_dim or len(tensors[f"{layer}.weight_scale"])
                    found.outputs.append((layer, _matrix(scheme, one, name, size, matrices, where)))
                continue
            places = _places(one, architecture)
            if not places or (places[0][0] == "queries_keys" and scheme.type == "random-matrix"):
                raise CheckpointError(
                    f"{where} has a transform {name} ({scheme.type}, {one.location} of {', '.join(one.targets)}) that "
                    "is not read here: those of all layers that read an input, of outputs, and of queries and keys are."
                )
            for place, layers in places:
                size = scheme.head_dim or features_at(architecture, place)
                every = len(layers) == architecture.num_layers
                own = name if every else name.removesuffix(f"_{layers[0]}")
                own = own if len(places) == 1 else f"{own}_{place}"
                fast = _sylvester(scheme, size) and scheme.precision == torch.float32 and every
                if not fast:
                    matrix = _matrix(scheme, one, name, size, matrices, where)
                    of_layers.setdefault(own, {}).update(dict.fromkeys(layers, matrix))
                kind = "hadamard" if fast else "orthogonal" if place == "queries_keys" else "matrix"
                transform = Transform(
                    name=own,
                    kind=kind,
                    location=place,
                    size=scheme.head_dim,
                    online=True,
                    tensors=() if fast else (own,),
                )
                found.inputs += [] if transform in found.inputs else [transform]
    for name in stored:
        del tensors[name]
    for name, several in of_layers.items():
        if len(several) != architecture.num_layers:
            raise CheckpointError(f"{where} has a transform {name} of {len(several)} layers, and not of all.")
        first, shared = several[0], all(one is several[0] for one in several.values())
        listed = [several[index] for index in range(len(several))]
        found.tensors[name] = first.expand(len(several), *first.shape) if shared else torch.stack(listed)
    return found


def _named(one: Any, architecture: Architecture) -> set[str]:
    """The linear layers that a transform acts on; of those outside of the decoder layers the head."""
    names = {
        f"model.layers.{index}.{name}" for index in range(architecture.num_layers) for name in architecture.linears
    }

    def named(targets: Iterable[str], layer: str) -> bool:
        return "Linear" in targets or targets_name(targets, layer)

    return {layer for layer in {*names, "lm_head"} if named(one.targets, layer) and not named(one.ignore, layer)}


def _places(one: Any, architecture: Architecture) -> list[tuple[Location, tuple[int, ...]]]:
    """Where a transform of inputs acts: sites whose linear layers are those that it names, and in which layers."""
    every = tuple(range(architecture.num_layers))
    if one.location in ("q_attn", "k_cache"):
        return [("queries_keys", every)]
    left, found = _named(one, architecture), list[tuple[Location, tuple[int, ...]]]()
    for site in architecture.sites:
        linears = {index: {f"model.layers.{index}.{name}" for name in site.linears} for index in every}
        layers = tuple(index for index in every if linears[index] <= left)
        if len(layers) in (1, len(every)):
            found.append((site.name, layers))
            left -= {name for index in layers for name in linears[index]}
    return [] if left else found


def _matrix(scheme: Any, one: Any, name: str, size: int, matrices: Mapping[str, Tensor], where: object) -> Tensor:
    """The matrix [size, size] by which rows are multiplied, float32 or as precise as it is stored.

    One is stored for all layers, and scaled when it runs, but for that of the type random-matrix.
    """
    found = [matrix for matrix in matrices.values() if matrix.shape == (size, size)]
    if not found and _sylvester(scheme, size):
        return hadamard_matrix(size, dtype=scheme.precision) / size**0.5
    if not found or not all(torch.equal(matrix, found[0]) for matrix in found):
        raise CheckpointError(f"{where} has no matrix [{size}, {size}] of the transform {name} that all layers share.")
    matrix = found[0].to(torch.promote_types(found[0].dtype, torch.float32))
    if scheme.type == "random-matrix":  # of which the inverse is stored
        return matrix
    return (matrix.mT if one.inverse else matrix) / size**0.5


def _sylvester(scheme: Any, size: int) -> bool:
    """Whether a transform is Sylvester's, which needs no stored matrix."""
    return scheme.type == "hadamard" and not size & size - 1
