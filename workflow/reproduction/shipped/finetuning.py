"""Fine-tuning of a shipped model on the answers to questions, as domain models are made from a base model.

Only low-rank deltas are trained, so the stored files are small; every random choice follows from (seed, step).
Questions are made of training modules: no module of the test or validation split has a part in them, and no sum that
the task `arithmetic` asks.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from reproduction.corpora import MODULES
from reproduction.reading.written import parse, read_yaml
from reproduction.shipped.recipe import card
from reproduction.tasks import evaluate, prepare
from reproduction.tasks.items import task_items
from reproduction.tasks.passages import Module, PassageSource, number, ordered, read
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import atomic_directory, canonical_json, short_hash, write_json, write_text
from rotquant.models.folders import weights_digest
from rotquant.text import load_rows

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Text = tuple[tuple[str, str], ...]
"""Lines of a text: questions, each with the answer that continues it."""

#: Items of each task by which a model is compared with its base.
_ITEMS = 300
_SUM = re.compile(r">>> (\d+) \+ (\d+)\Z")
#: Sums of a session, as many as the task shows and asks.
_SUMS = 5
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


def fine_tuned(recipe: FineTuning, output: Path, device: str) -> None:
    """Fine-tune a recipe's base and write the deltas, recipe, curve and card to `output`.

    Raises:
        CheckpointError: the base is not there.
        ConfigError, ResultError, RotquantError: see `fine_tune`.
    """
    digest = weights_digest(Path(recipe.base))
    from rotquant import api

    texts = practice(recipe.tasks, recipe.modules, recipe.items)
    state_file = output.with_name(output.name + ".state.safetensors")
    model = api.load(recipe.base, device=device)
    before = _accuracies(model, recipe)
    with atomic_directory(output) as folder:
        # as seen from where the folder will be
        base = os.path.relpath(Path(recipe.base).resolve(), output.resolve())
        curve = fine_tune(recipe, model.network, model.tokenizer, texts, folder, (base, digest), state_file)
        write_json(folder / "recipe.json", recipe.model_dump(mode="json"))
    after = _accuracies(api.load(output, device=device), recipe)
    curve["accuracies"] = {task: [before[task], after[task]] for task in recipe.tasks}
    write_json(output / "curve.json", curve)
    purpose = f"{Path(recipe.base).name} with low-rank deltas, fine-tuned on questions of {', '.join(recipe.tasks)}"
    write_text(output / "MODEL_CARD.md", card(recipe.name, purpose, "finetuning"))
    state_file.unlink(missing_ok=True)
    for task, (base_accuracy, accuracy) in curve["accuracies"].items():
        print(f"{recipe.name}: {task} {accuracy:.1f} %, {base_accuracy:.1f} % before")


def _accuracies(model: Any, recipe: FineTuning) -> dict[str, float]:
    metric = ZeroShot(corpus=MODULES.name, tasks=recipe.tasks, limit=_ITEMS)
    found = evaluate(model.network, model.tokenizer, metric, prepare(metric))
    return {task: round(found[task], 2) for task in recipe.tasks}


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


def practice(tasks: Sequence[str], modules: int, items: int) -> list[Text]:
    """Texts of questions and answers that follow each other, task by task; most are of one.

    Args:
        modules: how many of the training modules are read, in the order of a hash. items: of each task, at most.

    Raises:
        CorpusError: none of the packages is installed.
    """
    texts = ordered("practice", load_rows(MODULES, "train"), str)[:modules]
    source = PassageSource(tuple(map(Module, texts)))
    found: list[Text] = []
    for task in tasks:
        if task == "arithmetic":
            found += _sums(items)
            continue
        for item in task_items(task, source, items):
            context, *_, answer = item.values()  # without choices it is the last one
            found.append(((context, item["choices"][answer] if "choices" in item else answer),))
    return found


def _sums(count: int) -> Iterator[Text]:
    """Sessions of sums as the task has them, none of which is asked there, in either order."""
    found = (_SUM.search(item["context"]) for item in task_items("arithmetic", read("test")))
    asked = {frozenset(map(int, match.groups())) for match in found if match}
    pairs = [(one, other) for one in range(2, 100) for other in range(2, 100) if {one, other} not in asked]
    for place in range(count):
        drawn = [pairs[number(f"sum {place}", str(turn)) % len(pairs)] for turn in range(_SUMS)]
        yield tuple((f">>> {one} + {other}", f"\n{one + other}") for one, other in drawn)
