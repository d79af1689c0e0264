"""Items of the shipped zero-shot tasks."""

import json
from pathlib import Path
from typing import Any

from reproduction.tasks import TASKS, scores
from reproduction.tasks.settings import ZeroShot

MODEL = Path(__file__).parents[2] / "workflow" / "resources" / "models" / "rq-7b"


EIGHT = tuple(TASKS["shipped"])[:8]


ACCURACIES = {name: TASKS["shipped"][name] for name in (*EIGHT, "recall_512", "arithmetic")}


CHOICES = [
    name for name, task in TASKS["shipped"].items() if task.measure in ("acc", "acc_norm") and name != "last_word"
]


COMPLETIONS = [name for name, task in TASKS["shipped"].items() if task.measure == "exact_match"]


ALL = ZeroShot(corpus="modules", tasks=tuple(ACCURACIES))


def items(folder: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


def examples(folder: Path, task: str) -> list[dict]:
    return items(folder, f"{task}.examples")


def measured(*arguments: Any, **options: Any) -> dict[str, float]:
    """The metrics alone, of what `scores` takes."""
    return scores(*arguments, **options).metrics
