"""Fine-tuning of a shipped model on the answers to questions, as domain models are made from a base model.

Only low-rank deltas are trained, so the stored files are small; every random choice follows from (seed, step).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from reproduction.reading.written import parse, read_yaml
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Text = tuple[tuple[str, str], ...]
"""Lines of a text: questions, each with the answer that continues it."""

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FineTuning(Frozen):
    """A recipe of fine-tuning, read from a YAML file in config/finetuning/: of which model, on what, for how long."""

    name: str
    """The model's name."""
    stands_for: str
    """The papers' model that it stands for."""
    base: str
    """The model that it is made from: a folder, from the working folder."""
    tasks: tuple[str, ...] = Field(min_length=1)
    """Of which shipped tasks the questions are; their items come from the training modules."""
    modules: int = Field(default=1500, gt=0)
    """How many of the training modules are read."""
    items: int = Field(default=4000, gt=0)
    """Texts of each task, at most."""
    rank: int = Field(default=8, gt=0)
    """Of the deltas."""
    alpha: float = Field(default=16.0, gt=0)
    """A delta counts alpha / rank times."""
    targets: tuple[str, ...] = LINEAR
    """Linear layers that have one, by the last part of their names."""
    steps: int = Field(gt=0)
    """Steps of AdamW, without weight decay."""
    batch_size: int = Field(default=16, gt=0)
    """Texts in each step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak, reached in `warmup_steps` linearly, then lowered to zero by a cosine."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps to the peak."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    bos_fraction: float = Field(default=0.5, ge=0, le=1)
    """Share of texts that begin with BOS, as in the base model's training."""
    seed: int = Field(default=0, ge=0)
    """Of the deltas' initial values and of the order of texts."""

    @classmethod
    def from_yaml(cls, path: str | Path) -> FineTuning:
        """Read a recipe; `ConfigError` names the file and the key that does not fit."""
        return parse(cls, read_yaml(path), f"Fine-tuning recipe {path}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update number `step` (from 0)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def is_fine_tuning(path: str | Path) -> bool:
    """Whether a training recipe is for fine-tuning."""
    return "base" in read_yaml(path)


def fine_tune(
    recipe: FineTuning,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    folder: Path,
    base: tuple[str, str],
    state_file: Path,
) -> dict[str, Any]:
    """Train deltas of a float32 model and write them into an existing folder; the model is not changed.

    Args:
        texts: questions and answers; the loss counts the answers and the line end after each.
        base: the model's checkpoint, as the deltas name it, and its digest.
        state_file: the file from which an interrupted training continues.

    Returns:
        The curve: loss by step, and the data that was read; texts longer than the context are left out and counted.

    Raises:
        ConfigError: there are no questions, or all exceed the model's context.
        ResultError: the state file is another training's.
        RotquantError: the loss is not finite.
    """
    import torch

    from reproduction.shipped.lowrank import with_deltas, write_deltas
    from rotquant.training.loop import GradientStep, train
    from rotquant.training.state import Checkpoint

    samples = _samples(recipe, tokenizer, texts, model.config.max_position_embeddings)
    started = time.monotonic()
    with with_deltas(model, recipe.targets, recipe.rank, recipe.alpha, recipe.seed) as deltas:
        trained = torch.nn.ModuleList(deltas.values())
        optimizer = torch.optim.AdamW(trained.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: recipe.learning_rate_at(step) / recipe.learning_rate
        )
        gradient = GradientStep(
            lambda step: [_batch(recipe, samples, cast(int, tokenizer.bos_token_id), step)],
            lambda batch: _loss(model, *batch),
            [optimizer],
            [schedule],
            clip=lambda: torch.nn.utils.clip_grad_norm_(trained.parameters(), recipe.gradient_clip),
        )
        identity = short_hash(canonical_json([recipe.model_dump(mode="json"), base[1], len(texts)]))
        history = train(
            gradient,
            recipe.steps,
            f"fine-tuning {recipe.name}",
            parts={"deltas": trained, "optimizer": optimizer, "schedule": schedule},
            checkpoint=Checkpoint(state_file, identity, every=None, seconds=60.0),
        )
        write_deltas(folder, deltas, recipe.targets, recipe.rank, recipe.alpha, *base)
    stride = max(1, recipe.steps // 40)
    return {
        "parameters": sum(parameter.numel() for parameter in trained.parameters()),
        "texts": len(samples),
        "texts_too_long": len(texts) - len(samples),
        "steps": recipe.steps,
        "seconds": round(time.monotonic() - started, 1),
        "torch": torch.__version__,
        "loss_by_step": [
            (end, round(sum(record["loss"] for record in history[end - stride : end]) / stride, 4))
            for end in range(stride, recipe.steps + 1, stride)
        ],
    }


Sample = tuple[list[int], list[bool]]
"""The tokens of a text, and a mask of the answers."""


def _samples(
    recipe: FineTuning, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], context: int
) -> list[Sample]:
    """The samples of the texts that fit into the context after a BOS."""
    found = [_sample(tokenizer, text) for text in texts]
    if not found:
        raise ConfigError(f"the tasks {', '.join(recipe.tasks)} have no items in the training modules.")
    if not (fitting := [sample for sample in found if len(sample[0]) < context]):
        shortest = min(len(ids) for ids, _ in found)
        raise ConfigError(f"no text fits into the context of {context} tokens: the shortest has {shortest}.")
    return fitting


def _sample(tokenizer: PreTrainedTokenizerBase, text: Text) -> Sample:
    """Encode a text; a token that begins inside an answer, or at the white space before it, belongs to the answer."""
    whole, answers = "", []
    for question, answer in text:
        start = len((whole + question).rstrip())
        whole += f"{question}{answer}\n"
        answers.append(range(start, len(whole)))
    encoded: Any = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [any(start in one for one in answers) for start, _ in encoded["offset_mapping"]]


def _batch(recipe: FineTuning, samples: list[Sample], bos: int, step: int) -> tuple[Tensor, Tensor]:
    """Ids and targets [texts, longest] of a step, which depend only on (seed, step); -100 is ignored."""
    import torch

    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    drawn = torch.randint(len(samples), (recipe.batch_size,), generator=generator).tolist()
    headed = (torch.rand(recipe.batch_size, generator=generator) < recipe.bos_fraction).tolist()
    chosen = [
        ([bos, *ids], [False, *learned]) if with_bos else (ids, learned)
        for (ids, learned), with_bos in zip([samples[index] for index in drawn], headed, strict=True)
    ]
    width = max(len(ids) for ids, _ in chosen)
    ids = torch.full((len(chosen), width), bos)
    targets = torch.full((len(chosen), width), -100)
    for row, (own, learned) in enumerate(chosen):
        ids[row, : len(own)] = torch.tensor(own)
        targets[row, : len(own)] = torch.where(torch.tensor(learned), ids[row, : len(own)], -100)
    return ids, targets


def _loss(model: PreTrainedModel, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens. Padding is on the right, so no answer attends to it."""
    from torch.nn.functional import cross_entropy

    device = model.device
    logits = model(input_ids=ids[:, :-1].to(device), use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), targets[:, 1:].flatten().to(device), ignore_index=-100)
