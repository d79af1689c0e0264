"""Material of a rehearsal: a project folder with a checkpoint of random weights, a text, and a configuration.

The folder has links to this project's tables and configuration, so results of a rehearsal never mix with others. The
checkpoint stands for every model of the papers, and its tokenizer is a shipped model's. The text is this project's own
sources. Nothing is fetched.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.benchmarks.shapes import SHAPES, random_model_on, shape_config
from reproduction.reading.written import read_yaml
from rotquant.foundation.errors import ConfigError, nearest
from rotquant.foundation.files import read_object, write_json, write_text
from rotquant.foundation.progress import task
from rotquant.recipes.corpus import SPLITS

if TYPE_CHECKING:
    from transformers import LlamaConfig

PAPER, AMOUNTS = Path("config/paper.yaml"), Path("config/rehearsal.yaml")
#: A shape for trying a rehearsal out on a CPU, and what narrow models need of a configuration.
TINY = "tiny"
_TINY_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_NARROW = {
    "groups_per_row": 4,
    "outlier_width": 4096,
    "calibration": {"samples": 2, "sequence_length": 64},
    "evaluation": {"sequence_length": 64, "max_windows": 2},
    "texts": {"sequence_length": {"512": 64, "1024": 64, "2048": 64}},
    "methods": {"spinquant": {"batch_size": 2, "text": {"samples": 4, "sequence_length": 64}}},
}
_TOKENIZER = Path("workflow/resources/models/rq-7b")
_MODEL, _TEXT, _LAYER = Path("model"), Path("text"), Path("rehearsal.yaml")
#: Of the text's files one in so many is for tests, and one for validation.
_HELD_OUT = 10


def make_folder(root: Path, folder: Path, shape: str, layers: int | None, device: str) -> list[Path]:
    """Make the folder of a rehearsal, or keep what is there of it; the configuration's files, one on top of the other.

    Args:
        root: the project. layers: how many decoder layers the shape keeps; None keeps all.

    Raises:
        ConfigError: an unknown shape, or a folder with another one.
    """
    if shape != TINY and shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}{nearest(shape, [TINY, *SHAPES])}.")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config", "workflow"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(root.resolve() / name, target_is_directory=True)
    about, known = {"shape": shape, "layers": layers}, folder / "material.json"
    if known.is_file() and read_object(known, "record of a rehearsal's material") != about:
        raise ConfigError(f"{folder} is of another shape or number of layers: delete it, or name another folder.")
    write_json(known, about)
    if not (folder / _MODEL / "config.json").is_file():
        _make_model(root, folder / _MODEL, shape, layers, device)
    _make_text(root, folder / _TEXT)
    write_json(folder / _LAYER, _configuration(root, shape, device))  # JSON is YAML
    return [folder / PAPER, folder / AMOUNTS, folder / _LAYER]


def _make_model(root: Path, folder: Path, shape: str, layers: int | None, device: str) -> None:
    """Write a checkpoint of random weights in float16 with a shipped model's tokenizer."""
    import torch

    from rotquant.models.checkpoints import load_tokenizer

    tokenizer: Any = load_tokenizer(root / _TOKENIZER)
    config = shape_config(shape, layers) if shape != TINY else tiny_config(layers, len(tokenizer))
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    with task(f"random weights of {shape}"):
        model = random_model_on((torch.device(device),), config, torch.float16, host=torch.device("cpu"))
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        for path in (root / _TOKENIZER).glob("tokenizer*"):
            shutil.copy(path, part)
        part.rename(folder)
    if device != "cpu":
        torch.cuda.empty_cache()  # this process keeps nothing of the GPU that the others measure


def tiny_config(layers: int | None, vocabulary: int) -> "LlamaConfig":
    """The configuration of the shape for a CPU, of two layers or as many as are asked for."""
    config = shape_config("llama-2-7b")
    for name, value in (_TINY_SHAPE | {"num_hidden_layers": layers or _TINY_SHAPE["num_hidden_layers"]}).items():
        setattr(config, name, value)
    config.head_dim, config.vocab_size = 64, vocabulary
    return config


def _make_text(root: Path, folder: Path) -> None:
    """Write this project's own sources as a text with splits."""
    files = sorted(path for name in ("rotquant", "workflow/reproduction") for path in (root / name).rglob("*.py"))
    places = {"test": 0, "validation": 1}
    for split in SPLITS:
        of_split = [path for index, path in enumerate(files) if _split(index, places) == split]
        text = "\n".join(path.read_text(encoding="utf-8") for path in of_split)
        if not (folder / f"{split}.txt").is_file():
            folder.mkdir(exist_ok=True)
            write_text(folder / f"{split}.txt", text)


def _split(index: int, places: dict[str, int]) -> str:
    """The split of a file by its number."""
    return next((split for split, place in places.items() if index % _HELD_OUT == place), "train")


def _configuration(root: Path, shape: str, device: str) -> dict[str, Any]:
    """What the configuration of a rehearsal says besides amounts: every corpus and slot is the one that is here."""
    paper = read_yaml(root / PAPER)
    text = {"name": "rehearsal", "source": "local", "path": str(_TEXT)}
    off = dict.fromkeys(("subset", "text_field", "parts"))
    slot = {"checkpoint": str(_MODEL), "batch_size": 4, "methods": None, "zero_shot": None}
    return {
        "device": device,
        "corpora": {name: {**off, **text} for name in paper["corpora"]},
        "slots": dict.fromkeys(paper["slots"], slot),
        **(_NARROW if shape == TINY else {}),
    }
