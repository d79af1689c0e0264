"""Model checkpoints: fetching and loading them, with every defect reported in one sentence.

Only safetensors weights are read, never pickles, and no code that comes with a checkpoint is run. Importing this module
loads neither torch nor transformers.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rotquant.foundation.contents import content_digests, stamp
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import (
    cache_folder,
    canonical_json,
    check_regular_files,
    folder_beside,
    read_json,
    read_object,
    short_hash,
)
from rotquant.foundation.parsing import parse_json
from rotquant.foundation.progress import downloading, task
from rotquant.models import deltas
from rotquant.models.companions import TAKEN
from rotquant.models.declared import (
    check_activation,
    check_declared,
    check_floating,
    check_shape,
    check_tokenizer_settings,
)
from rotquant.models.folders import (
    COPY,
    check_kind,
    check_weight_files,
    is_delta,
    located,
    read_config,
    read_safetensors_header,
    settings_files,
    weight_files,
)
from rotquant.models.gguf.header import is_gguf
from rotquant.models.gguf.importing import described

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: No weight is stored in less than 2 bits: a configuration that asks for more than its files can hold is damaged.
_WEIGHTS_PER_BYTE = 4
#: What is fetched from the hub: of a checkpoint, and of its settings alone.
_FILES = ("*.json", "*.safetensors", *(name for name in TAKEN if "/" not in name))
_SETTINGS = ("config.json", "tokenizer_config.json")
#: Ids of tokens are below; the largest vocabulary so far has 262,144.
_MOST_IDS = 2**24
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_checkpoint(
    checkpoint: str | Path, dtype: "torch.dtype", device: "torch.device | str" = "cpu"
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load a causal language model of a supported family and its tokenizer, from a folder or the Hugging Face hub.

    Everything that can be checked without reading the weights is checked first.

    Args:
        checkpoint: a folder, a GGUF file, or a hub id `owner/name` or `owner/name@revision`.
        dtype: floating-point type of all parameters.
        device: where they go.

    Raises:
        CheckpointError: missing, unreachable, incomplete, truncated or wrong-shaped, pickles only, no tokenizer, or
            a tensor that holds inf or nan, in the file or in `dtype`.
        UnsupportedArchitectureError: no adapter for its family.
    """
    folder = local_folder(checkpoint)
    check_kind(folder, "plain")
    return _load(folder, dtype, device)


def local_folder(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint, fetched from the hub where it is not here. What asks for several things of one model
    asks this first, since the hub is called every time. Raises as `load_checkpoint`, but looks at no file."""
    folder, name, revision = located(checkpoint)
    if folder is not None and is_delta(folder):
        return _merged(folder)
    return folder or _download(name, revision)


def _merged(folder: Path) -> Path:
    """The plain checkpoint that low-rank deltas and their base make, put together once in the user's cache."""
    base = deltas.checked_base(folder)
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

    from rotquant.models.architectures import attention_implementation
    from rotquant.models.integrity import check_loaded

    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair, as asked
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention_implementation(config),
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


def config_of(checkpoint: str | Path) -> Any:
    """The configuration of a checkpoint or of a quantized folder, without its weights; raises as `load_checkpoint`."""
    return load_config(settings_folder(checkpoint))


def settings_folder(checkpoint: str | Path) -> Path:
    """A folder with a checkpoint's configuration and tokenizer settings: its own or, of low-rank deltas, their base's.

    Of a GGUF file it has no weights, and of a hub id nothing else is fetched. Raises as `load_checkpoint`.
    """
    if is_gguf(checkpoint):
        return described(checkpoint)
    folder, name, revision = located(checkpoint)
    if folder is None:
        return _download(name, revision, _SETTINGS)
    return settings_folder(deltas.checked_base(folder)) if is_delta(folder) else folder


def model_max_length(checkpoint: str | Path) -> Any:
    """The tokenizer's own limit on the length of texts, unchecked; None where it says nothing. Raises as
    `config_of`."""
    return _tokenizer_settings(settings_folder(checkpoint)).get("model_max_length")


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path, "tokenizer's settings", CheckpointError, COPY) if path.exists() else {}
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
    _check_ids(folder / "tokenizer.json")
    generic = _tokenizer_settings(folder).get("tokenizer_class") == "TokenizersBackend"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast if generic else AutoTokenizer
    try:
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}.") from None


def _check_ids(path: Path) -> None:
    """Refuse a tokenizer with ids so large that the tokenizers library, which has room for all, ends the process."""
    if not path.is_file() or not re.search(rb"\d{8}", path.read_bytes()):
        return
    content = read_object(path, "tokenizer", CheckpointError)
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if large := [one for one in ids if isinstance(one, int) and one >= _MOST_IDS]:
        raise CheckpointError(f"{path} is damaged: a token has the id {large[0]}, and ids are below {_MOST_IDS:,}.")


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

    A file is read and checked once in a process, however often it is asked for; each caller gets a copy.

    quantized: whether it may say how another library quantized the weights.
    """
    check_regular_files(folder, CheckpointError)
    weights, config = _checked_config(folder, str(stamp(folder / "config.json")), quantized)
    _check_generation(folder / "generation_config.json")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size and weights > _WEIGHTS_PER_BYTE * size:
        raise CheckpointError(
            f"{folder} does not fit its config.json, which asks for {weights:,} weights or more: its safetensors files "
            f"have {size:,} bytes."
        )
    return copy.deepcopy(config)


@lru_cache(16)
def _checked_config(folder: Path, _stamp: str, quantized: bool) -> tuple[int, Any]:
    """How many weights a configuration asks for at least, and the configuration."""
    path, content = folder / "config.json", copy.deepcopy(dict(read_config(folder)))
    try:
        weights = check_shape(content)
        check_declared(folder, content, quantized)
        check_activation(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_problem(error, content)}.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from None
    from transformers import CONFIG_MAPPING

    try:
        return weights, CONFIG_MAPPING[content["model_type"]].from_dict(content, name_or_path=str(folder))
    except Exception as error:  # transformers validates fields by several libraries' exceptions
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from None


def _check_generation(path: Path) -> None:
    """Refuse a generation_config.json that is no JSON object; one that is not there, or no JSON, changes nothing."""
    with suppress(OSError, ValueError):
        if not isinstance(parse_json(path.read_bytes()), dict):
            raise CheckpointError(f"{path} is damaged: it is no JSON object.")


def _download(name: str, revision: str | None, files: Sequence[str] = _FILES) -> Path:
    """Fetch files of a checkpoint, all by default, from the hub into its cache, or find them there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    remedy = "download it by other means and give its folder"
    try:
        with downloading(name):
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*files],
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
