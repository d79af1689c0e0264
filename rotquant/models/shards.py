"""Tensors as safetensors files of bounded size, as transformers writes them."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rotquant.foundation.files import write_json

#: transformers' own default for a checkpoint's files.
LARGEST_SHARD = "5GB"


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
