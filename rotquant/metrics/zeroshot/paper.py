"""The paper suite: lm-eval's built-in tasks, read from the hub or re-pointed at local files of the hub's own schema.

A local folder holds one file per task, `<task>.jsonl`, `.json` or `.parquet`, with the rows of the split that lm-eval
evaluates (`PaperTask.split`) and the hub's field names; of MMLU one per subject, `mmlu_anatomy.jsonl` and so on.
Examples of few-shot prompts come from a file beside it, `<task>.examples.jsonl`. Each row is checked before anything
runs.
"""

import functools
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import atomic_directory
from rotquant.metrics.zeroshot.definitions import write_definition
from rotquant.metrics.zeroshot.rouge import rouge_l
from rotquant.metrics.zeroshot.suites import UNCONDITIONAL
from rotquant.recipes.schemes import Normalization

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


class MMLU(Row):
    """cais/mmlu, a configuration per subject: the answer is the index of the right choice."""

    question: str
    choices: list[str] = Field(min_length=4, max_length=4)
    answer: Literal[0, 1, 2, 3]


class TLDR(Row):
    """TLDR9+ (Sotudeh et al. 2021), which its authors distribute as files: a forum post and its author's summary."""

    document: str = Field(min_length=1)
    summary: str = Field(min_length=1)


@dataclass(frozen=True)
class PaperTask:
    """A task of the papers.

    definition: lm-eval's, as a file below its `tasks` folder, or ours for a task that neither it nor the hub has.
    split: what it evaluates.
    row: the schema of its data.
    """

    definition: str | dict[str, Any]
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
    "mmlu": PaperTask("mmlu/default", "test", MMLU),
    "tldr": PaperTask(
        {
            "output_type": "generate_until",
            "doc_to_text": "{{document}}\nTL;DR:",
            "doc_to_target": "summary",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, "do_sample": False},
            "process_results": rouge_l,
            "metric_list": [{"metric": "rouge_l", "aggregation": "mean", "higher_is_better": True}],
        },
        "test",
        TLDR,
    ),
}
"""The tasks by name; the definition of MMLU is a folder with one of each subject."""

_CHOICE_METRICS = [
    {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm", "acc_mutual_info")
]

DataFiles = dict[str, dict[str, Path]]
"""Of each task the local files: the split that is evaluated, and `examples` where a prompt has some."""


@functools.cache
def parts(name: str) -> tuple[str, ...]:
    """lm-eval's tasks that a task of a suite consists of: MMLU's subjects, or the task itself."""
    if name != "mmlu":
        return (name,)
    folder = lm_eval_tasks() / cast(str, PAPER_TASKS["mmlu"].definition)
    return tuple(sorted(file.stem for file in folder.glob("mmlu_*.yaml")))


def data_files(path: str | Path, names: tuple[str, ...], shots: int = 0) -> DataFiles:
    """The data files of each task, with one of examples for prompts with `shots`.

    Raises:
        TaskError: no such folder, or no file for a task.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder} with the data files of the zero-shot tasks.")
    found: DataFiles = {}
    for name in (part for task in names for part in parts(task)):
        candidates = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            raise TaskError(f"zero-shot task {name!r} has no data file: expected {candidates[0]} (or .json, .parquet).")
        found[name] = {_task(name).split: file}
        if shots:
            found[name]["examples"] = examples = file.with_suffix(f".examples{file.suffix}")
            if not examples.is_file():
                raise TaskError(f"zero-shot task {name!r} has no examples for {shots} shots: expected {examples}.")
    return found


def check_file(name: str, file: Path) -> int:
    """Check every row of a task's data file; return how many there are.

    Raises:
        TaskError: unreadable, empty, or a row with a missing or mistyped field.
    """
    count = 0
    for count, row in enumerate(_rows(name, file), start=1):
        try:
            _task(name).row.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            what = f"field {field!r}: " if field else ""
            message = first["msg"].removeprefix("Value error, ")
            raise TaskError(f"zero-shot task {name!r}: {file}, row {count}, {what}{message}.") from None
    if count == 0:
        raise TaskError(f"zero-shot task {name!r}: {file} has no rows.")
    return count


def check_hub(names: tuple[str, ...]) -> None:
    """Raise `TaskError` for a task that the hub does not have."""
    for name in names:
        if isinstance(PAPER_TASKS[name].definition, dict):
            raise TaskError(f"zero-shot task {name!r} is not on the hub; name a local folder with {name}.jsonl.")


def build(
    folder: Path,
    names: tuple[str, ...],
    files: DataFiles | None,
    items: dict[str, int],
    normalization: Normalization = "length",
) -> None:
    """Write a definition of each task into `folder`: lm-eval's own, at local `files` or, without them, on the hub."""
    with atomic_directory(folder) as temporary:
        for name in (part for task in names for part in parts(task)):
            definition = {"task": name, **_definition(name), "num_fewshot": 0}
            if normalization == "unconditional" and name in UNCONDITIONAL:
                definition["metric_list"] = _CHOICE_METRICS
            if files is not None:
                definition |= _local(_task(name).split, files[name])
                definition["metadata"] = {"version": 1, "items": items[name]}
            write_definition(temporary, definition)


def _task(part: str) -> PaperTask:
    """The task that one of lm-eval's tasks is part of."""
    return PAPER_TASKS["mmlu" if part.startswith("mmlu_") else part]


def _definition(part: str) -> dict[str, Any]:
    """A task as lm-eval or we define it, with the data on the hub."""
    definition = _task(part).definition
    if isinstance(definition, dict):
        return definition
    file = lm_eval_tasks() / definition
    return {"include": str(file if file.suffix == ".yaml" else file / f"{part}.yaml")}


def _local(split: str, files: dict[str, Path]) -> dict[str, Any]:
    """The fields that point a definition at local files."""
    return {
        "dataset_path": SUFFIXES[files[split].suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        "training_split": None,
        "validation_split": split if split == "validation" else None,
        "test_split": split if split == "test" else None,
        "fewshot_split": "examples" if "examples" in files else None,
    }


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
