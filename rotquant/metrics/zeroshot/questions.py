"""The shipped suite without lm-eval: items read from a prepared folder, asked and judged by lm-eval's rules.

lm-eval itself runs the same folder and gives the same answers (a test compares them); without it an evaluation starts
seconds earlier, and needs no more than the model.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import file_inside
from rotquant.metrics.zeroshot.definitions import read_definition
from rotquant.metrics.zeroshot.lines import json_lines
from rotquant.metrics.zeroshot.odds import told
from rotquant.metrics.zeroshot.rouge import rouge_l
from rotquant.metrics.zeroshot.scoring import Scorer, Setting


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Files(_Part):
    data_files: dict[str, str]


class _Measured(_Part):
    metric: str


class _Generation(_Part):
    until: list[str]
    max_gen_toks: Annotated[int, Field(gt=0)]


class _Definition(_Part):
    """What a definition must have to be asked here."""

    output_type: Literal["multiple_choice", "loglikelihood", "generate_until"]
    doc_to_target: str
    target_delimiter: str
    metric_list: Annotated[list[_Measured], Field(min_length=1)]
    dataset_kwargs: _Files
    generation_kwargs: _Generation | None = None


class _Choice(_Part):
    """An item whose answer is one of several."""

    context: str
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    answer: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> Self:
        if self.answer >= len(self.choices):
            raise ValueError("its answer is none of its choices")
        return self


Measures = dict[str, float]
"""What an item scores, from 0 to 1, by measure, nan where the network's outputs are not finite; of an item with choices
also their log-odds and the choice by each measure (`odds.told`)."""


class Questions:
    """One task's items, with `shots` solved examples before each.

    Raises:
        TaskError: the task has fewer examples, or the folder lacks it or has it damaged.
    """

    def __init__(self, folder: Path, name: str, shots: int, limit: int | None) -> None:
        self.name = name
        self.definition = read_definition(folder, name)
        where = f"task definition {folder / name}.yaml"
        try:
            self._asked = _Definition.model_validate(self.definition)
        except ValidationError as error:
            raise TaskError(f"{where} is damaged: {first_problem(error)}; remove its folder.") from None
        named = self._asked.dataset_kwargs.data_files
        files = {split: file_inside(folder, file, where, TaskError) for split, file in named.items()}
        if {"test", "examples"} - files.keys():
            raise TaskError(f"{where} has no files of items and examples; remove its folder.")
        examples = self._rows(files["examples"])
        if len(examples) < shots:
            raise TaskError(f"zero-shot task {name!r} has {len(examples)} examples, fewer than {shots} shots.")
        self._solved = "".join(f"{row['context']}{self._target(row)}\n\n" for row in examples[:shots])
        self.items = self._rows(files["test"])[:limit]

    @property
    def setting(self) -> Setting | None:
        """Where generation stops; None for a task whose answers are given."""
        options = self.definition.get("generation_kwargs")
        return (tuple(options["until"]), options["max_gen_toks"]) if options else None

    def prompts(self) -> list[str]:
        """What the model reads before it answers, item by item."""
        return [self._solved + row["context"] for row in self.items]

    def answers(self, row: dict[str, Any]) -> list[str]:
        """What an item may be continued by: its choices, or the one true answer."""
        delimiter = self.definition["target_delimiter"]
        return [delimiter + choice for choice in (row["choices"] if "choices" in row else [self._true(row)])]

    def judge(self, row: dict[str, Any], found: list[tuple[float, bool]]) -> Measures:
        """Accuracy by the log-likelihoods of an item's answers, also with these by character of the answer."""
        if not all(math.isfinite(score) for score, _ in found):
            return dict.fromkeys(self._measures, math.nan)
        if "choices" not in row:
            return {"acc": float(found[0][1])}
        scores = [score for score, _ in found]
        by_length = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        return told("acc", scores, row["answer"]) | told("acc_norm", by_length, row["answer"])

    def judge_text(self, row: dict[str, Any], text: str, finite: bool) -> Measures:
        """How well a generated text agrees with the true one."""
        if not finite:
            return dict.fromkeys(self._measures, math.nan)
        return rouge_l(row, [text]) if "rouge_l" in self._measures else {"exact_match": float(text == self._true(row))}

    @property
    def _measures(self) -> list[str]:
        return [entry["metric"] for entry in self.definition["metric_list"]]

    def _rows(self, file: Path) -> list[dict[str, Any]]:
        """The rows of a data file, which have the fields that the task asks for."""
        rows = []
        for place, row in json_lines(file):
            if problem := self._problem(row):
                raise TaskError(f"{file}, {place}, is none of a task whose items have {problem}; remove its folder.")
            rows.append(row)
        return rows

    def _problem(self, row: Any) -> str | None:
        """What an item must have and has not, or has otherwise."""
        if self._asked.output_type == "multiple_choice":
            try:
                _Choice.model_validate(row)
            except ValidationError as error:
                return f"'answer', 'choices', 'context' ({first_problem(error)})"
            return None
        names = sorted({"context", self._asked.doc_to_target})
        whole = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
        return None if whole else ", ".join(map(repr, names))

    def _target(self, row: dict[str, Any]) -> str:
        """The true answer as it stands behind a solved example."""
        answers = self.answers(row)
        return answers[row.get("answer", 0)]

    def _true(self, row: dict[str, Any]) -> str:
        return row[self.definition["doc_to_target"]]


def ask(scorer: Scorer, tasks: list[Questions]) -> dict[str, list[Measures]]:
    """What each item of each task scores. All tasks are asked at once, so that batches are of items of one length."""
    chosen = [task for task in tasks if task.setting is None]
    written = [task for task in tasks if task.setting is not None]
    return _choose(scorer, chosen) | _write(scorer, written)


def _choose(scorer: Scorer, tasks: list[Questions]) -> dict[str, list[Measures]]:
    asked = [
        (task, row, prompt, task.answers(row))
        for task in tasks
        for row, prompt in zip(task.items, task.prompts(), strict=True)
    ]
    pairs = [(prompt, answer) for _, _, prompt, answers in asked for answer in answers]
    names = [task.name for task, _, _, answers in asked for _ in answers]
    found = iter(scorer.log_likelihoods(pairs, names) if pairs else ())
    judged: dict[str, list[Measures]] = {task.name: [] for task in tasks}
    for task, row, _, answers in asked:
        judged[task.name].append(task.judge(row, [next(found) for _ in answers]))
    return judged


def _write(scorer: Scorer, tasks: list[Questions]) -> dict[str, list[Measures]]:
    asked = [(task, row, prompt) for task in tasks for row, prompt in zip(task.items, task.prompts(), strict=True)]
    settings = [setting for task, _, _ in asked if (setting := task.setting) is not None]
    names = [task.name for task, _, _ in asked]
    found = scorer.generate([prompt for _, _, prompt in asked], settings, names) if asked else []
    judged: dict[str, list[Measures]] = {task.name: [] for task in tasks}
    for (task, row, _), (text, finite) in zip(asked, found, strict=True):
        judged[task.name].append(task.judge_text(row, text, finite))
    return judged
