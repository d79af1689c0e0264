"""Model checkpoints: where they lie, what identifies them, and loading them with every defect told in one sentence.

Only safetensors weights are read, never pickles, and no code that comes with a checkpoint is run. Importing this module
and computing a digest load neither torch nor transformers, so the workflow can do both for every job it plans.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rotquant.foundation.contents import content_digests
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError, nearest
from rotquant.foundation.files import (
    cache_folder,
    canonical_json,
    check_regular,
    check_regular_files,
    file_inside,
    folder_beside,
    read_json,
    read_object,
    short_hash,
)
from rotquant.foundation.parsing import parse_json
from rotquant.foundation.progress import downloading, task
from rotquant.models import deltas
from rotquant.models.declared import (
    check_activation,
    check_declared,
    check_floating,
    check_header,
    check_tokenizer_settings,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: File that makes a folder a quantized model (rotquant.weights.storage).
MANIFEST = "rotquant.json"
#: File that makes a folder a converted decoder (rotquant.decoder.storage).
DECODER_MANIFEST = "decoder.json"

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
#: No weight is stored in less than 2 bits: a configuration that asks for more than its files can hold is damaged.
_WEIGHTS_PER_BYTE = 4
_COPY = "copy the checkpoint again"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
#: Files that loading reads in addition to the weights.
_SETTINGS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template*"),
    *("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt"),
)


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
        named = read_object(index, "index", CheckpointError, _COPY).get("weight_map")
        if not isinstance(named, dict):
            raise CheckpointError(f"index {index} is damaged (weight_map); {_COPY}.")
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
    """The headers of `weight_files`, each file as long as its header says; `CheckpointError` where it is not."""
    return {path: read_safetensors_header(path) for path in weight_files(folder, stem)}


Kind = Literal["plain", "quantized", "decoder"]


def kind_of(folder: str | Path) -> Kind | None:
    """Kind of content of a folder: a plain checkpoint (or deltas of one), a quantized model, a converted decoder, or
    none."""
    folder = Path(folder)
    if (folder / DECODER_MANIFEST).is_file():
        return "decoder"
    if (folder / MANIFEST).is_file():
        return "quantized"
    if deltas.is_delta(folder):
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


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype, shape and data_offsets by tensor name.

    Raises:
        CheckpointError: the header cannot be read, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError
            header = parse_json(file.read(length))
        end = check_header(header)
    except (struct.error, ValueError):
        raise CheckpointError(f"{path} is truncated or damaged: its header cannot be read; copy it again.") from None
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path} is truncated or damaged: {size} bytes where its header promises {8 + length + end}; copy it again."
        )
    return header


def load_checkpoint(
    checkpoint: str | Path, dtype: "torch.dtype", device: "torch.device | str" = "cpu", revision: str | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load a causal language model of a supported family and its tokenizer, from a folder or the Hugging Face hub.

    Everything that can be checked without reading the weights is checked first.

    Args:
        checkpoint: a folder, or a hub id `owner/name` or `owner/name@revision`.
        dtype: floating-point type of all parameters.
        device: where they go.

    Raises:
        CheckpointError: missing, unreachable, incomplete, truncated or wrong-shaped, pickles only, no tokenizer, or
            a tensor that holds inf or nan, in the file or in `dtype`.
        UnsupportedArchitectureError: no adapter for its family.
    """
    folder = local_folder(checkpoint, revision)
    check_kind(folder, "plain")
    return _load(folder, dtype, device)


def local_folder(checkpoint: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint, fetched from the hub where it is not here. What asks for several things of one model
    asks this first, since the hub is called every time. Raises as `load_checkpoint`, but looks at no file."""
    folder, name, hub_revision = located(checkpoint)
    if folder is not None and deltas.is_delta(folder):
        return _merged(folder)
    return folder or _download(name, revision or hub_revision)


def base_folder(checkpoint: str | Path) -> Path | None:
    """The folder of the checkpoint that a folder's low-rank deltas are of, where both are here; else None."""
    folder = Path(checkpoint)
    if not deltas.is_delta(folder):
        return None
    base = deltas.base_of(folder, deltas.read_delta(folder))
    return base if isinstance(base, Path) else None


def checked_base(folder: Path) -> Path | str:
    """The base of low-rank deltas, a folder that they fit or a hub id.

    Raises:
        CheckpointError: the deltas are damaged, of another kind, or of other weights than the base's are now.
    """
    base = deltas.base_of(folder, deltas.read_delta(folder))
    header = read_safetensors_header(folder / deltas.WEIGHTS)
    try:
        place, _, _ = located(str(base))
        if place is None:
            return base
        headers = [read_safetensors_header(path) for path in weight_files(place)]
        shapes = {
            name: entry["shape"] for header in headers for name, entry in header.items() if name != "__metadata__"
        }
        digest = weights_digest(place)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is a low-rank delta, and its base cannot be had: {error}") from None
    deltas.check_fits(folder, header, str(place), digest, shapes)
    return place


def _merged(folder: Path) -> Path:
    """The plain checkpoint that low-rank deltas and their base make, put together once in the user's cache."""
    base = checked_base(folder)
    plain, delta = local_folder(base), deltas.read_delta(folder)
    files = [*settings_files(plain), *weight_files(plain), folder / deltas.CONFIG, folder / deltas.WEIGHTS]
    place = cache_folder("merged") / short_hash(canonical_json([*content_digests(files, folder.name).values()]))
    if not place.is_dir():
        for path in (folder / deltas.WEIGHTS, *weight_files(plain)):
            check_floating(path, read_safetensors_header(path))
        with task("merging the low-rank deltas"), folder_beside(place) as temporary:
            new = temporary / place.name
            deltas.merge(folder, delta, plain, weight_files(plain), new)
            with suppress(OSError):  # processes that do so at once make the same, and the first stays
                new.rename(place)
    return place


@task("loading the model")
def _load(
    folder: Path, dtype: "torch.dtype", device: "torch.device | str"
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """`load_checkpoint` of a folder."""
    headers = check_weight_files(folder)
    files = list(headers)
    config = load_config(folder)
    for path, header in headers.items():
        check_floating(path, header)
    tokenizer = load_tokenizer(folder)
    from transformers import AutoModelForCausalLM

    from rotquant.models.integrity import check_loaded

    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair, as asked
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # so that they are reported below, all in the same way
                output_loading_info=True,
            )
    except Exception as error:  # what a strange config.json makes of transformers' classes has no common type
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}.") from None
    check_loading(folder, info)
    check_loaded(folder, model, files)
    return model.eval().to(device), tokenizer


def config_of(checkpoint: str | Path, revision: str | None = None) -> Any:
    """The configuration of a checkpoint or of a quantized folder, without its weights; raises as `load_checkpoint`."""
    return load_config(local_folder(checkpoint, revision))


def model_max_length(checkpoint: str | Path, revision: str | None = None) -> Any:
    """The tokenizer's own limit on the length of texts, unchecked; None where it says nothing. Raises as
    `config_of`."""
    return _tokenizer_settings(local_folder(checkpoint, revision)).get("model_max_length")


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path, "tokenizer's settings", CheckpointError, _COPY) if path.exists() else {}
    try:
        check_tokenizer_settings(settings)
        return settings
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_problem(error, settings)}.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder, or CheckpointError when it has none or it is damaged.

    One that is saved as of no family is what its file says: for Qwen2, AutoTokenizer would put the family's rules of
    splitting in the place of the file's.
    """
    check_regular_files(folder, CheckpointError)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"{folder} has no tokenizer: copy tokenizer.json next to config.json.")
    generic = _tokenizer_settings(folder).get("tokenizer_class") == "TokenizersBackend"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast if generic else AutoTokenizer
    try:
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}.") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and its tables of missing tensors, errors here, off the terminal."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def check_loading(folder: Path, info: dict[str, Any]) -> None:
    """Raise CheckpointError for tensors that transformers would leave at random values or pass over."""
    for name, found, expected in sorted(info.get("mismatched_keys", ())):
        raise CheckpointError(
            f"{folder} does not fit its config.json: {name} has shape {list(found)}, expected {list(expected)}."
        )
    for problem, key in (("lacks", "missing_keys"), ("has an unknown tensor", "unexpected_keys")):
        names = sorted(info.get(key, ()))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{folder} does not fit its config.json: it {problem} {names[0]}{more}.")


def load_config(folder: Path, quantized: bool = False) -> Any:
    """The configuration, refused before anything is loaded when no adapter knows its family.

    quantized: whether it may say how another library quantized the weights.
    """
    path = folder / "config.json"
    check_regular_files(folder, CheckpointError)
    check_regular(path, CheckpointError)
    from rotquant.models.architectures import check_shape

    declared: Any = None
    try:
        declared = parse_json(path.read_bytes(), finite=True)
        weights = check_shape(declared)
        check_declared(folder, declared, quantized)
        check_activation(declared)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no model folder: it has no config.json.") from None
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_problem(error, declared)}.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from None
    _check_generation(folder / "generation_config.json")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size and weights > _WEIGHTS_PER_BYTE * size:
        raise CheckpointError(
            f"{folder} does not fit its config.json, which asks for {weights:,} weights or more: its safetensors files "
            f"have {size:,} bytes."
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates fields by several libraries' exceptions
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from None


def _check_generation(path: Path) -> None:
    """Refuse a generation_config.json that is no JSON object; one that is not there, or no JSON, changes nothing."""
    with suppress(OSError, ValueError):
        if not isinstance(parse_json(path.read_bytes()), dict):
            raise CheckpointError(f"{path} is damaged: it is no JSON object.")


def located(checkpoint: str | Path) -> tuple[Path | None, str, str | None]:
    """(folder, name, revision): a folder that exists, or None and the parts of a hub id.

    Raises:
        CheckpointError: neither.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        return folder, str(checkpoint), None
    if folder.exists():
        raise CheckpointError(f"{checkpoint} is a file; give the folder that holds config.json and model.safetensors.")
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


def _download(name: str, revision: str | None) -> Path:
    """Fetch a checkpoint from the hub into its cache, or find it there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    remedy = "download it by other means and give its folder"
    try:
        with downloading(name):
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=["*.json", "*.safetensors", "tokenizer*"],
                    ignore_patterns=["*/*"],
                )
            )
    except GatedRepoError:
        raise CheckpointError(
            f"the hub's model {name} is gated: accept its licence, log in with `hf auth login`, or {remedy}."
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name} is neither a folder here nor a model on the hub that you may read: correct it, or {remedy}."
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"the hub's model {name} has no revision {revision!r}.") from None
    except Exception as error:  # no connection shows as one of many libraries' exceptions
        raise CheckpointError(
            f"{name} is no folder here, and the hub cannot be reached for a model of that name ({first_line(error)}): "
            f"correct it, or {remedy}."
        ) from None


def first_line(error: Exception) -> str:
    """Message of another library's exception, as the end of a sentence; its kind too where it alone says little."""
    lines = str(error).strip().splitlines()
    last = 2 if lines and lines[0].endswith(":") else 1  # what follows a colon is the cause
    message = " ".join(line.strip() for line in lines[:last]).rstrip(".")
    telling = message and not isinstance(error, LookupError | TypeError | AttributeError)
    return message if telling else f"{type(error).__name__} {message}".strip()
