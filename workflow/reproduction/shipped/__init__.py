"""Training of the small models that ship with the project, from recipes in config/training/.

A model is trained on the recipe's corpus and written as a Hugging Face folder; `python -m rotquant.training RECIPE -o
DIR` and `rotquant train` do the same. Importing this package loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.shipped.card import model_card
from reproduction.shipped.data import TrainingData, prepare_data
from reproduction.shipped.recipe import ModelShape, TrainingConfig
from rotquant.foundation.files import atomic_directory, write_json, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["ModelShape", "TrainingConfig", "TrainingData", "model_card", "prepare_data", "train"]


def train(
    config: TrainingConfig,
    output_dir: str | Path,
    device: str = "cpu",
    *,
    data_dir: str | Path | None = None,
    compile: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Train a model and write it to `output_dir` as a Hugging Face folder; return its curve and final figures.

    The folder holds bf16 safetensors, config.json, the tokenizer, curve.json, recipe.json and MODEL_CARD.md. Progress
    is saved in `<output_dir>.state.safetensors`, from which the same recipe resumes.

    Args:
        config: the recipe.
        output_dir: the folder to write, replaced only when training is complete.
        device: "cpu" or "cuda".
        data_dir: folder of the tokenizer and the encoded text, built when absent; by default the user's cache.
        compile: compile the model and, on a GPU, replay each step as one CUDA graph. Faster; other summation order.
        stop_after: stop at this step, keep the resume file and return None (a deliberate interruption).

    Raises:
        CorpusError: the corpus cannot be read.
        ResultError: the resume file belongs to another recipe or is damaged.
        RotquantError: the loss is not finite.
    """
    from reproduction.shipped.trainer import Trainer

    data = prepare_data(config, data_dir)
    output_dir = Path(output_dir)
    trainer = Trainer(config, data, device, compile=compile)
    state_file = output_dir.with_name(output_dir.name + ".state.safetensors")
    if not trainer.run(state_file, stop_after):
        return None
    curve = trainer.curve()
    with atomic_directory(output_dir) as folder:
        _save(trainer.model, data.tokenizer, config.sequence_length, folder)
        write_json(folder / "recipe.json", config.model_dump(mode="json"))
        write_json(folder / "curve.json", curve)
        write_text(folder / "MODEL_CARD.md", model_card(config, curve))
    state_file.unlink(missing_ok=True)
    return curve


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, trained_length: int, folder: Path) -> None:
    """Write a bf16 copy of the model and its tokenizer, which records the trained length, as a Hugging Face folder."""
    import torch

    tokenizer.model_max_length = trained_length
    model.eval().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
    model.save_pretrained(folder, max_shard_size="1GB")
    tokenizer.save_pretrained(folder)
