"""The paper suite: lm-eval's built-in tasks, read from the hub or re-pointed at local files of the hub's own schema.

A local folder holds one file per task, `<task>.jsonl`, `.json` or `.parquet`, with the rows of the split that lm-eval
evaluates (`PaperTask.split`) and the hub's field names. Each row is checked before anything runs.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rotquant.errors import TaskError
from rotquant.files import atomic_directory

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The file types of local data, and the builder of the `datasets` library that reads each."""


class Row(BaseModel):
    """One row of a data file; fields that lm-eval does not read are let through."""

    model_config = ConfigDict(strict=True, extra="ignore")


class PIQA(Row):
    """ybisk/piqa: the right solution is sol1 (label 0) or sol2 (1)."""

    goal: str
    sol1: str
    sol2: str
    label: Literal[0, 1]


class WinoGrande(Row):
    """allenai/winogrande: the sentence has one blank, written "_"."""

    sentence: str
    option1: str
    option2: str
    answer: Literal["1", "2"]

    @field_validator("sentence")
    @classmethod
    def _has_blank(cls, value: str) -> str:
        if "_" not in value:
            raise ValueError('should have a blank, written "_"')
        return value


class HellaSwag(Row):
    """Rowan/hellaswag: four endings; the label is a digit in quotes."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str] = Field(min_length=4, max_length=4)
    label: Literal["0", "1", "2", "3"]


class Choices(Row):
    """Answers and the letters (or digits) that name them."""

    text: list[str] = Field(min_length=2)
    label: list[str]


class _Keyed(Row):
    """A question whose answer is named by a letter."""

    choices: Choices
    answerKey: str  # noqa: N815 - the hub's name

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> "_Keyed":
        if len(self.choices.text) != len(self.choices.label):
            texts, labels = len(self.choices.text), len(self.choices.label)
            raise ValueError(f"field 'choices' has {texts} texts and {labels} labels")
        if self.answerKey.lstrip() not in self.choices.label:
            raise ValueError(f"field 'answerKey' is {self.answerKey!r}, which is none of the labels")
        return self


class ARC(_Keyed):
    """allenai/ai2_arc, configurations ARC-Easy and ARC-Challenge."""

    question: str


class OpenBookQA(_Keyed):
    """allenai/openbookqa, configuration main."""

    question_stem: str


class LAMBADA(Row):
    """EleutherAI/lambada_openai: the last word of the text is to be predicted."""

    text: str

    @field_validator("text")
    @classmethod
    def _has_two_words(cls, value: str) -> str:
        if len(value.split(" ")) < 2:
            raise ValueError("should have at least two words")
        return value


class BoolQ(Row):
    """aps/super_glue, configuration boolq: label 1 is yes."""

    passage: str
    question: str
    label: Literal[0, 1]


class SocialIQA(Row):
    """lighteval/siqa: the label is the number of the answer in quotes."""

    context: str
    question: str
    answerA: str  # noqa: N815 - the hub's name
    answerB: str  # noqa: N815
    answerC: str  # noqa: N815
    label: Literal["1", "2", "3"]


@dataclass(frozen=True)
class PaperTask:
    """definition: lm-eval's file below its `tasks` folder; split: what it evaluates; row: the schema of its data."""

    definition: str
    split: str
    row: type[Row]


PAPER_TASKS = {
    "piqa": PaperTask("piqa/piqa.yaml", "validation", PIQA),
    "winogrande": PaperTask("winogrande/default.yaml", "validation", WinoGrande),
    "hellaswag": PaperTask("hellaswag/hellaswag.yaml", "validation", HellaSwag),
    "arc_easy": PaperTask("arc/arc_easy.yaml", "test", ARC),
    "arc_challenge": PaperTask("arc/arc_challenge.yaml", "test", ARC),
    "lambada_openai": PaperTask("lambada/lambada_openai.yaml", "test", LAMBADA),
    "boolq": PaperTask("super_glue/boolq/default.yaml", "validation", BoolQ),
    "social_iqa": PaperTask("siqa/siqa.yaml", "validation", SocialIQA),
    "openbookqa": PaperTask("openbookqa/openbookqa.yaml", "test", OpenBookQA),
}


def data_files(path: str | Path, names: tuple[str, ...]) -> dict[str, Path]:
    """The data file of each task.

    Raises:
        TaskError: no such folder, or no file for a task.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder} with the data files of the zero-shot tasks.")
    found = {}
    for name in names:
        candidates = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            raise TaskError(f"zero-shot task {name!r} has no data file: expected {candidates[0]} (or .json, .parquet).")
        found[name] = file
    return found


def check_file(name: str, file: Path) -> int:
    """Check every row of a task's data file; return how many there are.

    Raises:
        TaskError: unreadable, empty, or a row with a missing or mistyped field.
    """
    count = 0
    for count, row in enumerate(_rows(name, file), start=1):
        try:
            PAPER_TASKS[name].row.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            what = f"field {field!r}: " if field else ""
            message = first["msg"].removeprefix("Value error, ")
            raise TaskError(f"zero-shot task {name!r}: {file}, row {count}, {what}{message}.") from None
    if count == 0:
        raise TaskError(f"zero-shot task {name!r}: {file} has no rows.")
    return count


def build(folder: Path, names: tuple[str, ...], files: dict[str, Path] | None, items: dict[str, int]) -> None:
    """Write a definition of each task into `folder`: lm-eval's own, at local `files` or, without them, on the hub."""
    root = lm_eval_tasks()
    with atomic_directory(folder) as temporary:
        for name in names:
            task = PAPER_TASKS[name]
            definition: dict[str, Any] = {"include": str(root / task.definition), "task": name, "num_fewshot": 0}
            if files is not None:
                definition |= {
                    "dataset_path": SUFFIXES[files[name].suffix],
                    "dataset_name": None,
                    "dataset_kwargs": {"data_files": {task.split: str(files[name])}},
                    "training_split": None,
                    "validation_split": task.split if task.split == "validation" else None,
                    "test_split": task.split if task.split == "test" else None,
                    "metadata": {"version": 1, "items": items[name]},
                }
            (temporary / f"{name}.yaml").write_text(yaml.safe_dump(definition, sort_keys=False, width=120))


def lm_eval_tasks() -> Path:
    """The folder of lm-eval's built-in tasks, found without importing it.

    Raises:
        TaskError: lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise TaskError("zero-shot evaluation needs lm-eval; install it with `pip install 'lm-eval>=0.4.13'`.")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def _rows(name: str, file: Path) -> Iterator[Any]:
    """The rows of a data file. A .json file holds one list of rows, or one row per line."""
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            yield from pyarrow.parquet.read_table(file).to_pylist()
            return
        text = file.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise TaskError(f"zero-shot task {name!r}: {file} cannot be read ({error}).") from None
