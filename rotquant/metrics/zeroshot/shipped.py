"""The shipped suite as a folder that lm-eval reads: per task a YAML definition and JSONL files of items and examples.

Equal package versions give equal bytes. Data files are named relative to the folder, so that it can be moved; lm-eval's
own command line runs it from inside: `lm_eval --include_path . --tasks next_word ...`.
"""

import json
from pathlib import Path
from typing import Any

from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import atomic_directory, canonical_json, short_hash
from rotquant.metrics.zeroshot.definitions import write_definition
from rotquant.metrics.zeroshot.items import EXAMPLES, ITEMS, task_examples, task_items
from rotquant.metrics.zeroshot.passages import Item, Source, read
from rotquant.metrics.zeroshot.rouge import rouge_l
from rotquant.metrics.zeroshot.suites import SHIPPED
from rotquant.recipes.corpus import INSTALLED, Split
from rotquant.text import CorpusSpec
from rotquant.text.packages import versions

GENERATOR_VERSION = 7
"""Raised when the rules that make items change, so that no stale folder is read."""


def fingerprint() -> str:
    """Identifies the tasks' content: the held-out packages' versions and the rules that make items of them."""
    return short_hash(canonical_json([GENERATOR_VERSION, versions("test"), versions("validation")]))


#: Most tokens of a generated summary; the true ones have 4 to 15 words.
_SUMMARY_TOKENS = 24
#: Most tokens of a completion, whose longest have 24 characters.
_COMPLETION_TOKENS = 14


def build(folder: Path, spec: CorpusSpec | None = None, split: Split = "test") -> None:
    """Write all tasks into `folder`, atomically.

    Args:
        split: whose modules the items are made from; examples always come from those of the validation split.

    Raises:
        CorpusError: none of the held-out packages is installed.
        TaskError: `spec` is of another text, or too few of the held-out packages are installed.
    """
    check_source(spec)
    validation = read("validation")
    source = validation if split == "validation" else read(split)
    with atomic_directory(folder) as temporary:
        for name in SHIPPED:
            _write_task(temporary, name, *_drawn(name, source, validation))


def check_source(spec: CorpusSpec | None) -> None:
    """Raise `TaskError` for a corpus that the shipped tasks cannot be made from."""
    if spec is not None and spec.source not in INSTALLED:
        raise TaskError(
            f"the shipped tasks are made from the source files of the installed packages and their documentation, "
            f"which corpus {spec.name!r} (source {spec.source!r}) does not have; use a corpus of source 'modules'."
        )


def _drawn(name: str, source: Source, validation: Source) -> tuple[list[Item], list[Item]]:
    """A task's items and its examples. Where both come from validation modules, the first ones are the examples."""
    if source is validation:
        found = task_items(name, validation, EXAMPLES + ITEMS)
        return found[EXAMPLES:], found[:EXAMPLES]
    items = task_items(name, source)
    return items, task_examples(name, items, validation)


def _write_task(folder: Path, name: str, items: list[Item], examples: list[Item]) -> None:
    if not items:
        raise TaskError(
            f"the held-out packages have no text for task {name!r}; install requirements.lock, which pins them."
        )
    _write_rows(folder / f"{name}.jsonl", items)
    _write_rows(folder / f"{name}.examples.jsonl", examples)
    write_definition(folder, _definition(name, len(items)))


def _write_rows(file: Path, rows: list[Item]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows), encoding="utf-8")


def _definition(name: str, items: int) -> dict[str, Any]:
    """lm-eval's configuration of one task. Every field is looked up by name: rendering templates would cost seconds."""
    task = SHIPPED[name]
    form, measures = _form(name)
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl", "examples": f"{name}.examples.jsonl"}},
        "test_split": "test",
        "fewshot_split": "examples",
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_text": "context",
        "target_delimiter": " " if name == "summary" else "",  # other answers bring their white space along
        **form,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in measures],
        "num_fewshot": 0,
        "metadata": {
            "version": GENERATOR_VERSION,
            "title": task.title,
            "description": task.description,
            "chance": task.chance,
            "items": items,
        },
    }


def _form(name: str) -> tuple[dict[str, Any], list[str]]:
    """What a task asks of a model, and what it measures."""
    measure = SHIPPED[name].measure
    if measure in ("exact_match", "rouge_l"):
        tokens = _SUMMARY_TOKENS if name == "summary" else _COMPLETION_TOKENS
        form = {
            "output_type": "generate_until",
            "doc_to_target": "summary" if name == "summary" else "text",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": tokens, "do_sample": False},
        }
        return form if measure == "exact_match" else {**form, "process_results": rouge_l}, [measure]
    if name == "last_word":
        return {"output_type": "loglikelihood", "doc_to_target": "word"}, ["acc"]
    form = {"output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": "choices"}
    return form, ["acc", "acc_norm"]
