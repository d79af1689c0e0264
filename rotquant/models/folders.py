"""Folders of models: the kind of each, what identifies its content, and its files, checked before anything is loaded.

Only safetensors weights are read, never pickles. Importing this module loads neither torch nor transformers, so the
workflow can compute digests for every job it plans.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rotquant.foundation.contents import content_digests, stamp
from rotquant.foundation.errors import CheckpointError, nearest
from rotquant.foundation.files import (
    OutputKind,
    canonical_json,
    check_regular,
    check_regular_files,
    file_inside,
    has_keys,
    read_object,
    short_hash,
)
from rotquant.foundation.parsing import parse_json
from rotquant.models.gguf.header import is_gguf
from rotquant.models.gguf.importing import imported

#: File that makes a folder a quantized model (rotquant.weights.storage).
MANIFEST = "rotquant.json"
#: File that makes a folder a converted decoder (rotquant.decoder.storage).
DECODER_MANIFEST = "decoder.json"

#: What writers of these folders and of GGUF files replace, and nothing else.
QUANTIZED = OutputKind("a quantized model", has_keys("format_version", "recipe", "quantized", marker=MANIFEST))
DECODER = OutputKind("a decoder", has_keys("format_version", "precision", "files", marker=DECODER_MANIFEST))
GGUF = OutputKind("a GGUF file of `rotquant export`", lambda path: _begins_with(path, GGUF_MARK))
#: Key of a GGUF file that is written here, near its head.
GGUF_MARK = b"rotquant.version"

#: File that makes a folder, without a config.json of its own, low-rank deltas of another checkpoint.
DELTA_CONFIG = "adapter_config.json"
_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
COPY = "copy the checkpoint again"
#: A configuration has some kilobytes. transformers validates each value of a long table many times.
_CONFIG_BYTES = 2**20
#: Files that loading reads in addition to the weights.
_SETTINGS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template*"),
    *("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt"),
)


def _begins_with(path: Path, mark: bytes) -> bool:
    """Whether a file has a mark in its first 4096 bytes."""
    with path.open("rb") as file:
        return mark in file.read(4096)


def settings_files(folder: Path) -> list[Path]:
    """The files of a checkpoint other than its weights that loading reads: configuration and tokenizer."""
    return sorted({path for pattern in _SETTINGS for path in folder.glob(pattern) if path.is_file()})


def weights_digest(folder: Path) -> str:
    """Digest of a network's configuration and weights by their content: 16 hexadecimal digits.

    Raises:
        CheckpointError: as `weight_files`.
    """
    digests = content_digests([folder / "config.json", *weight_files(folder)], folder.name)
    return short_hash(canonical_json([*digests.values()]))


def weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """The safetensors files of a folder, in order: `stem`.safetensors or the shards that its index names.

    Raises:
        CheckpointError: no config.json, an index that names missing files or such outside of the folder, pickled
            weights only, no weights at all, or a pipe or device where a file is to be read.
    """
    check_regular_files(folder, CheckpointError)
    check_regular(folder / "config.json", CheckpointError)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no config.json.")
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        named = read_object(index, "index", CheckpointError, COPY).get("weight_map")
        if not isinstance(named, dict):
            raise CheckpointError(f"index {index} is damaged (weight_map); {COPY}.")
        files = sorted({file_inside(folder, name, index, CheckpointError) for name in named.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            what = f"{missing[0]}, named in its index, is not there" if missing else "its index names no file"
            raise CheckpointError(f"{folder} is incomplete: {what}.")
        return files
    if single.is_file():
        return [single]
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} holds only pickled weights, which are not read because unpickling runs code; "
            "convert them to model.safetensors."
        )
    raise CheckpointError(f"{folder} holds no weights: {single.name} is missing.")


def check_weight_files(folder: Path, stem: str = "model") -> dict[Path, dict[str, Any]]:
    """The headers of `weight_files`, each file as long as its header says.

    Raises:
        CheckpointError: a file is not so long, or two of them hold one tensor.
    """
    headers = {path: read_safetensors_header(path) for path in weight_files(folder, stem)}
    holders: dict[str, Path] = {}
    for path, header in headers.items():
        for name in header.keys() - {"__metadata__"}:
            if name in holders:
                first, second = sorted((holders[name].name, path.name))
                raise CheckpointError(
                    f"{folder} holds the tensor {name} twice, in {first} and {second}, and nothing says which counts: "
                    f"{COPY}."
                )
            holders[name] = path
    return headers


#: Names of floating-point types in headers of safetensors files, and torch's.
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def embedding_type(folder: Path) -> str:
    """Floating-point type, by torch's name, in which a checkpoint's files have its token embedding."""
    for header in check_weight_files(folder).values():
        for name, tensor in header.items():
            if name.endswith("embed_tokens.weight"):
                return _TORCH_NAMES[tensor["dtype"]]
    raise CheckpointError(f"{folder} has no token embedding (embed_tokens.weight).")


Kind = Literal["plain", "quantized", "decoder", "compressed-tensors", "gptq", "awq", "auto-round"]
#: Kinds of folders of packed weights by their quantization methods; `rotquant` is that of exports which only we run.
PACKED: dict[Any, Kind] = {
    "compressed-tensors": "compressed-tensors",
    "rotquant": "compressed-tensors",
    "gptq": "gptq",
    "awq": "awq",
    "auto-round": "auto-round",
}


def kind_of(folder: str | Path) -> Kind | None:
    """Kind of content of a folder; None where it is none.

    Low-rank deltas and a GGUF file are a plain checkpoint. compressed-tensors are this project's exports and others';
    the last three are others' alone.
    """
    folder = Path(folder)
    if (folder / DECODER_MANIFEST).is_file():
        return "decoder"
    if (folder / MANIFEST).is_file():
        return "quantized"
    if packed := PACKED.get((quantization_of(folder) or {}).get("quant_method")):
        return packed
    if is_delta(folder) or is_gguf(folder):
        return "plain"
    plain = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors*"))
    return "plain" if plain else None


def check_kind(folder: str | Path, wanted: Kind) -> None:
    """Raise `CheckpointError` for a folder of another kind than wanted, or none there; it says what to run first."""
    found = kind_of(folder)
    if found is None and not Path(folder).exists():
        raise CheckpointError(f"model folder {folder} does not exist.")
    if found is None or found == wanted:
        return
    if found in PACKED.values():
        raise CheckpointError(
            f"{folder} holds packed weights ({found}), which `rotquant evaluate` and `compare` read as they "
            "are: give the quantized folder that it was exported from, or the checkpoint that it was made from."
        )
    quantize = f"`rotquant quantize {folder} -o quantized`"
    problem = {
        ("plain", "quantized"): f"is a plain checkpoint: quantize it first, {quantize}",
        ("plain", "decoder"): f"is a plain checkpoint: quantize and convert it first, {quantize} and "
        "`rotquant convert quantized -o decoder`",
        ("quantized", "plain"): "holds quantized weights already: load it with load_quantized, or give the checkpoint "
        "that it was made from",
        ("quantized", "decoder"): f"is a quantized model: convert it first, `rotquant convert {folder} -o decoder`",
        ("decoder", "plain"): "is a converted decoder: give the checkpoint that it was made from",
        ("decoder", "quantized"): "is a converted decoder: give the quantized folder that it was made from",
    }[found, wanted]
    raise CheckpointError(f"{folder} {problem}.")


def read_config(folder: Path) -> Mapping[str, Any]:
    """The content of a folder's config.json, read once in a process for as long as it is the same file.

    Raises:
        CheckpointError: it is missing, no regular file, too large or no JSON object.
    """
    path = folder / "config.json"
    check_regular(path, CheckpointError)
    if not path.is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no config.json.")
    return _config(path, str(stamp(path)))


@lru_cache(16)
def _config(path: Path, _stamp: str) -> dict[str, Any]:
    content = path.read_bytes()
    if len(content) > _CONFIG_BYTES:
        raise CheckpointError(
            f"{path} has {len(content):,} bytes; a language model's has some thousand: take out what is no setting "
            "of it, such as a classifier's table id2label."
        )
    try:
        config = parse_json(content, finite=True)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object.")
    return config


def quantization_of(folder: str | Path) -> dict[str, Any] | None:
    """The quantization_config in a folder's config.json; None where it has none or cannot be read."""
    with suppress(CheckpointError):
        found = read_config(Path(folder)).get("quantization_config")
        return found if isinstance(found, dict) else None
    return None


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype, shape and data_offsets by tensor name.

    Raises:
        CheckpointError: the library refuses the file, whose length it compares with the header too.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            header = parse_json(file.read(int.from_bytes(file.read(8), "little")))
            if not all(isinstance(entry, dict) for entry in header.values()):  # lists, which the library takes too
                raise ValueError("a tensor's entry is no JSON object")
            return header
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({str(error)[:200]}); copy it again.") from None


def is_delta(folder: Path) -> bool:
    """Whether a folder holds deltas of another checkpoint and no checkpoint of its own."""
    return (folder / DELTA_CONFIG).is_file() and not (folder / "config.json").is_file()


def located(checkpoint: str | Path) -> tuple[Path | None, str, str | None]:
    """(folder, name, revision): a folder that exists, or None and the parts of a hub id; of a GGUF file the folder that
    it was dequantized into, which takes a while the first time.

    Raises:
        CheckpointError: none of these.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        return folder, str(checkpoint), None
    if is_gguf(folder):
        return imported(folder), str(checkpoint), None
    if folder.exists():
        raise CheckpointError(
            f"{checkpoint} is a file; give the folder that holds config.json and model.safetensors, or a GGUF file."
        )
    match = _HUB_ID.fullmatch(str(checkpoint))
    if isinstance(checkpoint, Path) or match is None:
        raise CheckpointError(
            f"model folder {checkpoint} does not exist (and is no hub id, owner/name); "
            "give a folder with config.json and model.safetensors."
        )
    owner = Path(match["name"]).parent
    if match["revision"] is None and owner.is_dir():
        names = [str(path.parent) for path in sorted(owner.glob("*/config.json"))]
        raise CheckpointError(
            f"model folder {checkpoint} does not exist{nearest(str(checkpoint), names) if names else ''}; the hub's "
            f"model of that name is {checkpoint}@main."
        )
    return None, match["name"], match["revision"]
