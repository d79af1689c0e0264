"""The paper suite: lm-eval's built-in tasks, read from the hub or re-pointed at local files of the hub's own schema.

A local folder holds one file per task, `<task>.jsonl`, `.json` or `.parquet`, with the rows of the split that lm-eval
evaluates (`PaperTask.split`) and the hub's field names (`rows`); of MMLU one per subject, `mmlu_anatomy.jsonl` and so
on; of LongBench the benchmark's own files.
Examples of few-shot prompts come from a file beside it, `<task>.examples.jsonl`. Each row is checked before anything
runs.
"""

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import atomic_directory, check_regular
from rotquant.metrics.zeroshot import longbench, reasoning
from rotquant.metrics.zeroshot.definitions import read_definition, write_definition
from rotquant.metrics.zeroshot.lines import json_lines, json_list
from rotquant.metrics.zeroshot.rouge import rouge_l
from rotquant.metrics.zeroshot.rows import (
    ARC,
    GSM8K,
    LAMBADA,
    MMLU,
    PIQA,
    TLDR,
    BoolQ,
    HellaSwag,
    HumanEval,
    LongBench,
    OpenBookQA,
    Row,
    SocialIQA,
    WinoGrande,
)
from rotquant.metrics.zeroshot.suites import UNCONDITIONAL
from rotquant.recipes.schemes import Normalization

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The file types of local data, and the builder of the `datasets` library that reads each."""


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
    row: type[Row]
    answered: dict[str, Any] | None = None


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
    "humaneval": PaperTask(reasoning.DEFINITIONS["humaneval"], "test", HumanEval, reasoning.ANSWERED["humaneval"]),
    "gsm8k": PaperTask(reasoning.DEFINITIONS["gsm8k"], "test", GSM8K, reasoning.ANSWERED["gsm8k"]),
    **{
        name: PaperTask(definition, "test", LongBench, None if name in longbench.EXAMPLES_IN_TEXT else {})
        for name, definition in longbench.DEFINITIONS.items()
    },
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
    try:
        for place, row in _rows(file):
            _check_row(name, row, f"{file}, {place}")
            count += 1
    except TaskError as error:
        raise TaskError(f"zero-shot task {name!r}: {error}") from None
    if count == 0:
        raise TaskError(f"zero-shot task {name!r}: {file} has no rows.")
    return count


def _check_row(name: str, row: Any, place: str) -> None:
    try:
        _task(name).row.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        what = f"field {field!r}: " if field else ""
        raise TaskError(f"{place}, {what}{first['msg'].removeprefix('Value error, ')}.") from None


def check_hub(names: tuple[str, ...]) -> None:
    """Raise `TaskError` for a task that the hub does not have."""
    for name in names:
        definition = PAPER_TASKS[name].definition
        if isinstance(definition, dict) and "dataset_path" not in definition:
            raise TaskError(f"zero-shot task {name!r} is not on the hub; name a local folder with {name}.jsonl.")


def build(
    folder: Path,
    names: tuple[str, ...],
    files: DataFiles | None,
    items: dict[str, int],
    normalization: Normalization = "length",
    in_template: bool = False,
) -> None:
    """Write a definition of each task into `folder`: lm-eval's own or ours, at local `files` or, without them, on the
    hub; `in_template`, as it is asked in one."""
    with atomic_directory(folder) as temporary:
        for definition in definitions(names, normalization, in_template):
            name = definition["task"]
            if files is not None:
                definition |= _local(_task(name).split, files[name])
                definition["metadata"] = {"version": 1, "items": items[name]}
            write_definition(temporary, definition)


def definitions(
    names: tuple[str, ...], normalization: Normalization = "length", in_template: bool = False
) -> Iterator[dict[str, Any]]:
    """The definition of each task with its data on the hub; `in_template`, as it is asked in one."""
    for name in (part for task in names for part in parts(task)):
        changes = (_task(name).answered or {}) if in_template else {}
        definition = {"task": name, **_definition(name), **changes, "num_fewshot": 0}
        if normalization == "unconditional" and name in UNCONDITIONAL:
            definition["metric_list"] = _CHOICE_METRICS
        yield definition


def included(part: str) -> str | None:
    """The file of lm-eval's own definition of a task; None where it is ours."""
    return _definition(part).get("include")


def checked_definition(folder: Path, part: str) -> dict[str, Any]:
    """`read_definition` of a task of any suite, which includes lm-eval's own definition of that task and no other.

    Raises:
        TaskError: as `read_definition`; or it includes another file.
    """
    definition = read_definition(folder, part)
    if "include" in definition and (part not in _parts_of_all() or definition["include"] != included(part)):
        raise TaskError(f"task definition {folder / part}.yaml includes another than lm-eval's; remove its folder.")
    return definition


def _parts_of_all() -> frozenset[str]:
    return frozenset(part for name in PAPER_TASKS for part in parts(name))


def stands_in_template(part: str) -> bool:
    """Whether what a task asks is written into the metric's template."""
    return _task(part).answered is not None


def is_shortened(part: str) -> bool:
    """Whether a task's long prompts may lose their middle, as LongBench's."""
    return part in longbench.DEFINITIONS


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


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a data file, each after its place. A .json file holds one list of rows, or one row per line."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    check_regular(file, TaskError)
    with file.open("rb") as stream:
        is_list = stream.read(1 << 16).lstrip().startswith(b"[")
    yield from json_list(file) if is_list else json_lines(file)


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise TaskError(f"{file} cannot be read ({error}).") from None
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
