"""The folder of task definitions that an evaluation reads: made once, named by its content, never changed."""

import hashlib
import importlib.metadata
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rotquant.corpora import CorpusSpec
from rotquant.errors import TaskError
from rotquant.files import canonical_json, short_hash
from rotquant.schemes import ZeroShot
from rotquant.zeroshot import paper, shipped
from rotquant.zeroshot.suites import task_names

TASKS_FOLDER = Path("results") / "tasks"


def prepare(metric: ZeroShot, root: Path, corpus: CorpusSpec | None = None) -> Path:
    """Return the folder of the metric's tasks below `root`/results/tasks, made first if it is not there.

    Args:
        root: the project's folder.
        corpus: what the shipped tasks are made from; None stands for the docstring corpus.

    Raises:
        RecipeError: unknown task.
        TaskError: the tasks cannot be made from the corpus, or a local data file is missing or of another schema.
    """
    names = task_names(metric)
    folder = Path(root) / TASKS_FOLDER
    if metric.suite == "shipped":
        shipped.check_source(corpus)
        return _made(folder / f"shipped-{shipped.fingerprint()}", lambda new: shipped.build(new, corpus))
    content: dict[str, Any] = {"lm_eval": [_lm_eval_version(), str(paper.lm_eval_tasks())], "tasks": names}
    if metric.path is None:
        return _made(
            folder / f"paper-{short_hash(canonical_json(content))}", lambda new: paper.build(new, names, None, {})
        )
    files = paper.data_files(metric.path, names)
    content["files"] = {str(file): _digest(file) for file in files.values()}

    def build(new: Path) -> None:
        paper.build(new, names, files, {name: paper.check_file(name, file) for name, file in files.items()})

    return _made(folder / f"paper-{short_hash(canonical_json(content))}", build)


def identity(metric: ZeroShot, folder: Path) -> dict[str, Any]:
    """What provenance says of the tasks: lm-eval's version, and of each task its data file's SHA-256 and item count.

    A task of the hub has neither: `{"source": "hub"}`.
    """
    tasks = {}
    for name in task_names(metric):
        definition = read_definition(folder, name)
        file = data_file(folder, definition)
        tasks[name] = (
            {"source": "hub"}
            if file is None
            else {"file": str(file), "sha256": _digest(file), "items": definition["metadata"]["items"]}
        )
    return {"suite": metric.suite, "lm_eval": _lm_eval_version(), "tasks": tasks}


def read_definition(folder: Path, name: str) -> dict[str, Any]:
    """The YAML definition of one task.

    Raises:
        TaskError: the folder does not have it.
    """
    try:
        return yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"task folder {folder} has no definition of {name!r}; prepare it again.") from None


def data_file(folder: Path, definition: dict[str, Any]) -> Path | None:
    """The absolute path of a task's local data file; None for a task that reads the hub."""
    files = definition.get("dataset_kwargs", {}).get("data_files")
    return (folder / next(iter(files.values()))).resolve() if files else None


def _made(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build `folder` unless it exists. Processes may do so at once: the first to finish wins, the others agree."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as temporary:
            new = Path(temporary) / folder.name
            build(new)
            try:
                new.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def _lm_eval_version() -> str | None:
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
