"""The shipped suite as a folder that lm-eval reads: per task a YAML definition and a JSONL file of items.

Equal package versions give equal bytes. Data files are named relative to the folder, so that it can be moved; lm-eval's
own command line runs it from inside: `lm_eval --include_path . --tasks next_word ...`.
"""

import json
from pathlib import Path

import yaml

from rotquant.corpora import CorpusSpec
from rotquant.corpora.docstrings import versions
from rotquant.errors import TaskError
from rotquant.files import atomic_directory, canonical_json, short_hash
from rotquant.zeroshot.items import TASK_ITEMS, Source, held_out, task_items
from rotquant.zeroshot.suites import SHIPPED

GENERATOR_VERSION = 3
"""Raised when the rules of `rotquant.zeroshot.items` change, so that no stale folder is read."""


def fingerprint() -> str:
    """Identifies the tasks' content: the held-out packages' versions and the rules that make items of them."""
    return short_hash(canonical_json([GENERATOR_VERSION, versions("test"), versions("validation")]))


def build(folder: Path, spec: CorpusSpec | None = None) -> None:
    """Write all tasks into `folder`, atomically.

    Raises:
        TaskError: `spec` is not the docstring corpus, or too few of its held-out packages are installed.
    """
    check_source(spec)
    source = held_out()
    with atomic_directory(folder) as temporary:
        for name in TASK_ITEMS:
            _write_task(temporary, name, source)


def check_source(spec: CorpusSpec | None) -> None:
    """Raise `TaskError` for a corpus that the shipped tasks cannot be made from."""
    if spec is not None and spec.source != "docstrings":
        raise TaskError(
            f"the shipped tasks are made from documentation strings and the names of their functions, which corpus "
            f"{spec.name!r} (source {spec.source!r}) does not have; use a corpus of source 'docstrings'."
        )


def _write_task(folder: Path, name: str, source: Source) -> None:
    items = task_items(name, source)
    if not items:
        raise TaskError(
            f"the held-out packages have no text for task {name!r}; install requirements.lock, which pins them."
        )
    lines = (json.dumps(item, ensure_ascii=True) + "\n" for item in items)
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    definition = yaml.safe_dump(_definition(name, len(items)), sort_keys=False, width=120)
    (folder / f"{name}.yaml").write_text(definition, encoding="utf-8")


def _definition(name: str, items: int) -> dict:
    """lm-eval's configuration of one task. Every field is looked up by name: rendering templates would cost seconds."""
    task = SHIPPED[name]
    if name == "last_word":
        form = {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "word"}
        measures = ["acc"]
    else:
        form = {"output_type": "multiple_choice", "doc_to_text": "context", "doc_to_target": "answer"}
        form["doc_to_choice"] = "choices"
        measures = ["acc", "acc_norm"]
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
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
