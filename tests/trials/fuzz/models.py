"""Formats of models: checkpoints and deltas of them, as far as their files are read before and while weights are."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from rotquant.models.checkpoints import load_checkpoint, load_config, load_tokenizer, local_folder, model_max_length
from rotquant.models.digests import checkpoint_digest
from rotquant.models.folders import check_weight_files
from rotquant.models.gguf.importing import ORIGIN, checked, origin_of, write_checkpoint
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import tiny_model
from tests.trials.fuzz.formats import Format, content_of, kinds

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CODE = b"open('touched', 'w').close()\n"


def formats(root: Path) -> list[Format]:
    """Of a tiny checkpoint that is made below `root`."""
    model, deltas = root / "model", root / "deltas"
    _make(model)
    files = content_of(model) | {"code.py": CODE, "configuration_code.py": CODE}
    shards = _sharded(root / "shards", model)
    file = {"model.gguf": write_gguf(root / "model.gguf", tiny_model(hidden_size=32, num_layers=1)).read_bytes()}
    write_checkpoint(root / "model.gguf", root / "imported")
    origin = content_of(root / "imported", ORIGIN)
    shard = min(name for name in shards if name.startswith("model-"))
    return [
        Format("config.json", files, kinds(CONFIG, GENERATION), _settings, 2.5),
        Format("tokenizers", files, kinds(*TOKENIZER), _tokenizer, 1.5),
        Format("safetensors headers", files, kinds(WEIGHTS), _headers, 2.5),
        Format("safetensors indices", shards, kinds(INDEX), _headers, 1.5),
        Format("GGUF files", file, kinds("model.gguf"), _gguf, 1.5),
        Format("origins", origin, kinds(ORIGIN), origin_of, 0.5),
        Format("whole checkpoints", files, kinds(CONFIG, WEIGHTS, *TOKENIZER), _whole, 1.0),
        Format("whole checkpoints of shards", shards, kinds(INDEX, shard), _whole, 0.5),
        Format(
            "low-rank deltas",
            _deltas(deltas, files),
            kinds("deltas/adapter_config.json", "deltas/adapter_model.safetensors", "model/config.json"),
            _delta,
            1.0,
            names_places=True,
        ),
    ]


def _make(folder: Path) -> None:
    tiny_model(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def _sharded(folder: Path, model: Path) -> dict[str, bytes]:
    """The same weights in two files with an index."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="30KB")
    found = content_of(folder)
    return {name: content for name, content in content_of(model).items() if name != WEIGHTS} | found


def _deltas(folder: Path, model: dict[str, bytes]) -> dict[str, bytes]:
    folder.mkdir()
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}
    save_file(pair, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = b'{"peft_type": "LORA", "base_model_name_or_path": "../model", "r": 2, "lora_alpha": 4, "bias": "none"}'
    own = {f"deltas/{name}": content for name, content in content_of(folder).items()}
    return {f"model/{name}": content for name, content in model.items()} | own | {"deltas/adapter_config.json": told}


def _settings(folder: Path) -> None:
    load_config(folder)


def _tokenizer(folder: Path) -> None:
    model_max_length(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer("w3 w4 w5", add_special_tokens=False)


def _headers(folder: Path) -> None:
    check_weight_files(folder)
    checkpoint_digest(folder)


def _gguf(folder: Path) -> None:
    checked(folder / "model.gguf")
    write_checkpoint(folder / "model.gguf", folder / "imported")


def _whole(folder: Path) -> None:
    load_checkpoint(folder, torch.float32)


def _delta(folder: Path) -> None:
    checkpoint_digest(folder / "deltas")
    load_checkpoint(local_folder(folder / "deltas"), torch.float32)
