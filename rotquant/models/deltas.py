"""Checkpoints that are another one with low-rank deltas (Hu et al. 2021), in the format of the library peft.

A folder with `adapter_config.json` and `adapter_model.safetensors` names its base; W + (alpha / r) B A is put together
once and saved in the user's cache, as a plain checkpoint. Importing this module loads no torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import check_regular_files, read_object
from rotquant.models.companions import companions, write_companions
from rotquant.models.folders import (
    DELTA_CONFIG,
    check_weight_files,
    is_delta,
    located,
    read_safetensors_header,
    weights_digest,
)

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = DELTA_CONFIG, "adapter_model.safetensors"

PREFIX, FIRST, SECOND = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Names of the tensors of a linear layer: the prefix, and the ends of A's and of B's after the layer's name."""


class Delta(BaseModel):
    """Configuration of an adapter; kinds of adapters that are more than W + (alpha / r) B A are refused."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peft_type: Literal["LORA"]
    """The kind of adapter."""
    base_model_name_or_path: Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=1000)]
    """The base: a folder, from the adapter's or whole, or a hub id."""
    r: Annotated[int, Field(gt=0)]
    """Rank."""
    lora_alpha: Annotated[float, Field(gt=0)]
    """The delta counts lora_alpha / r times."""
    bias: Literal["none"] = "none"
    """Biases have no deltas."""
    use_dora: Literal[False] = False
    """Magnitudes are not learned apart."""
    use_rslora: Literal[False] = False
    """The delta is divided by the rank, not by its root."""
    fan_in_fan_out: Literal[False] = False
    """Weights are [out, in]."""
    rank_pattern: Annotated[dict[str, int], Field(max_length=0)] = Field(default_factory=dict)
    """All layers have one rank."""
    alpha_pattern: Annotated[dict[str, float], Field(max_length=0)] = Field(default_factory=dict)
    """Pattern of alphas by module, empty where all modules have one alpha."""
    modules_to_save: Annotated[list[str], Field(max_length=0)] | None = None
    """No module is replaced as a whole."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.lora_alpha / self.r


def read_delta(folder: Path) -> Delta:
    """The configuration of a folder of deltas.

    Raises:
        CheckpointError: it is damaged or of another kind, or the deltas themselves are missing.
    """
    check_regular_files(folder, CheckpointError)
    try:
        delta = Delta.model_validate(read_object(folder / CONFIG, "adapter", CheckpointError, "copy it again"))
    except ValidationError as error:
        raise CheckpointError(f"{folder / CONFIG} is no plain low-rank delta: {first_problem(error)}.") from None
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is incomplete: {WEIGHTS} is not there.")
    return delta


def base_of(folder: Path, delta: Delta) -> Path | str:
    """The base's folder, next to the deltas or from the working folder, or its hub id where there is none.

    Raises:
        CheckpointError: the base is low-rank deltas, too, these or others.
    """
    name = delta.base_model_name_or_path
    neighbour = (folder / name).resolve()
    if not neighbour.is_dir():
        return name
    if is_delta(neighbour):
        itself = " itself" if neighbour == folder.resolve() else ""
        raise CheckpointError(
            f"{folder / CONFIG} names {name} as its base, which is low-rank deltas{itself}: name the whole checkpoint "
            "that they were made from."
        )
    return neighbour


def base_folder(checkpoint: str | Path) -> Path | None:
    """The folder of the checkpoint that a folder's low-rank deltas are of, where both are here; else None."""
    folder = Path(checkpoint)
    if not is_delta(folder):
        return None
    base = base_of(folder, read_delta(folder))
    return base if isinstance(base, Path) else None


def checked_base(folder: Path) -> Path | str:
    """The base of low-rank deltas, a folder that they fit or a hub id.

    Raises:
        CheckpointError: the deltas are damaged, of another kind or rank than they say, or of other weights than the
            base's are now.
    """
    delta = read_delta(folder)
    base, header = base_of(folder, delta), read_safetensors_header(folder / WEIGHTS)
    for name in _layers(folder, header):
        rank = header[PREFIX + name + FIRST]["shape"][0]
        if rank != delta.r:
            raise CheckpointError(
                f"{folder} is damaged: its {CONFIG} says r = {delta.r}, which scales the deltas, and the matrices of "
                f"{name} have rank {rank}; copy it again."
            )
    try:
        place, _, _ = located(str(base))
        if place is None:
            return base
        headers = check_weight_files(place).values()
        shapes = {
            name: entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"
        }
        digest = weights_digest(place)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is a low-rank delta, and its base cannot be had: {error}") from None
    check_fits(folder, header, str(place), digest, shapes)
    return place


def check_fits(
    folder: Path, header: Mapping[str, Any], base: str, digest: str, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Refuse deltas that are of another checkpoint than their base is now.

    Args:
        header: of the deltas' file. base, digest: the checkpoint that is there, and what identifies it.
        shapes: of the checkpoint's tensors, by name.

    Raises:
        CheckpointError: they were made of another one, or a delta has no weight of its shape there.
    """
    recorded = header.get("__metadata__", {}).get("base_digest")
    if recorded is not None and recorded != digest:
        raise CheckpointError(
            f"{folder} is a low-rank delta of the checkpoint {recorded}, and {base} is {digest}: give it the base that "
            "it was made from."
        )
    for name in _layers(folder, header):
        shape = [header[PREFIX + name + SECOND]["shape"][0], header[PREFIX + name + FIRST]["shape"][1]]
        there = shapes.get(f"{name}.weight")
        if there is None or [*there] != shape:
            what = "has no such weight" if there is None else f"has {[*there]}"
            raise CheckpointError(
                f"{folder} does not fit its base: a delta of {name} has shape {shape}, {base} {what}."
            )


def merged(weight: "Tensor", first: "Tensor", second: "Tensor", scale: float) -> "Tensor":
    """A weight with its delta, float32; computed in float64, so that no machine's order of adding shows."""
    return (weight.double() + scale * (second.double() @ first.double())).float()


def merge(folder: Path, delta: Delta, base: Path, files: Sequence[Path], output: Path) -> None:
    """Write the base with the deltas, in float32, as a plain checkpoint into the new folder `output`.

    Args:
        files: the base's safetensors files.
    """
    import torch
    from safetensors.torch import save_file

    from rotquant.models.integrity import read_tensors

    deltas = read_tensors(folder / WEIGHTS)
    tensors = {name: tensor for path in files for name, tensor in read_tensors(path).items()}
    for name in [name.removesuffix(FIRST) for name in deltas if name.endswith(FIRST)]:
        weight = f"{name.removeprefix(PREFIX)}.weight"
        tensors[weight] = merged(tensors[weight], deltas[name + FIRST], deltas[name + SECOND], delta.scale)
    whole = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    output.mkdir()
    save_file(whole, output / "model.safetensors", metadata={"format": "pt"})
    write_companions(output, companions(base))
    config = read_object(base / "config.json", "configuration", CheckpointError, "copy the checkpoint again")
    config["dtype"] = str(torch.float32).removeprefix("torch.")
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _layers(folder: Path, header: Mapping[str, Any]) -> list[str]:
    """The names of the layers that have a delta, each with both of its matrices."""
    found = []
    for tensor in header:
        if tensor == "__metadata__":
            continue
        name = tensor.removeprefix(PREFIX)
        ends = [end for end in (FIRST, SECOND) if name.endswith(end)]
        if not tensor.startswith(PREFIX) or not ends:
            raise CheckpointError(f"{folder} is no plain low-rank delta: it has the tensor {tensor}.")
        name = name.removesuffix(ends[0])
        pair = [header.get(PREFIX + name + end, {}).get("shape") for end in (FIRST, SECOND)]
        if pair[0] is None or pair[1] is None or pair[0][0] != pair[1][1]:
            raise CheckpointError(f"{folder} is damaged: the two matrices of {name} do not belong together.")
        if ends[0] == FIRST:
            found.append(name)
    return found
