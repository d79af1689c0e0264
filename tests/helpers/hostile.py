"""Inputs on disk that are made to mislead: pipes, aliases without end, names that leave their folder, wrong types.

`tests.helpers.places` makes them beside the other inputs that tables of the command line's inputs name.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Ten lines that name 9 to the 9th values.
LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer_config.json", "model.safetensors.index.json"


def make_hostile(root: Path, model: Path) -> dict[str, Path]:
    """Copies of a model, each hostile in one way, and files; two odd copies that are good: `hub` and `ended`."""
    (root / "laughs.yaml").write_text(LAUGHS)
    os.mkfifo(root / "pipe")
    made = {name: Path(shutil.copytree(model, root / name)) for name in _CHANGES}
    for name, change in _CHANGES.items():
        change(made[name])
    (root / "selfbased").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": ".", "r": 2, "lora_alpha": 4}
    (root / "selfbased" / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"a": torch.zeros(1)}, root / "selfbased" / "adapter_model.safetensors")
    made["misranked"] = _adapted(root, model, says=8, has=4)
    return {**made, "pipe": root / "pipe", "laughs": root / "laughs.yaml", "selfbased": root / "selfbased"}


def _adapted(root: Path, model: Path, says: int, has: int) -> Path:
    """A low-rank delta of a model whose configuration says another rank than its matrices have."""
    (root / "misranked").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(model), "r": says, "lora_alpha": says}
    _write(root / "misranked" / "adapter_config.json", adapter)
    layer = "model.layers.0.self_attn.o_proj"
    rows, columns = load_file(model / "model.safetensors")[f"{layer}.weight"].shape
    ends = {"lora_A": torch.zeros(has, columns), "lora_B": torch.zeros(rows, has)}
    save_file(
        {f"base_model.model.{layer}.{end}.weight": matrix for end, matrix in ends.items()},
        root / "misranked" / "adapter_model.safetensors",
    )
    return root / "misranked"


def _piped(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def _told(name: str, **fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _indexed(file: object) -> Callable[[Path], None]:
    """One of the model's tensors is in a file of this name, by its index."""
    return lambda folder: _write(folder / INDEX, {"weight_map": {"model.norm.weight": file}})


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def _stored(dtype: torch.dtype) -> Callable[[Path], None]:
    """The matrices of the layers as numbers of another type, with no scales beside them."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor.to(dtype) if "proj" in name else tensor for name, tensor in tensors.items()}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def _twice(folder: Path) -> None:
    """One tensor is in two shards, with other numbers."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    norm = "model.norm.weight"
    shards = {"a.safetensors": tensors, "b.safetensors": {norm: 2 * tensors[norm]}}
    for name, part in shards.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    named = dict.fromkeys(tensors, "a.safetensors") | {norm: "b.safetensors"}
    _write(folder / INDEX, {"metadata": {}, "weight_map": named})


def _in_a_hub_cache(folder: Path) -> None:
    """Files are links to blobs beside the snapshot, as in the hub's cache."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../blobs") / path.name)


#: llama3's rotary embedding between two frequencies that are one.
_BANDLESS = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
_BANDLESS |= {"low_freq_factor": 4.0, "high_freq_factor": 4.0}

_CHANGES: dict[str, Callable[[Path], None]] = {
    "piped": _piped(CONFIG),
    "pipedtokenizer": _piped(TOKENIZER),
    "pipedweights": _piped("model.safetensors"),
    "integers": _stored(torch.int8),
    "eighths": _stored(torch.float8_e4m3fn),
    "gptq": _told(CONFIG, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "compressed": _told(CONFIG, quantization_config={"quant_method": "compressed-tensors"}),
    "evil": _told(CONFIG, hidden_act="evil"),
    "banana": _told(CONFIG, rope_parameters={"rope_type": "banana", "rope_theta": 1e4}),
    "factorless": _told(CONFIG, rope_scaling={"type": "linear"}),
    "flat": _told(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": float("1e300")}),
    "bandless": _told(CONFIG, rope_parameters=_BANDLESS),
    "shortened": _told(CONFIG, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}),
    "misfit": _told(CONFIG, rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    "layered": _told(CONFIG, rope_parameters={"sliding_attention": {"rope_type": "linear", "rope_theta": 1e4}}),
    "twice": _twice,
    "endless": _told(CONFIG, eos_token_id="</s>"),
    "lots": _told(TOKENIZER, model_max_length="lots"),
    "numbered": _indexed(3),
    "escaping": _indexed("../model/model.safetensors"),
    "rooted": _indexed("/etc/passwd"),
    "hub": _in_a_hub_cache,
    "ended": _told(CONFIG, eos_token_id=[2, 5]),
}
