"""Formats of texts and tasks: corpora in files, data of zero-shot tasks, their definitions, packs of source files."""

import io
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from reproduction.corpora import packages
from reproduction.corpora.packages import CARRIED, PACKAGES, package_files, versions
from reproduction.tasks import folders, paper
from reproduction.tasks.definitions import write_definition
from reproduction.tasks.questions import Questions
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.shipped import definition
from rotquant.text import CorpusSpec, corpus_identity, load_text
from tests.trials.fuzz.formats import Format, content_of, kinds

#: A row of each schema of the papers' tasks.
ROWS: dict[str, dict[str, Any]] = {
    "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": 0},
    "winogrande": {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"},
    "hellaswag": {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["1", "2", "3", "4"], "label": "0"},
    "arc_easy": {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
    "openbookqa": {"question_stem": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
    "lambada_openai": {"text": "two words"},
    "boolq": {"passage": "p", "question": "q", "label": 1},
    "gsm8k": {"question": "q", "answer": "so #### 42"},
    "humaneval": {"prompt": "def f():\n", "test": "def check(f):\n    pass", "entry_point": "f"},
    "qasper": {"input": "i", "context": "c", "answers": ["a"], "all_classes": None, "length": 3},
}
ROWS = {name: row for name, row in ROWS.items() if name in paper.PAPER_TASKS}
ITEM = {"context": "w3 w4", "choices": [" w5", " w6"], "answer": 0}
LINES = "".join(f"line {number} of a text\n" for number in range(40))
TEXTS = [{"text": f"row {number}", "more": number} for number in range(12)]


def formats(root: Path) -> list[Format]:
    """Of texts and tasks; a definition and a pack are made below `root`."""
    found = [
        _corpus("text.txt", LINES.encode(), "txt", 1.0),
        _corpus("text.jsonl", _lines(TEXTS), "jsonl", 0.5),
        _corpus("text.json", json.dumps(TEXTS).encode(), "json", 0.3),
        _corpus("text.parquet", _parquet(TEXTS), "parquet", 0.5),
    ]
    for name, row in ROWS.items():
        read = partial(_task, name)
        found.append(Format(f"tasks: {name}", {f"{name}.jsonl": _lines([row, row])}, kinds(f"{name}.jsonl"), read, 0.5))
    files = {"piqa.json": json.dumps([ROWS["piqa"]]).encode(), "boolq.parquet": _parquet([ROWS["boolq"]] * 2)}
    found.append(Format("tasks: lists and parquet", files, kinds(*files), _others, 0.7))
    return [*found, _definitions(root), _pack()]


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def _corpus(name: str, content: bytes, kind: str, share: float) -> Format:
    def read(folder: Path) -> None:
        spec = CorpusSpec(name="text", source="local", path=str(folder / name))
        text = load_text(spec, "test", max_characters=10_000_000)
        corpus_identity(spec, ("test",), texts={"test": text})

    kept = {"txt": "lines"}.get(kind, kind)
    return Format(f"corpora: {kind}", {name: content}, {name: kept}, read, share)


def _task(name: str, folder: Path) -> None:
    metric = ZeroShot(suite="paper", tasks=(name,), path=str(folder))
    folders.identity(metric, folders.prepare(metric))


def _others(folder: Path) -> None:
    for name in ("piqa", "boolq"):
        _task(name, folder)


def _definitions(root: Path) -> Format:
    """A task as the shipped suite has it, asked by us."""
    folder = root / "tasks"
    folder.mkdir()
    rows = {"next_word.jsonl": _lines([ITEM, ITEM]), "next_word.examples.jsonl": _lines([ITEM])}
    for name, content in rows.items():
        (folder / name).write_bytes(content)
    write_definition(folder, definition(folder, "next_word"))
    files = content_of(folder)

    def read(place: Path) -> None:
        questions = Questions(place, "next_word", 1, None)
        for item in questions.items:
            questions.judge(item, [(-1.0, True)] * len(questions.answers(item)))
        metric = ZeroShot(suite="shipped", corpus="docstrings", tasks=("next_word",))
        folders.identity(metric, place)

    return Format("tasks: definitions and items", files, kinds(*files), read, 1.5)


def _pack() -> Format:
    """A folder of `rotquant pack`."""
    files = {
        "click/core.py": b'"""Documentation of a module that is longer than a label."""\n',
        "click-8.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: click\nVersion: 8.0\n",
        "click-8.0.dist-info/RECORD": b"click/core.py,,\nclick/utils.py,,\n",
    }
    forget: list[Callable[[], None]] = [package_files.cache_clear, packages._version.cache_clear]

    def read(folder: Path) -> None:
        from reproduction.corpora.docstrings import file_docstrings

        for clear in forget:
            clear()
        os.environ[CARRIED] = str(folder)
        try:
            versions("test")
            packages.lists_of_files("test")
            for _, path in package_files(PACKAGES["test"]):
                file_docstrings(path)
        finally:
            del os.environ[CARRIED]

    changed = {"click-8.0.dist-info/RECORD": "csv", "click-8.0.dist-info/METADATA": "lines", "click/core.py": "lines"}
    return Format("packs", files, changed, read, 1.0)
