"""Decoders on disk: a folder of the tensors as the kernels read them, a manifest and the tokenizer.

decoder.safetensors (or shards) holds the decoder's buffers under its own names, decoder.json its configuration,
precision and origin. Loading copies bytes: nothing is packed or quantized again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from rotquant.decoder.config import DecoderConfig, Precision
from rotquant.decoder.model import Decoder
from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.errors import CheckpointError, ResultError
from rotquant.foundation.files import atomic_directory, check_output_folder, read_json, write_json
from rotquant.models.checkpoints import load_tokenizer
from rotquant.models.companions import has_tokenizer, write_companions
from rotquant.models.folders import DECODER, check_kind, read_safetensors_header
from rotquant.models.folders import DECODER_MANIFEST as MANIFEST
from rotquant.models.generation import generation_config
from rotquant.models.integrity import (
    check_finite,
    check_seal,
    checking_digests,
    note_unsealed,
    read_tensors,
    seal,
    write_shards,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_STEM = "decoder"
_AGAIN = "convert the model again"


class DecoderManifest(Frozen):
    """The content of decoder.json. source: what the decoder was made of, as the maker says it.

    digests: SHA-256 of the files beside it that loading reads, by name; of version 1 of the tensors' files alone.
    digest: SHA-256 of all the others; empty of version 1.
    """

    format_version: Literal[1, 2] = 2
    config: DecoderConfig
    precision: Precision
    files: tuple[Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")], ...]
    source: dict[str, Any] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True)
class StoredDecoder:
    """Content of a decoder's folder. generation_config: the settings that it was made with, where it has a file."""

    decoder: Decoder
    tokenizer: "PreTrainedTokenizerBase | None"
    manifest: DecoderManifest
    generation_config: "GenerationConfig | None" = None


def save_decoder(
    folder: str | Path,
    decoder: Decoder,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    source: dict[str, Any] | None = None,
    companions: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a folder; a decoder that is there is replaced once the new one is complete, and nothing else.

    Args:
        tokenizer: written where `companions` have none.
        companions: the model's files other than weights (`rotquant.models.companions`), written as they are.
    """
    check_output_folder(folder, DECODER)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in decoder.state_dict().items()}
    with atomic_directory(folder) as temporary:
        files = write_shards(temporary, tensors, _STEM)
        write_companions(temporary, companions)
        if tokenizer is not None and not has_tokenizer(companions):
            tokenizer.save_pretrained(temporary)
        manifest = DecoderManifest(
            config=decoder.config,
            precision=decoder.precision,
            files=files,
            source=source or {},
        )
        write_json(temporary / MANIFEST, seal(temporary / MANIFEST, manifest.model_dump(mode="json")))


def load_decoder(folder: str | Path, device: torch.device | str = "cpu") -> StoredDecoder:
    """Load a folder that `save_decoder` wrote.

    Raises:
        ResultError: the manifest is missing, damaged or of another format version.
        CheckpointError: another kind of folder, a file that is missing, truncated or not the one that was written, or a
            tensor that does not fit the manifest or is not finite.
    """
    folder = Path(folder)
    manifest = read_decoder_manifest(folder)
    files = [folder / file for file in manifest.files]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{folder} is incomplete: {path.name} is missing; convert the model again.")
        read_safetensors_header(path)
    tensors: dict[str, Tensor] = {}
    decoder = Decoder(manifest.config, manifest.precision, "meta")
    with checking_digests(files, manifest.digests):
        for path in files:
            tensors |= read_tensors(path, device)
        _check(folder, decoder, tensors)
        check_finite(folder, tensors.items())
    decoder.load_state_dict(tensors, assign=True)
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").is_file() else None
    return StoredDecoder(decoder.eval(), tokenizer, manifest, generation_config(folder))


def read_decoder_manifest(folder: str | Path) -> DecoderManifest:
    """The manifest of a decoder's folder; the tokenizer is the one that it was written with.

    Raises:
        ResultError: it is missing, damaged or of another format version.
        CheckpointError: another kind of folder, or the manifest or a file beside it was changed.
    """
    check_kind(folder, "decoder")
    folder = Path(folder)
    path = folder / MANIFEST
    data = read_json(path, "manifest", remedy=_AGAIN)
    try:
        manifest = DecoderManifest.model_validate(data)
    except ValidationError as error:
        raise ResultError(f"manifest {path} is damaged ({first_problem(error)}); {_AGAIN}.") from None
    if manifest.format_version > 1 or manifest.digest:
        check_seal(path, data, "quantize and convert again")
    elif not manifest.digests:
        raise ResultError(f"manifest {path} has no digests of the tensors, which cannot be checked; {_AGAIN}.")
    else:
        note_unsealed(folder, "the tensors, not shape, precision and tokenizer,")
    return manifest


def _check(folder: Path, decoder: Decoder, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors are those of the decoder, in name, shape and type."""
    expected = decoder.state_dict()
    for name in sorted(expected.keys() ^ tensors.keys()):
        problem = "is missing" if name in expected else "should not be there"
        raise CheckpointError(f"{folder} is damaged: tensor {name} {problem}; convert the model again.")
    for name, tensor in expected.items():
        found = tensors[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder} is damaged: tensor {name} is {found.dtype} {list(found.shape)}, expected {tensor.dtype}"
                f" {list(tensor.shape)}; convert the model again."
            )
