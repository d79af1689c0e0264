"""The folder of task definitions that an evaluation reads: made once, named by its content, never changed."""

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reproduction.corpora import Corpus
from reproduction.tasks import paper, shipped
from reproduction.tasks.definitions import check_written, definition_digest, hub_dataset, write_definition
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import task_names
from rotquant import text
from rotquant.foundation import progress
from rotquant.foundation.contents import content_digest
from rotquant.foundation.files import cache_folder, canonical_json, folder_beside, short_hash
from rotquant.foundation.hub import commit_of

TASKS_FOLDER = Path("results") / "tasks"


def prepare(metric: ZeroShot, root: Path | None = None, corpus: Corpus | None = None) -> Path:
    """Return the folder of the metric's tasks, made first if it is not there.

    Args:
        root: a project's folder, whose results/tasks has it; None stands for the user's cache.
        corpus: what the shipped tasks are made from; None stands for the docstring corpus.

    Raises:
        RecipeError: unknown task.
        TaskError: the tasks cannot be made from the corpus, or a local data file is missing or of another schema.
    """
    if metric.suite == "shipped":
        shipped.check_source(corpus)

    def build(new: Path) -> None:
        if metric.suite == "shipped":
            shipped.build(new, corpus)
            return
        new.mkdir()
        for definition in paper.definitions(metric):
            write_definition(new, definition)

    folder = cache_folder("tasks") if root is None else root / TASKS_FOLDER
    return _made(folder / folder_name(metric), build)


def folder_name(metric: ZeroShot) -> str:
    """The name of the folder of a metric's tasks, which follows from their content and the code that makes them.

    Raises:
        TaskError: a local data file is missing.
    """
    if metric.suite == "shipped":
        kind, content = "shipped", [shipped.fingerprint()]
    else:
        files = [file for splits in paper.data_files(metric).values() for file in splits.values()]
        asked = [metric.normalization, metric.template is not None, _lm_eval_version(), str(paper.lm_eval_tasks())]
        kind, content = "paper", [task_names(metric), *asked, {str(file): content_digest(file) for file in files}]
    return f"{kind}-{short_hash(canonical_json([*content, _source_digest()]))}"


def definitions(metric: ZeroShot, folder: Path) -> list[dict[str, Any]]:
    """The definitions of a metric's tasks, MMLU's by subject.

    Raises:
        TaskError: the folder does not have them as they were written into it.
    """
    of_shipped = (shipped.definition(folder, name) for name in task_names(metric))
    found = list(of_shipped if metric.suite == "shipped" else paper.definitions(metric))
    for definition in found:
        check_written(folder, definition)
    return found


def identity(metric: ZeroShot, folder: Path) -> dict[str, Any]:
    """What provenance says of the tasks: lm-eval's version, and of each task the digest of its definition.

    Of a task with local data also the file's SHA-256 and its number of items, with shots the SHA-256 of the file of
    `examples`; of one on the hub the data set's commit.
    """
    tasks = {}
    for definition in definitions(metric, folder):
        known = tasks[definition["task"]] = {"definition": definition_digest(definition)}
        if "dataset_kwargs" not in definition:
            known |= {"source": "hub", "commit": commit_of("dataset", hub_dataset(definition))}
            continue
        files = {of: (folder / file).resolve() for of, file in definition["dataset_kwargs"]["data_files"].items()}
        examples = files.pop("examples", None)
        for file in files.values():
            known |= {"file": str(file), "sha256": content_digest(file), "items": definition["metadata"]["items"]}
        if metric.shots and examples is not None:
            known["examples"] = content_digest(examples)
    return {"suite": metric.suite, "lm_eval": _lm_eval_version(), "tasks": tasks}


def _made(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build `folder` unless it exists. Processes may do so at once: the first to finish wins, the others agree."""
    if not folder.is_dir():
        with folder_beside(folder) as temporary:
            new = temporary / folder.name
            with progress.task("making the zero-shot tasks"):
                build(new)
            try:
                new.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


@functools.cache
def _source_digest() -> str:
    """Digest of the code that makes the tasks: this package's files and those that read text."""
    packages = (Path(__file__).parent, Path(text.__file__).parent)
    files = [path.read_text(encoding="utf-8") for package in packages for path in sorted(package.glob("*.py"))]
    return short_hash("\n".join(files))


def _lm_eval_version() -> str | None:
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        return None
