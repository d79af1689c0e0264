"""A GGUF file as a plain checkpoint: its integers dequantized, its tokenizer, and where all of it came from.

Such a checkpoint is what the file's integers are, not what its publisher trained, so a small file goes along with its
copies, and every number of it says so. All that can be refused is refused from the header. Tensors are dequantized some
rows at a time, and a file of the folder is written when it is full, so what is in memory is one such file.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rotquant.foundation.contents import content_digests, stamp
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError, ResultError
from rotquant.foundation.files import (
    OutputKind,
    atomic_directory,
    cache_folder,
    canonical_json,
    has_keys,
    read_object,
    short_hash,
    write_json,
)
from rotquant.foundation.progress import task
from rotquant.models.gguf.header import Header, is_gguf, library, read_header
from rotquant.models.gguf.network import GGUFNetwork, Place, network_of, paired_rows
from rotquant.models.gguf.tokenizer import Vocabulary, tokenizer_of, vocabulary_of

if TYPE_CHECKING:
    import torch

#: Name of the file in a folder.
ORIGIN = "gguf_origin.json"
#: A type of fewer of the weights is not named in a sentence.
_NAMED = 0.005

_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Origin(BaseModel):
    """A GGUF file that a checkpoint was dequantized from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: str
    """Its name, without its folder."""
    sha256: Annotated[str, Field(pattern="[0-9a-f]{64}")]
    """Of its content."""
    name: str = ""
    """What it calls its model."""
    types: Mapping[str, _Share]
    """Shares of the weights by gguf's names of their types, the largest first."""
    bits_per_weight: Annotated[float, Field(gt=0.0)]
    """Bits of all tensors over all weights."""
    dtype: str
    """Floating-point type of the folder that was written."""

    def __str__(self) -> str:
        """What it is, as the end of a sentence."""
        types = ", ".join(f"{kind} {share:.0%}" for kind, share in self.types.items() if share >= _NAMED)
        return (
            f"dequantized to {self.dtype} from {self.file} (SHA-256 {self.sha256[:12]}; {types}; "
            f"{self.bits_per_weight:.2f} bits a weight)"
        )


def origin_of(folder: str | Path) -> Origin | None:
    """The GGUF file that a folder's weights, or those that they were made from, were dequantized from; None of others.

    Raises:
        CheckpointError: the folder's file that says so is damaged.
    """
    path = Path(folder) / ORIGIN
    if not path.is_file():
        return None
    content: dict[str, Any] = read_object(path, "origin", CheckpointError)
    try:
        return Origin.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_problem(error, content)}.") from None


#: What `rotquant import-gguf` replaces, and nothing else.
IMPORTED = OutputKind("a checkpoint of `rotquant import-gguf`", has_keys("sha256", "types", marker=ORIGIN))
#: Counts how what is written changed: a cached folder of another number is not used.
_FORMAT = 1
#: The type of a folder in the cache.
DTYPE = "bfloat16"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Bytes of a file of weights, and weights that are dequantized at once.
_SHARD, _AT_ONCE = 2_000_000_000, 2**23


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file that can be imported."""

    header: Header
    network: GGUFNetwork
    vocabulary: Vocabulary

    @property
    def parameters(self) -> int:
        """Weights of the network."""
        return sum(prod(place.shape) for place in self.network.places.values())

    def size(self, dtype: str = DTYPE) -> int:
        """Bytes of the folder's weights."""
        return self.parameters * _BYTES[dtype]


def checked(path: str | Path) -> GGUFModel:
    """What a GGUF file holds; it is read but for its tensors, once.

    Raises:
        UnsupportedArchitectureError: no family of its architecture is known here.
        CheckpointError: no GGUF file, truncated, damaged, a part of a model, with settings, tensors, types or a
            tokenizer that are not understood; or the package gguf is not installed.
    """
    return _checked(Path(path), str(stamp(path)))


@lru_cache(4)
def _checked(path: Path, _stamp: str) -> GGUFModel:
    header = read_header(path)
    network, vocabulary = network_of(header), vocabulary_of(header)
    if len(vocabulary.tokens) > network.config["vocab_size"]:
        raise CheckpointError(
            f"{path} has {len(vocabulary.tokens)} tokens, and an embedding of {network.config['vocab_size']}."
        )
    return GGUFModel(header, network, vocabulary)


def imported(path: str | Path, weights: bool = True) -> Path:
    """The plain checkpoint that a GGUF file is, in bfloat16, made once and saved in the user's cache.

    Args:
        weights: without them the folder has configuration and tokenizer alone.

    Raises:
        As `checked`, and ResultError where the cache has no room.
    """
    source = checked(path)
    name = short_hash(canonical_json([_sha256(Path(path)), DTYPE, _FORMAT]), 32)
    whole = cache_folder("gguf") / name
    place = whole if weights else whole.with_name(f"{name}-settings")
    if place.is_dir() or whole.is_dir():
        return whole if whole.is_dir() else place
    free = shutil.disk_usage(place.parent).free
    if weights and free < source.size():
        raise ResultError(
            f"{path} takes {source.size():,} bytes once it is dequantized, and {place.parent} has {free:,}: make room, "
            "or set ROTQUANT_CACHE to a folder that has it."
        )
    write_checkpoint(path, place, DTYPE, weights)
    return place


def described(path: str | Path) -> Path:
    """The folder whose config.json describes a model: of a GGUF file one without weights, else the path itself.

    Raises as `imported`.
    """
    return imported(path, weights=False) if is_gguf(path) else Path(path)


def _sha256(path: Path) -> str:
    return content_digests([path], path.name)[path]


def write_checkpoint(path: str | Path, folder: str | Path, dtype: str = DTYPE, weights: bool = True) -> Origin:
    """Write a GGUF file as a plain checkpoint into a new folder.

    Args:
        dtype: float32, float16 or bfloat16.
        weights: whether they are written too.

    Raises:
        As `checked`, and ResultError where the folder cannot be written.
    """
    source = checked(path)
    origin = _origin(source, dtype)
    with task("dequantizing" if weights else "reading the header"), atomic_directory(folder) as temporary:
        try:
            _write_settings(source, temporary, dtype)
        except OSError:
            raise
        except Exception as error:  # what is odd to transformers and tokenizers has no common type
            raise CheckpointError(f"{path} cannot be imported: {' '.join(str(error).split())[:200]}.") from None
        if weights:
            _write_weights(source, temporary, dtype)
        write_json(temporary / ORIGIN, origin.model_dump(mode="json"))
    return origin


def origin_of_model(model: str | Path) -> Origin | None:
    """The GGUF file that a model is or was dequantized from, by a name as commands take it; None of any other.

    Raises:
        As `checked` and `origin_of`.
    """
    return _origin(checked(model), DTYPE) if is_gguf(model) else origin_of(model)


def _origin(source: GGUFModel, dtype: str) -> Origin:
    header = source.header
    counts: dict[str, int] = {}
    for one in header.tensors.values():
        counts[one.kind] = counts.get(one.kind, 0) + prod(one.shape)
    total = sum(counts.values())
    name = header.fields.get("general.name", "")
    return Origin(
        file=header.path.name,
        sha256=_sha256(header.path),
        name=name if isinstance(name, str) else "",
        types={kind: count / total for kind, count in sorted(counts.items(), key=lambda pair: -pair[1])},
        bits_per_weight=8 * sum(one.size for one in header.tensors.values()) / total,
        dtype=dtype,
    )


def _write_settings(source: GGUFModel, folder: Path, dtype: str) -> None:
    """Configuration, generation settings and tokenizer."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    said = dict(source.network.config)
    family, vocabulary = said.pop("model_type"), source.vocabulary
    ids = {f"{name}_token_id": vocabulary.ids[name] for name in ("bos", "pad") if name in vocabulary.ids}
    ends: Any = vocabulary.ends
    ids |= {"eos_token_id": ends[0] if len(ends) == 1 else [*ends]} if ends else {}
    config = AutoConfig.for_model(family, **said, **{"pad_token_id": None, "bos_token_id": None} | ids)
    config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]], dtype
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    tokenizer_of(vocabulary, said["max_position_embeddings"]).save_pretrained(folder)


def _write_weights(source: GGUFModel, folder: Path, dtype: str) -> None:
    """Weights, in files of at most `_SHARD` bytes or of one tensor, with an index where these are several."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    places = source.network.places
    files = [*_files(places, _BYTES[dtype])]
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        several = f"-{index + 1:05}-of-{len(files):05}" if len(files) > 1 else ""
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            values = _dequantized(source.header, name, places[name], kind)
            own = places[name].names
            tensors |= {own[0]: values} if len(own) == 1 else dict(zip(own, values.unbind(0), strict=True))
        file = f"model{several}.safetensors"
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        index_data = {"metadata": {"total_size": source.size(dtype)}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index_data)


def _files(places: dict[str, Place] | Any, width: int) -> Iterator[list[str]]:
    """Names of tensors, those of a file together."""
    names: list[str] = []
    size = 0
    for name, place in places.items():
        own = prod(place.shape) * width
        if names and size + own > _SHARD:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def _dequantized(header: Header, name: str, place: Place, dtype: "torch.dtype") -> "torch.Tensor":
    """A tensor's values as transformers has them."""
    import torch

    gguf, rows = library(), header.rows(name)
    kind = gguf.GGMLQuantizationType[header.tensors[name].kind]
    columns = place.shape[-1]
    found = torch.empty(len(rows), columns, dtype=dtype)
    step = max(1, _AT_ONCE // columns)
    for start in range(0, len(rows), step):
        values = torch.from_numpy(gguf.quants.dequantize(rows[start : start + step].copy(), kind))
        found[start : start + step] = values - place.offset if place.offset else values
    found = found.reshape(place.shape)
    if place.heads:
        unpaired = torch.empty_like(found)
        unpaired[paired_rows(len(found), place.heads)] = found
        found = unpaired
    return found
