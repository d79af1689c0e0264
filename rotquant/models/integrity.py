"""Files of tensors, read and written: that they hold numbers, and are those that were written.

A single inf or nan among billions of weights gives a finished and wrong report, and so does a flipped bit, so each door
to a model goes through here: checkpoints, quantized folders, decoders, rotations, and what a recipe makes of a model
before it is stored.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import canonical_json, json_text, write_json
from rotquant.models.folders import settings_files

#: transformers' own default for a checkpoint's files.
LARGEST_SHARD = "5GB"
Named = Iterable[tuple[str, Tensor]]

#: Elements of 8-bit floats that are widened at once, since torch cannot compare them.
_BLOCK = 2**24
#: Files that are hashed at once.
_FILES_AT_ONCE = 4


def first_not_finite(tensors: Named) -> str | None:
    """The name of the first tensor that holds inf or nan, or None. Reads each once and copies none."""
    return next((name for name, tensor in tensors if tensor.is_floating_point() and not _is_finite(tensor)), None)


def read_tensors(path: Path, device: "torch.device | str" = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file whose header was checked.

    Raises:
        CheckpointError: they cannot be read all the same, as those of a type that this version does not know.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=str(device))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # of a type, a shape, their bytes
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}; copy it again.") from None


def write_shards(folder: Path, tensors: Mapping[str, Tensor], stem: str) -> tuple[str, ...]:
    """Write tensors, contiguous and on the host, into `<stem>*.safetensors`, with an index where these are several.

    Returns:
        The names of the files that hold tensors.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    pattern = stem + "{suffix}.safetensors"
    shards = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=LARGEST_SHARD)
    for file, names in shards.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    return tuple(shards.filename_to_tensors)


def check_finite(where: object, tensors: Named) -> None:
    """Raise `CheckpointError` for a tensor that holds inf or nan: the sentence names it, and `where` it was read."""
    name = first_not_finite(tensors)
    if name is not None:
        raise CheckpointError(
            f"{where} is damaged: tensor {name} holds inf or nan; copy it again, or take a model whose training ended "
            "well."
        )


def check_loaded(folder: Path, model: nn.Module, files: Iterable[Path] = ()) -> None:
    """Raise `CheckpointError` where a model that was loaded from a folder holds inf or nan, saying why it does.

    Args:
        files: its safetensors files, unless their tensors were checked; they are read again where something is wrong.
    """
    name = first_not_finite(chain(model.named_parameters(), model.named_buffers()))
    if name is None:
        return
    check_finite(folder, _stored(files))
    if name not in model.state_dict():
        raise CheckpointError(f"{folder / 'config.json'} is damaged: by its values {name} is inf or nan.")
    raise CheckpointError(f"{folder}: {_overflow(name, model.state_dict()[name].dtype)}")


def check_changed(model: nn.Module, what: str) -> None:
    """Raise `CheckpointError` where a model's tensors are not finite after `what` was done to them."""
    name = first_not_finite(model.state_dict().items())
    if name is not None:
        raise CheckpointError(f"after {what}, {_overflow(name, model.state_dict()[name].dtype)}")


def file_digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file by its name: what a manifest keeps of the files next to it."""
    return {path.name: _sha256(path) for path in files}


@contextmanager
def checking_digests(files: Iterable[Path], digests: Mapping[str, str]) -> Iterator[None]:
    """Compare files with their digests in a manifest, in threads next to what the block does.

    Raises:
        CheckpointError: at the block's end, and in place of what it raised: a file is not the one that was written.
    """
    wanted = list(files)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        found = [pool.submit(_sha256, path) for path in wanted]
        try:
            yield
        finally:
            for path, digest in zip(wanted, found, strict=True):
                _check_file(path, digest.result(), digests, "copy or make it again")


def seal(manifest: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a folder's manifest with `digests`, of every file beside it that loading reads, and `digest`.

    Both are SHA-256. The latter is of the content itself, digests included, so that nothing of what makes the network
    can change by itself: recipe, configuration, generation settings, tokenizer, tensors. Write the manifest last.
    """
    sealed = {**content, "digests": file_digests(_read_beside(manifest))}
    return {**sealed, "digest": _content_digest(sealed)}


def check_seal(manifest: Path, content: Mapping[str, Any], remedy: str, partial: bool = False) -> None:
    """Compare a manifest, and the files beside it other than tensors, with the digests that `seal` put into it.

    Args:
        content: of the manifest.
        partial: whether files other than tensors may be missing, as where a hub's client fetches them one by one.
        remedy: how a change that is meant is made.

    Raises:
        CheckpointError: the manifest or a file is not the one that was written, is missing, or came later.
    """
    folder, digests = manifest.parent, content.get("digests")
    digests, remedy = digests if isinstance(digests, dict) else {}, f"to change it on purpose, {remedy}"
    again = f"copy the folder again; {remedy}"
    if content.get("digest") != _content_digest(content):
        raise CheckpointError(f"{manifest} is damaged or was changed: it is not what was written; {again}.")
    there = {path.name for path in _read_beside(manifest)}
    for name in sorted(there | digests.keys()):
        if name not in there and not partial:
            raise CheckpointError(f"{folder} is incomplete: {name} is not there; {again}.")
        if name not in digests:
            raise CheckpointError(f"{folder / name} came after the folder was written: take it away; {remedy}.")
        if name in there and not name.endswith(".safetensors"):
            _check_file(folder / name, _sha256(folder / name), digests, again)


def note_unsealed(folder: Path, what: str) -> None:
    """Warn, once for each folder, that it is of before `seal`: of what it holds only `what` can be checked."""
    warnings.warn(f"{folder} was written by an older rotquant: of its content {what} can be checked", stacklevel=1)


def _read_beside(manifest: Path) -> list[Path]:
    """The files beside a manifest that loading reads: settings, tokenizer, tensors and their index."""
    tensors = (manifest.parent.glob(f"*.safetensors{end}") for end in ("", ".index.json"))
    return sorted({*settings_files(manifest.parent), *chain(*tensors)} - {manifest})


def _content_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's content as its file has it, but for `digest`."""
    try:
        written = json.loads(json_text({name: value for name, value in content.items() if name != "digest"}))
    except RecursionError:  # nothing that was written here is nested so deeply
        return ""
    return hashlib.sha256(canonical_json(written).encode()).hexdigest()


def _check_file(path: Path, digest: str, digests: Mapping[str, str], remedy: str) -> None:
    if digest != digests.get(path.name):
        raise CheckpointError(
            f"{path} is damaged or was changed: it is not the file that was written; {remedy}."
        ) from None


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and content of tensors, whatever their order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _overflow(name: str, dtype: torch.dtype) -> str:
    """The end of a sentence: a tensor holds numbers too large for its type."""
    largest = f"{torch.finfo(dtype).max:.5g}, the largest of {str(dtype).removeprefix('torch.')}"
    remedy = "use bfloat16 or float32" if dtype == torch.float16 else "take another model"
    return f"tensor {name} holds numbers beyond {largest}: {remedy}."


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither inf nor nan, at the speed of memory: its extremes tell."""
    if tensor.is_meta or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        return all(_is_finite(part.to(torch.float32)) for part in tensor.flatten().split(_BLOCK))
    return bool(torch.isfinite(torch.stack(tensor.detach().aminmax())).all())


def _stored(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of safetensors files, in the types that they are stored in."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def weights_digest(model: nn.Module) -> str:
    """A digest of all that a transformers model computes with: its tensors, where they lie, its configuration."""
    found = hashlib.sha256(cast(Any, model).config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device}".encode())
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy())
    return found.hexdigest()
