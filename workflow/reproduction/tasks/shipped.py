"""The shipped suite as a folder that lm-eval reads: per task a YAML definition and JSONL files of items and examples.

Equal package versions give equal bytes. Data files are named relative to the folder, so that it can be moved; lm-eval's
own command line runs it from inside: `lm_eval --include_path . --tasks next_word ...`.
"""

import json
from pathlib import Path
from typing import Any

from reproduction.corpora import INSTALLED, Corpus
from reproduction.corpora.packages import versions
from reproduction.tasks.definitions import measured, write_definition, written
from reproduction.tasks.items import task_examples, task_items
from reproduction.tasks.passages import read
from reproduction.tasks.rouge import rouge_l
from reproduction.tasks.suites import SHIPPED
from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import atomic_directory, canonical_json, short_hash

GENERATOR_VERSION = 7
"""Raised when the rules that make items change, so that no stale folder is read."""

#: Most tokens of a generated summary, which has 4 to 15 words, and of a completion, which has at most 24 characters.
_SUMMARY_TOKENS, _COMPLETION_TOKENS = 24, 14


def fingerprint() -> str:
    """Identifies the tasks' content: the held-out packages' versions and the rules that make items of them."""
    return short_hash(canonical_json([GENERATOR_VERSION, versions("test"), versions("validation")]))


def build(folder: Path, spec: Corpus | None = None) -> None:
    """Write all tasks into `folder`, atomically. Items are of the test split, examples of the validation split.

    Raises:
        CorpusError: none of the held-out packages is installed.
        TaskError: `spec` is of another text, or too few of the held-out packages are installed.
    """
    check_source(spec)
    source, validation = read("test"), read("validation")
    with atomic_directory(folder) as temporary:
        for name in SHIPPED:
            items = task_items(name, source)
            examples = task_examples(name, items, validation)
            if not items:
                raise TaskError(
                    f"the held-out packages have no text for task {name!r}; install requirements.lock, which pins them."
                )
            for file, rows in ((f"{name}.jsonl", items), (f"{name}.examples.jsonl", examples)):
                (temporary / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            write_definition(temporary, definition(temporary, name))


def check_source(spec: Corpus | None) -> None:
    """Raise `TaskError` for a corpus that the shipped tasks cannot be made from."""
    if spec is not None and spec.source not in INSTALLED:
        raise TaskError(
            f"the shipped tasks are made from the source files of the installed packages and their documentation, "
            f"which corpus {spec.name!r} (source {spec.source!r}) does not have; use a corpus of source 'modules'."
        )


def definition(folder: Path, name: str) -> dict[str, Any]:
    """lm-eval's configuration of a task whose items a folder has.

    Raises:
        TaskError: the items cannot be read.
    """
    task, file = SHIPPED[name], folder / f"{name}.jsonl"
    try:
        items = file.read_bytes().count(b"\n")
    except OSError as error:
        raise TaskError(f"{file} cannot be read ({error.strerror}).") from None
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl", "examples": f"{name}.examples.jsonl"}},
        "test_split": "test",
        "fewshot_split": "examples",
        "fewshot_config": {"sampler": "first_n"},
        **asked(name),
        "num_fewshot": 0,
        "metadata": {
            "version": GENERATOR_VERSION,
            "title": task.title,
            "description": task.description,
            "chance": task.chance,
            "items": items,
        },
    }


def asked(name: str) -> dict[str, Any]:
    """How a task is asked and measured. Every field is looked up by name: rendering templates would cost seconds."""
    if name == "summary":
        form = written("summary", ["\n"], _SUMMARY_TOKENS, "rouge_l", rouge_l)
    elif SHIPPED[name].measure == "exact_match":
        form = written("text", ["\n"], _COMPLETION_TOKENS, "exact_match")
    elif name == "last_word":
        form = {"output_type": "loglikelihood", "doc_to_target": "word", "metric_list": measured("acc")}
    else:
        form = {"output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": "choices"}
        form |= {"metric_list": measured("acc", "acc_norm")}
    delimiter = " " if name == "summary" else ""  # other answers bring their white space along
    return {"doc_to_text": "context", "target_delimiter": delimiter, **form}
