"""The shipped suite without lm-eval: items read from a prepared folder, asked and judged by lm-eval's rules.

lm-eval itself runs the same folder and gives the same answers (a test compares them); without it an evaluation starts
seconds earlier, and needs no more than the model.
"""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from reproduction.tasks.odds import item_scores
from reproduction.tasks.rouge import rouge_l
from reproduction.tasks.rows import checked_rows, schema
from reproduction.tasks.scoring import Scorer, Setting
from reproduction.tasks.shipped import asked
from rotquant.foundation.errors import TaskError

_CHOICE = schema(
    lambda row: None if row.answer < len(row.choices) else "field 'answer' is none of its choices",
    context=str,
    choices=Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)],
    answer=Annotated[int, Field(ge=0)],
)

Measures = dict[str, float]
"""What an item scores, from 0 to 1, by measure, nan where the network's outputs are not finite; of an item with choices
also their log-odds and the choice by each measure (`odds.item_scores`)."""


class Questions:
    """One task's items, with `shots` solved examples before each.

    Attributes:
        setting: where generation stops; None for a task whose answers are given.

    Raises:
        TaskError: the task has fewer examples, or the folder lacks it or has it damaged.
    """

    def __init__(self, folder: Path, name: str, shots: int, limit: int | None) -> None:
        self.name, form = name, asked(name)
        self._target, self._delimiter = form["doc_to_target"], form["target_delimiter"]
        self._measures = [entry["metric"] for entry in form["metric_list"]]
        options = form.get("generation_kwargs")
        self.setting: Setting | None = (tuple(options["until"]), options["max_gen_toks"]) if options else None
        row = _CHOICE if "doc_to_choice" in form else schema(**{"context": str, self._target: str})
        examples = checked_rows(folder / f"{name}.examples.jsonl", row)
        if len(examples) < shots:
            raise TaskError(f"zero-shot task {name!r} has {len(examples)} examples, fewer than {shots} shots.")
        solved = ((row["context"], self.answers(row)[row.get("answer", 0)]) for row in examples[:shots])
        self._solved = "".join(f"{context}{answer}\n\n" for context, answer in solved)
        self.items = checked_rows(folder / f"{name}.jsonl", row)[:limit]

    def prompt(self, row: dict[str, Any]) -> str:
        """What the model reads before it answers an item."""
        return self._solved + row["context"]

    def answers(self, row: dict[str, Any]) -> list[str]:
        """What an item may be continued by: its choices, or the one true answer."""
        return [self._delimiter + choice for choice in row.get("choices", [row[self._target]])]

    def judge(self, row: dict[str, Any], found: list[tuple[float, bool]]) -> Measures:
        """Accuracy by the log-likelihoods of an item's answers, also with these by character of the answer."""
        if not all(math.isfinite(score) for score, _ in found):
            return dict.fromkeys(self._measures, math.nan)
        if "choices" not in row:
            return {"acc": float(found[0][1])}
        scores = [score for score, _ in found]
        by_length = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        return item_scores("acc", scores, row["answer"]) | item_scores("acc_norm", by_length, row["answer"])

    def judge_text(self, row: dict[str, Any], text: str, finite: bool) -> Measures:
        """How well a generated text agrees with the true one."""
        if not finite:
            return dict.fromkeys(self._measures, math.nan)
        return (
            rouge_l(row, [text]) if "rouge_l" in self._measures else {"exact_match": float(text == row[self._target])}
        )


def ask(scorer: Scorer, tasks: list[Questions]) -> dict[str, list[Measures]]:
    """What each item of each task scores. All tasks are asked at once, so that batches are of items of one length."""
    judged: dict[str, list[Measures]] = {task.name: [] for task in tasks}
    chosen = [(task, row) for task in tasks if task.setting is None for row in task.items]
    if chosen:
        pairs = [(task.prompt(row), answer) for task, row in chosen for answer in task.answers(row)]
        names = [task.name for task, row in chosen for _ in task.answers(row)]
        found = iter(scorer.log_likelihoods(pairs, names))
        for task, row in chosen:
            judged[task.name].append(task.judge(row, [next(found) for _ in task.answers(row)]))
    written = [(task, row, task.setting) for task in tasks if task.setting is not None for row in task.items]
    if written:
        prompts, settings = [task.prompt(row) for task, row, _ in written], [setting for *_, setting in written]
        texts = scorer.generate(prompts, settings, [task.name for task, *_ in written])
        for (task, row, _), (text, finite) in zip(written, texts, strict=True):
            judged[task.name].append(task.judge_text(row, text, finite))
    return judged
