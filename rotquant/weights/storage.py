"""Quantized models on disk: a folder of packed integers, scales and everything that stayed floating point.

quantized.safetensors (or shards) holds each quantized linear layer as `weights.packing` names its parts, and all other
tensors under their Hugging Face names, in 16 bits where these hold their numbers exactly; rotquant.json says what they
are. A loaded model equals the saved one bit for bit.
"""

import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from pydantic import Field, ValidationError, model_validator
from safetensors import safe_open
from torch import Tensor, nn

from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.errors import CheckpointError, ResultError
from rotquant.foundation.files import atomic_directory, check_output_folder, read_json, write_json
from rotquant.foundation.progress import task
from rotquant.models.architectures import (
    Architecture,
    architecture_of,
    attention_implementation,
    base_model,
    decoder_layers,
    lm_head,
)
from rotquant.models.checkpoints import check_loading, first_line, load_config, load_tokenizer, quiet_transformers
from rotquant.models.companions import GENERATION, has_tokenizer, write_companions
from rotquant.models.experts import stack_experts, stacked_names
from rotquant.models.folders import MANIFEST, QUANTIZED, check_kind, check_weight_files
from rotquant.models.generation import generation_config, write_generation_config
from rotquant.models.integrity import (
    check_finite,
    check_loaded,
    check_seal,
    checking_digests,
    note_unsealed,
    read_tensors,
    seal,
    write_shards,
)
from rotquant.models.simulation.kv_cache import static_shape
from rotquant.models.simulation.runtime import SiteKey
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.recipe import Method, Recipe
from rotquant.tensors.devices import in_threads
from rotquant.tensors.quantization import QParams
from rotquant.text import bos_of, without_bos
from rotquant.training.state import Record
from rotquant.weights.actions import hooks
from rotquant.weights.packing import Weight, all_weight_tensors, named, take, take_weight
from rotquant.weights.ranges import static_schemes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Of folders whose manifest covers all that makes the network; those of version 2 cover tensors alone.
FORMAT_VERSION = 3
#: Not "model": transformers, which would fill what it does not know with random weights, then finds no weights at all.
_STEM = "quantized"
_SITES = "rotquant.sites"
_METHODS = "rotquant.methods"
_AGAIN = "quantize the model again"
_CHANGES = "quantize again, with --set or from a changed checkpoint"
_ROTATIONS = "rotquant.rotation"


class Manifest(Frozen):
    """Manifest of a stored model, what it is and how it was made: the content of rotquant.json, and nothing that is not
    in it.

    quantized: shape [out, in] of every quantized weight by its Hugging Face name.
    seconds, peak_bytes: wall time of each part of the making, and on a GPU the memory that torch had allocated at most.
    source: what the caller says of the origin: checkpoint, its digest, the digest of the code.
    digests: SHA-256 of the files beside it that loading reads, by name; of version 2 of the tensors' files alone.
    digest: SHA-256 of all the others; empty of version 2.
    """

    format_version: Literal[2, 3] = FORMAT_VERSION
    recipe: Recipe
    seed: int
    dtype: Literal["float32", "float16", "bfloat16", "float64"]
    quantized: dict[str, tuple[int, int]]
    seconds: dict[str, float] = Field(default_factory=dict)
    peak_bytes: dict[str, int] = Field(default_factory=dict)
    source: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str | None] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)
    digest: str = ""

    @model_validator(mode="after")
    def _weights_have_a_scheme(self) -> Self:
        if self.quantized and self.recipe.weights is None:
            raise ValueError("weights are quantized, and the recipe has no weights section")
        return self


@dataclass(frozen=True)
class QuantizedState:
    """State that the network of quantized weights needs to run: their manifest, and the tensors that its quantizers
    read.

    tensors: what methods read at run time, by the method's name and their own.
    static: static scales of sites, and of `keys` and `values`, by (layer, name); of those alone that are not dynamic.
    rotations: matrices of the recipe's online transforms by name, [layers, features, features] (`Rotations.online`).
    """

    manifest: Manifest
    tensors: dict[str, dict[str, Tensor]]
    static: dict[SiteKey, QParams]
    rotations: dict[str, Tensor] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe by which the weights were made."""
        return self.manifest.recipe


@dataclass(frozen=True)
class StoredModel:
    """A model whose weights are quantized: in `model` as floating-point numbers, in `weights` as integers by name.

    state: what `quantized_forward` needs in addition to the model.
    history: the steps of the training that made them, where a method trained.
    companions: the checkpoint's other files, which are saved as they are (`rotquant.models.companions`).
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    weights: MutableMapping[str, Weight]
    state: QuantizedState
    history: Sequence[Record] = ()
    companions: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """How the weights were made."""
        return self.state.manifest

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by stage."""
        return self.manifest.seconds


@dataclass(frozen=True)
class StoredTensors:
    """The content of a model folder by Hugging Face name: floating-point tensors, and weights as integers."""

    config: Any
    floats: dict[str, Tensor]
    weights: MutableMapping[str, Weight]
    state: QuantizedState


def ids_of_prefix(state: QuantizedState) -> tuple[int, ...]:
    """The tokens that stand before every text, by what the method that chose them stored."""
    names = (name for name, method in state.recipe.methods.items() if "prefix" in method.roles)
    stored = (state.tensors.get(name, {}).get("ids") for name in names)
    return tuple(token for ids in stored if ids is not None for token in ids.tolist())


@task("saving the model")
def save_quantized(folder: str | Path, stored: StoredModel, source: dict[str, Any] | None = None) -> None:
    """Write a model folder; an existing one is replaced once the new one is complete, and nothing else.

    Args:
        source: what the manifest shall say of the origin, as plain data.
    """
    check_output_folder(folder, QUANTIZED)
    tensors = {
        name: narrowed(tensor)
        for name, tensor in _floating_tensors(stored.model, stacked_names(stored.weights)).items()
    }
    tensors |= all_weight_tensors(stored.weights)
    tensors |= state_tensors(stored.state)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    with atomic_directory(folder) as temporary:
        write_shards(temporary, tensors, _STEM)
        _write_settings(temporary, stored.model, stored.tokenizer, stored.companions)
        if stored.tokenizer is not None and bos_of(stored.tokenizer) in ids_of_prefix(stored.state):
            without_bos(stored.tokenizer).save_pretrained(temporary)
        manifest = stored.manifest.model_copy(
            update={"format_version": FORMAT_VERSION, "source": source or stored.manifest.source}
        )
        write_json(temporary / MANIFEST, seal(temporary / MANIFEST, manifest.model_dump(mode="json")))


def _write_settings(
    folder: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    files: Mapping[str, bytes],
) -> None:
    """Write all but the tensors: the configuration, and a checkpoint's other files or what transformers has of them."""
    model.config.save_pretrained(folder)
    write_companions(folder, files)
    settings = getattr(model, "generation_config", None)
    if GENERATION not in files and settings is not None:
        write_generation_config(folder, settings)
    if tokenizer is not None and not has_tokenizer(files):
        tokenizer.save_pretrained(folder)


def check_settings(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", files: Mapping[str, bytes]
) -> None:
    """Write a model's configuration, tokenizer and other files on trial, before the work whose result they go with.

    Raises:
        CheckpointError: transformers loads but does not save one of them.
    """
    try:
        with tempfile.TemporaryDirectory() as folder, quiet_transformers():
            _write_settings(Path(folder), model, tokenizer, files)
    except OSError:  # no place for a trial; the output has been tried by the caller
        return
    except Exception as error:  # transformers validates by several libraries' exceptions
        raise CheckpointError(f"the model's configuration or tokenizer cannot be saved: {first_line(error)}.") from None


@task("loading the model")
def load_quantized(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", QuantizedState]:
    """Load a model folder: dequantized weights, tokenizer, and the state that `quantized_forward` needs.

    Args:
        dtype: of the parameters; default, and the only one that reproduces the saved model exactly, its own.

    Raises:
        ResultError: the manifest is missing, damaged or of another format version.
        CheckpointError: another kind of folder, a tensor that is missing, of the wrong shape or not finite, or a file
            that is truncated or not the one that was written.
    """
    stored = read_quantized(folder, device)
    folder = Path(folder)
    own: torch.dtype = getattr(torch, stored.state.manifest.dtype)
    model = make_model(folder, stored.config, stored.floats, dtype or own, device, stored.weights)
    return model, load_tokenizer(folder), stored.state


def make_model(
    folder: Path,
    config: Any,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    weights: MutableMapping[str, Weight] | None = None,
) -> "PreTrainedModel":
    """A model of tensors that were read from a folder, on a device.

    Args:
        tensors: floating-point ones by their names.
        weights: quantized ones, taken out one by one so that few exist in both forms. They are dequantized where they
            lie; transformers sees zeros without memory in their places.

    Raises:
        CheckpointError: they do not fit the configuration, or are not finite.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    weights = weights or {}
    tensors = tensors | {name: torch.zeros((), dtype=dtype).expand(weight.shape) for name, weight in weights.items()}
    stack_experts(tensors)
    try:
        with quiet_transformers():
            model, info = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=attention_implementation(config),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # what a strange config.json makes of transformers' classes has no common type
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}.") from None
    check_loading(folder, info)
    _fill(model, weights, dtype, device)
    model.to(device)  # pyright: ignore[reportArgumentType]
    check_loaded(folder, model)
    model.generation_config = generation_config(folder) or model.generation_config
    return model.eval()


def _fill(
    model: nn.Module, weights: MutableMapping[str, Weight], dtype: torch.dtype, device: torch.device | str
) -> None:
    """Put quantized weights into their places in a model, which for experts are parts of a parameter."""
    decoder_layers(model)  # makes the places of experts

    @torch.no_grad()  # a mode of each thread
    def put(name: str) -> None:
        values, place = weights.pop(name).dequantize(dtype), model.get_submodule(name.removesuffix(".weight")).weight
        if isinstance(place, nn.Parameter):
            place.data = values.to(device)
        else:
            cast(Tensor, place).copy_(values)

    in_threads(put, [*weights])


def read_quantized(folder: str | Path, device: torch.device | str = "cpu") -> StoredTensors:
    """Read a model folder as it is stored, without making a model of it.

    Args:
        device: where quantized weights are unpacked, and stay (`packing.take_weight`); all else is on the host.

    Raises:
        ResultError: the manifest is missing, damaged or of another format version.
        CheckpointError: another kind of folder, a tensor that is missing, of the wrong shape or not finite, or a file
            that is truncated or not the one that was written.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    config = load_config(folder)
    tensors: dict[str, Tensor] = {}
    files = [*check_weight_files(folder, _STEM)]
    with checking_digests(files, manifest.digests):
        for path in files:
            tensors |= read_tensors(path)
        check_finite(folder, tensors.items())
        state = take_state(folder, manifest, architecture_of(config), tensors)

        def taken(name: str) -> Weight:
            shape, scheme = manifest.quantized[name], manifest.recipe.rounded.scheme
            return take_weight(folder, name, shape, scheme, tensors, device)

        weights = dict(zip(manifest.quantized, in_threads(taken, manifest.quantized), strict=True))
    own: torch.dtype = getattr(torch, manifest.dtype)
    return StoredTensors(config, {name: tensor.to(own) for name, tensor in tensors.items()}, weights, state)


def read_method_tensors(folder: str | Path, method: str) -> dict[str, Tensor]:
    """Tensors that a method stored next to the weights, by their names; the weights are not read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    start, found = f"{_METHODS}.{method}.", {}
    for path, header in check_weight_files(Path(folder), _STEM).items():
        names = [name for name in header if name.startswith(start)]
        if names:
            with safe_open(path, framework="pt") as file:
                found |= {name.removeprefix(start): file.get_tensor(name) for name in names}
    return found


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a model folder, without its tensors; configuration and tokenizer are those that it was written
    with.

    Raises:
        ResultError: it is missing, damaged or of another format version.
        CheckpointError: another kind of folder, or the manifest or a file beside it was changed.
    """
    check_kind(folder, "quantized")
    folder = Path(folder)
    path = folder / MANIFEST
    data = read_json(path, "manifest", remedy=_AGAIN)
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version not in (2, FORMAT_VERSION):
        raise ResultError(f"manifest {path} has format version {version}, this rotquant reads {FORMAT_VERSION}.")
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        raise ResultError(f"manifest {path} is damaged ({first_problem(error)}); {_AGAIN}.") from None
    if manifest.format_version == FORMAT_VERSION or manifest.digest:
        check_seal(path, data, _CHANGES)
    elif not manifest.digests:
        raise ResultError(f"manifest {path} has no digests of the tensors, which cannot be checked; {_AGAIN}.")
    else:
        note_unsealed(folder, "the tensors, not recipe, configuration and tokenizer,")
    return manifest


def prefix_tokens(folder: str | Path) -> int:
    """How many tokens a stored model has before every text, without its weights; 0 where no method puts any there.

    Raises:
        ResultError, CheckpointError: as `read_manifest`; or a file is damaged.
    """
    methods = read_manifest(folder).recipe.methods.values()
    names = {f"{_METHODS}.{method.name}.ids" for method in methods if method.prefix_tokens}
    headers = check_weight_files(Path(folder), _STEM).values() if names else ()
    return sum(header[name]["shape"][0] for header in headers for name in names & header.keys())


@torch.no_grad()
def round_ends(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's embedding and head to the type that its checkpoint has them in, where that has fewer bits.

    They are the large tensors that are not quantized. In a rotated model they are no longer numbers of that type; their
    rounding is as small as the one that the checkpoint's own went through (2.6e-5 nats of KL divergence, SmolLM2-135M).
    Call it before the model is measured or saved, so that what is loaded equals it.
    """
    for weight in {base_model(model).embed_tokens.weight, lm_head(model).weight}:
        if dtype.itemsize < weight.dtype.itemsize:
            weight.copy_(weight.to(dtype))


def narrowed(tensor: Tensor) -> Tensor:
    """The same numbers in 16 bits, where bfloat16 or float16 has each of them exactly; else the tensor as it is.

    Embeddings and norms of a 16-bit checkpoint need no more, in whatever type they were loaded.
    """
    for dtype in (torch.bfloat16, torch.float16) if tensor.dtype in (torch.float32, torch.float64) else ():
        if torch.equal((found := tensor.to(dtype)).to(tensor.dtype), tensor):
            return found
    return tensor


def _floating_tensors(model: nn.Module, quantized: set[str]) -> dict[str, Tensor]:
    """All parameters and buffers but the quantized ones; of tensors that share memory (tied embeddings) the first."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name not in quantized and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def state_tensors(state: QuantizedState) -> dict[str, Tensor]:
    """The tensors that quantizers and methods read at run time, by the names under which they are stored."""
    tensors = named(_ROTATIONS, state.rotations)
    for method, kept in state.tensors.items():
        tensors |= named(f"{_METHODS}.{method}", kept)
    for (layer, site), qparams in state.static.items():
        tensors |= named(f"{_SITES}.{layer}.{site}", {"scale": qparams.scale, "zero_point": qparams.zero_point})
    return tensors


def is_state_tensor(name: str) -> bool:
    """Whether a stored tensor is one of `state_tensors`."""
    return name.startswith((f"{_METHODS}.", f"{_SITES}.", f"{_ROTATIONS}."))


def take_state(
    folder: Path, manifest: Manifest, architecture: Architecture, tensors: dict[str, Tensor]
) -> QuantizedState:
    """Take `state_tensors` out of `tensors`, checked against the recipe's methods and schemes.

    Raises:
        CheckpointError: one is missing or of another shape.
    """
    recipe = manifest.recipe
    kept = {name: _take_tensors(folder, method, architecture, tensors) for name, method in recipe.methods.items()}
    matrices = {
        name: take(folder, f"{_ROTATIONS}.{name}", shape, tensors)
        for name, shape in tensor_shapes(architecture, recipe.transforms).items()
    }
    return QuantizedState(manifest, kept, _take_static(folder, recipe, architecture, tensors), matrices)


def _take_tensors(
    folder: Path, method: Method, architecture: Architecture, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Take what a method reads at run time out of `tensors`."""
    shapes = hooks(method).tensors(method, architecture)
    return {
        name: take(folder, f"{_METHODS}.{method.name}.{name}", tuple(shape), tensors) for name, shape in shapes.items()
    }


def _take_static(
    folder: Path, recipe: Recipe, architecture: Architecture, tensors: dict[str, Tensor]
) -> dict[SiteKey, QParams]:
    """Take static scales out of `tensors`, of all that the recipe gives such."""
    static: dict[SiteKey, QParams] = {}
    for name, scheme in static_schemes(recipe, architecture).items():
        shape = static_shape(scheme, architecture.num_kv_heads)
        for index in range(architecture.num_layers):
            place = f"{_SITES}.{index}.{name}"
            zero_point = None if scheme.symmetric else take(folder, f"{place}.zero_point", shape, tensors)
            static[index, name] = QParams(take(folder, f"{place}.scale", shape, tensors), zero_point)
    return static
