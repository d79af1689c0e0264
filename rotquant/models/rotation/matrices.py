"""A model's rotations as matrices: R1 of the residual stream, each layer's R2 of values (SpinQuant Sec. 3.1) and online
ones of its inputs.

Drawn at random as a `RotationScheme` says, or learned by a method, and kept in one safetensors file.
What is done with them is `rotquant.models.rotation.fusing`'s business.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.foundation.files import atomic_path, check_regular
from rotquant.foundation.parsing import parse_json
from rotquant.models.architectures import Architecture
from rotquant.models.integrity import check_finite, tensors_digest
from rotquant.models.rotation.scales import check_scales
from rotquant.models.transforms import features_at
from rotquant.recipes.schemes import RotationScheme
from rotquant.recipes.transforms import Kind, Location, SiteName
from rotquant.tensors import hadamard
from rotquant.tensors.stiefel import newton_schulz, orthonormality_error

#: How far from orthonormal a stored or learned rotation may be; beyond it a rotated model is another function.
_TOLERANCE = 1e-4
#: The file's only metadata: history and digest of the matrices, and what they were made of, as JSON. Safetensors writes
#: several in random order, and equal rotations should give equal files.
_METADATA = "rotquant.models.rotation.matrices"
#: Begins the names of scales among those of matrices.
SCALE = "scale."
#: What may be of each layer.
_OF_LAYERS = ("keys", "values", *get_args(SiteName))


@dataclass(frozen=True)
class Rotations:
    """Orthogonal matrices, float64, to be applied to rows: an activation x becomes x R.

    residual: R1 [hidden, hidden], or None.
    values: R2 of each layer [head_dim, head_dim], the same for all heads of the layer, or None.
    inputs: online ones of each layer [hidden, hidden] by the names of their sites (`RotationScheme.inputs`).
    scales: by what they divide, positive numbers of each layer that are merged into the weights with the rotations
        (`rotation.scales`).
    """

    residual: Tensor | None
    values: tuple[Tensor, ...] | None
    inputs: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    scales: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, tuple[Tensor, ...]]:
        """Those of each layer: `values`, where there are any, and `inputs`."""
        return {**({"values": self.values} if self.values else {}), **self.inputs}

    def of_layer(self, index: int) -> dict[str, Tensor]:
        """Those of one layer, by the names of their locations."""
        return {name: matrices[index] for name, matrices in self.layers.items()}

    def scales_of(self, index: int) -> dict[str, Tensor]:
        """The scales of one layer, by what they divide."""
        return {name: scales[index] for name, scales in self.scales.items()}

    def online(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What acts while the model runs, as it is stored: [layers, hidden, hidden], on the host, in `dtype`."""
        return {name: torch.stack([*matrices]).to("cpu", dtype) for name, matrices in self.inputs.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The matrices by name: `residual`, `values.0`, `values.1`, `mlp_input.0` and so on, scales `scale.keys.0`."""
        named = {} if self.residual is None else {"residual": self.residual}
        layers = self.layers | {f"{SCALE}{name}": scales for name, scales in self.scales.items()}
        return named | {f"{name}.{index}": one for name, every in layers.items() for index, one in enumerate(every)}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], exact: bool = True) -> "Rotations":
        """The inverse of `tensors`, in float64; without `exact` the tensors themselves.

        Raises:
            ResultError: one is missing, or is none of them.
        """
        given = {name: tensor.to(torch.float64) if exact else tensor for name, tensor in tensors.items()}
        found: dict[str, tuple[Tensor, ...]] = {}
        for name in dict.fromkeys(name.rpartition(".")[0] for name in given if name != "residual"):
            places = [f"{name}.{index}" for index in range(sum(one.startswith(f"{name}.") for one in given))]
            if name.removeprefix(SCALE) not in _OF_LAYERS or not given.keys() >= set(places):
                raise ResultError(f"these are no rotations: they have {', '.join(sorted(given))}.")
            found[name] = tuple(given[place] for place in places)
        scales = {name.removeprefix(SCALE): found.pop(name) for name in [*found] if name.startswith(SCALE)}
        return cls(given.get("residual"), found.pop("values", None), found, scales)


@dataclass(frozen=True)
class LearnedRotations:
    """Learned rotations and the history of their training.

    rotations: orthogonal to float64's precision.
    history: one record per step: `step`, `loss` (nats per token) and `learning_rate` of the step, `orthonormality`
        max |R^T R - I| over all rotations after it; of the batch before it `site_snr` in dB by place
        ("3.attention_input", "3.keys"), their mean `activation_snr`, and every some steps `end_to_end_snr`.
    """

    rotations: Rotations
    history: list[dict[str, Any]]

    @classmethod
    def of_float32(cls, matrices: Mapping[str, Tensor], history: list[dict[str, Any]]) -> "LearnedRotations":
        """Matrices by their names (`Rotations.tensors`), taken from float32's to float64's distance from orthogonal;
        scales as they are."""
        exact = {name: matrix.detach().cpu().double() for name, matrix in matrices.items()}
        for name, one in exact.items():
            if not name.startswith(SCALE):
                exact[name] = newton_schulz(newton_schulz(one))
        return cls(Rotations.of_tensors(exact), history)


def initial_rotations(architecture: Architecture, scheme: RotationScheme, seed: int) -> Rotations:
    """R1 or `inputs`, then every layer's R2, as the scheme says, from one generator; equal seeds, equal matrices.

    Raises:
        HadamardSizeError: a Hadamard matrix is asked for of a size that has no construction.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[Location, tuple[Tensor, ...]] = {}
    for one in scheme.transforms:
        if one.tensors:
            count = 1 if one.location == "residual" else architecture.num_layers
            size = features_at(architecture, one.location)
            found[one.location] = tuple(_matrix(one.kind, size, generator) for _ in range(count))
    (residual,) = found.pop("residual", (None,))
    return Rotations(residual, found.pop("values", None), cast("dict[str, tuple[Tensor, ...]]", found))


def _matrix(kind: Kind, size: int, generator: torch.Generator) -> Tensor:
    """A rotation [size, size]: the exact Hadamard matrix, or a random one of its kind."""
    if kind == "hadamard":
        return hadamard.hadamard_matrix(size, torch.float64) * size**-0.5
    draw = hadamard.random_hadamard_matrix if kind == "random_hadamard" else hadamard.random_orthogonal_matrix
    return draw(size, generator)


def check_rotations(architecture: Architecture, scheme: RotationScheme, rotations: Rotations) -> None:
    """Raise `RecipeError` unless these are orthogonal matrices of the model's sizes, for what the scheme rotates, and
    scales of its shapes."""
    rotated = {one.location: features_at(architecture, one.location) for one in scheme.transforms if one.tensors}
    wanted = {"residual": rotated.pop("residual")} if "residual" in rotated else {}
    wanted |= {f"{name}.{index}": size for name, size in rotated.items() for index in range(architecture.num_layers)}
    given = replace(rotations, scales={}).tensors()
    if set(given) != set(wanted):
        raise RecipeError(
            f"the rotations do not belong to this recipe and {architecture.family} model: expected {_counted(wanted)}, "
            f"and got {_counted(given)}."
        )
    for name, size in wanted.items():
        shape = tuple(given[name].shape)
        if shape != (size, size):
            raise RecipeError(f"rotation {name} has shape {shape}, and this model needs {(size, size)}.")
        if not orthonormality_error(given[name]) <= _TOLERANCE:
            raise RecipeError(f"rotation {name} is not orthogonal.")
    check_scales(architecture, rotations.residual is not None, rotations.scales)


def _counted(names: Collection[str]) -> str:
    """How many matrices there are, as "R1 present and 2 R2"."""
    counts = Counter(name.rpartition(".")[0] for name in names)
    inputs = "".join(f", {counts[site]} of {site}" for site in get_args(SiteName) if counts[site])
    return f"R1 {'present' if 'residual' in names else 'absent'} and {counts['values']} R2{inputs}"


def save_rotations(
    path: str | Path, rotations: Rotations, history: list[dict[str, Any]], made_of: dict[str, Any] | None = None
) -> None:
    """Write rotations, and the history of their learning, to one safetensors file, atomically.

    history: plain data; empty for rotations that were drawn. made_of: what decided them, as plain data.
    """
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in rotations.tensors().items()}
    with atomic_path(path) as temporary:
        metadata = json.dumps({"history": history, "digest": tensors_digest(tensors), "made_of": made_of})
        save_file(tensors, temporary, metadata={_METADATA: metadata})


def load_rotations(path: str | Path) -> Rotations:
    """Read what `save_rotations` wrote.

    Raises:
        ResultError: the file is missing, damaged, or something else.
        CheckpointError: a matrix is not finite.
    """
    tensors, _ = _read(path)
    return Rotations.of_tensors(tensors)


def check_made_of(path: str | Path, wanted: dict[str, Any]) -> None:
    """Refuse a file of rotations that were learned on another model, text or seed, or with other settings.

    Args:
        wanted: what would decide rotations that were learned now (`save_rotations`).

    Raises:
        ResultError: they differ, or the file does not say; or as `load_rotations`.
    """
    made_of = _read(path)[1]["made_of"]
    if made_of is None:
        raise ResultError(f"rotations {path} do not say what they were learned with: learn them anew in another file.")
    found, asked = _leaves(made_of), _leaves(wanted)
    others = [
        f"{name} {found.get(name)} (here {asked.get(name)})"
        for name in sorted(found.keys() | asked.keys())
        if found.get(name) != asked.get(name)
    ]
    if others:
        raise ResultError(f"rotations {path} were learned with {', '.join(others)}: name another file.")


def _leaves(value: Any, place: str = "") -> dict[str, Any]:
    """Plain data by dotted names."""
    if not isinstance(value, dict):
        return {place: value}
    inner = (_leaves(one, f"{place}.{name}" if place else name) for name, one in value.items())
    return {name: one for leaves in inner for name, one in leaves.items()}


def load_history(path: str | Path) -> list[dict[str, Any]]:
    """The history that `save_rotations` wrote next to the rotations; raises as `load_rotations`."""
    return _read(path)[1]["history"]


def ends_of(history: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The first and the last step of a history, without what they say of single places; nothing of an empty one."""
    ends = {"first": history[0], "last": history[-1]} if history else {}
    return {
        end: {name: value for name, value in record.items() if isinstance(value, int | float)}
        for end, record in ends.items()
    }


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The matrices, and what is said of them."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise ResultError(f"rotations {path} do not exist.") from None
    except (SafetensorError, OSError) as error:
        raise ResultError(f"rotations {path} are damaged ({error}); delete the file to compute it again.") from None
    if _METADATA not in metadata:
        raise ResultError(f"{path} holds no rotations.")
    check_finite(path, tensors.items())
    try:
        record: Any = parse_json(metadata[_METADATA].encode())
    except ValueError:
        record = None
    whole = isinstance(record, dict) and record.keys() >= {"history", "digest", "made_of"}
    if not (whole and isinstance(record["history"], list) and all(isinstance(one, dict) for one in record["history"])):
        raise ResultError(f"rotations {path} are damaged (their history); delete the file to compute it again.")
    if tensors_digest(tensors) != record["digest"]:
        raise ResultError(f"rotations {path} are damaged: a matrix was changed; delete the file to compute it again.")
    return tensors, record
