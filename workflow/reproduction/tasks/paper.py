"""The paper suite: lm-eval's built-in tasks, read from the hub or re-pointed at local files of the hub's own schema.

A local folder holds one file per task, `<task>.jsonl`, `.json` or `.parquet`, with the rows of the split that lm-eval
evaluates (`PaperTask.split`) and the hub's field names (`PaperTask.row`); of MMLU one per subject, `mmlu_anatomy.jsonl`
and so on; of LongBench the benchmark's own files. Examples of few-shot prompts come from a file next to it,
`<task>.examples.jsonl`. Each row is checked before anything runs.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field

from reproduction.tasks import longbench, reasoning
from reproduction.tasks.definitions import measured, written
from reproduction.tasks.rouge import rouge_l
from reproduction.tasks.rows import SUFFIXES, checked_rows, schema
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import UNCONDITIONAL, task_names
from rotquant.foundation.errors import TaskError

_Text = Annotated[str, Field(min_length=1)]
_Four = Annotated[list[str], Field(min_length=4, max_length=4)]


def _key_problem(row: Any) -> str | None:
    texts, labels = len(row.choices.text), len(row.choices.label)
    if texts != labels:
        return f"field 'choices' has {texts} texts and {labels} labels"
    known = row.answerKey.lstrip() in row.choices.label
    return None if known else f"field 'answerKey' is {row.answerKey!r}, which is none of the labels"


def _program_problem(row: Any) -> str | None:
    if f"def {row.entry_point}(" not in row.prompt:
        return f"field 'prompt' defines no function {row.entry_point!r}, its 'entry_point'"
    return None if "def check(" in row.test else "field 'test' defines no function 'check'"


_KEYED = {"choices": schema(text=Annotated[list[str], Field(min_length=2)], label=list[str]), "answerKey": str}
_ARC = schema(_key_problem, question=str, **_KEYED)
_LONG_BENCH = schema(input=str, context=str, answers=Annotated[list[str], Field(min_length=1)])


@dataclass(frozen=True)
class PaperTask:
    """A task of the papers.

    definition: lm-eval's, as a file below its `tasks` folder, or ours for a task that it asks otherwise or not at all;
        without `dataset_path` where the hub does not have it.
    split: what it evaluates.
    row: the schema of its data.
    answered: what a template changes of our definition; None for a task that stands in none.
    """

    definition: str | dict[str, Any]
    split: str
    row: type[BaseModel]
    answered: dict[str, Any] | None = None


PAPER_TASKS = {
    "piqa": PaperTask("piqa/piqa.yaml", "validation", schema(goal=str, sol1=str, sol2=str, label=Literal[0, 1])),
    "winogrande": PaperTask(
        "winogrande/default.yaml",
        "validation",
        schema(
            lambda row: None if "_" in row.sentence else "field 'sentence': should have a blank, written \"_\"",
            sentence=str,
            option1=str,
            option2=str,
            answer=Literal["1", "2"],
        ),
    ),
    "hellaswag": PaperTask(
        "hellaswag/hellaswag.yaml",
        "validation",
        schema(activity_label=str, ctx_a=str, ctx_b=str, endings=_Four, label=Literal["0", "1", "2", "3"]),
    ),
    "arc_easy": PaperTask("arc/arc_easy.yaml", "test", _ARC),
    "arc_challenge": PaperTask("arc/arc_challenge.yaml", "test", _ARC),
    "lambada_openai": PaperTask(
        "lambada/lambada_openai.yaml",
        "test",
        schema(lambda row: None if " " in row.text else "field 'text': should have at least two words", text=str),
    ),
    "boolq": PaperTask(
        "super_glue/boolq/default.yaml", "validation", schema(passage=str, question=str, label=Literal[0, 1])
    ),
    "social_iqa": PaperTask(
        "siqa/siqa.yaml",
        "validation",
        schema(context=str, question=str, answerA=str, answerB=str, answerC=str, label=Literal["1", "2", "3"]),
    ),
    "openbookqa": PaperTask("openbookqa/openbookqa.yaml", "test", schema(_key_problem, question_stem=str, **_KEYED)),
    "mmlu": PaperTask("mmlu/default", "test", schema(question=str, choices=_Four, answer=Literal[0, 1, 2, 3])),
    "tldr": PaperTask(
        {"doc_to_text": "{{document}}\nTL;DR:", **written("summary", ["\n"], 64, "rouge_l", rouge_l)},
        "test",
        schema(document=_Text, summary=_Text),
    ),
    "humaneval": PaperTask(
        reasoning.DEFINITIONS["humaneval"],
        "test",
        schema(_program_problem, prompt=str, test=str, entry_point=str),
        reasoning.ANSWERED["humaneval"],
    ),
    "gsm8k": PaperTask(
        reasoning.DEFINITIONS["gsm8k"],
        "test",
        schema(
            lambda row: (
                None
                if re.search(r"#### -?\$?[\d.,]*\d", row.answer)
                else "field 'answer': should end with \"#### \" and a number"
            ),
            question=str,
            answer=str,
        ),
        reasoning.ANSWERED["gsm8k"],
    ),
    **{
        name: PaperTask(definition, "test", _LONG_BENCH, None if name in longbench.EXAMPLES_IN_TEXT else {})
        for name, definition in longbench.DEFINITIONS.items()
    },
}
"""The tasks by name; the definition of MMLU is a folder with one of each subject."""


@functools.cache
def parts(name: str) -> tuple[str, ...]:
    """lm-eval's tasks that a task of a suite consists of: MMLU's subjects, or the task itself."""
    if name != "mmlu":
        return (name,)
    folder = lm_eval_tasks() / cast(str, PAPER_TASKS["mmlu"].definition)
    return tuple(sorted(file.stem for file in folder.glob("mmlu_*.yaml")))


def data_files(metric: ZeroShot) -> dict[str, dict[str, Path]]:
    """Of each task the local files: the split that is evaluated, and `examples` with shots; nothing of the hub's data.

    Raises:
        TaskError: no such folder, no file for a task, or a task without a folder that the hub does not have.
    """
    found: dict[str, dict[str, Path]] = {}
    if metric.path is None:
        for name in task_names(metric):
            definition = PAPER_TASKS[name].definition
            if isinstance(definition, dict) and "dataset_path" not in definition:
                raise TaskError(f"zero-shot task {name!r} is not on the hub; name a local folder with {name}.jsonl.")
        return found
    folder = Path(metric.path).expanduser().resolve()
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder} with the data files of the zero-shot tasks.")
    for name in (part for task in task_names(metric) for part in parts(task)):
        candidates = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            raise TaskError(f"zero-shot task {name!r} has no data file: expected {candidates[0]} (or .json, .parquet).")
        found[name] = {_task(name).split: file}
        if metric.shots:
            found[name]["examples"] = examples = file.with_suffix(f".examples{file.suffix}")
            if not examples.is_file():
                raise TaskError(
                    f"zero-shot task {name!r} has no examples for {metric.shots} shots: expected {examples}."
                )
    return found


def definitions(metric: ZeroShot) -> Iterator[dict[str, Any]]:
    """The definition of each task that a metric asks, lm-eval's own or ours, with its data on the hub or in files.

    Raises:
        TaskError: as `data_files`; a local file is unreadable, empty or has a row with a missing or mistyped field.
    """
    files = data_files(metric)
    for name in (part for task in task_names(metric) for part in parts(task)):
        task = _task(name)
        definition: dict[str, Any] = {"task": name}
        if isinstance(task.definition, dict):
            definition |= task.definition
        else:
            file = lm_eval_tasks() / task.definition
            definition["include"] = str(file if file.suffix == ".yaml" else file / f"{name}.yaml")
        if metric.template is not None:
            definition |= task.answered or {}
        definition["num_fewshot"] = 0
        if metric.normalization == "unconditional" and name in UNCONDITIONAL:
            definition["metric_list"] = measured("acc", "acc_norm", "acc_mutual_info")
        yield definition | (_local(name, files[name]) if files else {})


def _local(name: str, files: dict[str, Path]) -> dict[str, Any]:
    """The fields that point a definition at local files, all of whose rows are checked."""
    split = _task(name).split
    try:
        items = {of: len(checked_rows(file, _task(name).row)) for of, file in files.items()}
    except TaskError as error:
        raise TaskError(f"zero-shot task {name!r}: {error}") from None
    if empty := [files[of] for of, count in items.items() if count == 0]:
        raise TaskError(f"zero-shot task {name!r}: {empty[0]} has no rows.")
    return {
        "dataset_path": SUFFIXES[files[split].suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {of: str(file) for of, file in files.items()}},
        "training_split": None,
        "validation_split": split if split == "validation" else None,
        "test_split": split if split == "test" else None,
        "fewshot_split": "examples" if "examples" in files else None,
        "metadata": {"version": 1, "items": items[split]},
    }


def stands_in_template(part: str) -> bool:
    """Whether what a task asks is written into the metric's template."""
    return _task(part).answered is not None


def is_shortened(part: str) -> bool:
    """Whether a task's long prompts may lose their middle, as LongBench's."""
    return part in longbench.DEFINITIONS


def _task(part: str) -> PaperTask:
    """The task that one of lm-eval's tasks is part of."""
    return PAPER_TASKS["mmlu" if part.startswith("mmlu_") else part]


def lm_eval_tasks() -> Path:
    """The folder of lm-eval's built-in tasks, found without importing it.

    Raises:
        TaskError: lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise TaskError("zero-shot evaluation needs lm-eval; install it with `pip install 'lm-eval>=0.4.13'`.")
    return Path(spec.submodule_search_locations[0]) / "tasks"
