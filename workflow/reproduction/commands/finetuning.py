"""`rotquant train` with a recipe of fine-tuning: questions, deltas, accuracies before and after, a model card."""

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from reproduction.shipped.finetuning import FineTuning, fine_tune
from reproduction.tasks import evaluate, prepare
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import SHIPPED
from rotquant.foundation.files import atomic_directory, write_json, write_text
from rotquant.models.folders import weights_digest
from rotquant.text import MODULES

#: Items of each task by which a model is compared with its base.
_ITEMS = 300


def fine_tuned(recipe: FineTuning, output: Path, device: str) -> None:
    """Fine-tune a recipe's base and write the deltas, recipe, curve and card to `output`.

    Raises:
        CheckpointError: the base is not there.
        ConfigError, ResultError, RotquantError: see `reproduction.shipped.finetuning.fine_tune`.
    """
    digest = weights_digest(Path(recipe.base))
    from reproduction.shipped.practice import practice
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
    write_text(output / "MODEL_CARD.md", card(recipe, curve))
    state_file.unlink(missing_ok=True)
    for task, (base_accuracy, accuracy) in curve["accuracies"].items():
        typer.echo(f"{recipe.name}: {task} {accuracy:.1f} %, {base_accuracy:.1f} % before")


def card(recipe: FineTuning, curve: Mapping[str, Any]) -> str:
    """What the model is, how it was made, what it gained, and a marked place that `rotquant card` fills."""
    base = Path(recipe.base).name
    purpose = (
        f"{base} with low-rank deltas of {curve['parameters']:,} parameters, fine-tuned by this project on questions "
        f"and answers of {', '.join(recipe.tasks)} (docs/tasks.md), made from training modules. It stands for "
        f"{recipe.stands_for} where the real weights are not at hand. A test object for quantization, nothing else."
    )
    training = (
        f"{recipe.steps:,} steps of {recipe.batch_size} texts, drawn from {curve['texts']:,}; the loss is of the "
        f"answers alone. {recipe.bos_fraction:.0%} of the texts begin with BOS. Rank {recipe.rank}, alpha "
        f"{recipe.alpha:g}, on {', '.join(recipe.targets)}; AdamW, peak learning rate {recipe.learning_rate:g}, "
        f"lowered by a cosine to zero, float32, seed {recipe.seed}; {curve['seconds'] / 60:.1f} minutes, torch "
        f"{curve['torch']}. No module of the test or validation split was read, and no sum that the tasks ask."
    )
    rows = "\n".join(
        f"| {SHIPPED[task].title} | {SHIPPED[task].chance or 0:.0f} | {before:.1f} | {after:.1f} |"
        for task, (before, after) in curve["accuracies"].items()
    )
    return f"""# {recipe.name}

{textwrap.fill(purpose, 120)}

## Training

    rotquant train config/finetuning/{recipe.name}.yaml -o DIR

{textwrap.fill(training, 120)}

The recipe is kept in recipe.json, the loss by step in curve.json. The folder holds the deltas alone
(adapter_model.safetensors, as the library peft writes them); they are put onto {base} when the model is loaded.

Accuracy in percent on {_ITEMS} items of each task:

| task | chance | {base} | {recipe.name} |
| --- | --- | --- | --- |
{rows}

## What it shows on held-out text

<!-- diagnose:start -->
<!-- diagnose:end -->
"""


def _accuracies(model: Any, recipe: FineTuning) -> dict[str, float]:
    metric = ZeroShot(corpus=MODULES.name, tasks=recipe.tasks, limit=_ITEMS)
    found = evaluate(model.network, model.tokenizer, metric, prepare(metric))
    return {task: round(found[task], 2) for task in recipe.tasks}
