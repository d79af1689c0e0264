"""The folder of task definitions that an evaluation reads: made once, named by its content, never changed."""

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rotquant import text
from rotquant.foundation import progress
from rotquant.foundation.contents import content_digest
from rotquant.foundation.files import cache_folder, canonical_json, folder_beside, short_hash
from rotquant.foundation.hub import commit_of
from rotquant.metrics.zeroshot import paper, shipped
from rotquant.metrics.zeroshot.definitions import data_files, definition_digest, hub_dataset, item_count
from rotquant.metrics.zeroshot.suites import task_names
from rotquant.recipes.corpus import Split
from rotquant.recipes.schemes import ZeroShot
from rotquant.text import CorpusSpec

TASKS_FOLDER = Path("results") / "tasks"


def prepare(
    metric: ZeroShot, root: Path | None = None, corpus: CorpusSpec | None = None, split: Split = "test"
) -> Path:
    """Return the folder of the metric's tasks, made first if it is not there.

    Args:
        root: a project's folder, whose results/tasks has it; None stands for the user's cache.
        corpus: what the shipped tasks are made from; None stands for the docstring corpus.
        split: whose modules the items of the shipped tasks are made from. Runs ask those of the test split; models are
            chosen by those of the validation split.

    Raises:
        RecipeError: unknown task.
        TaskError: the tasks cannot be made from the corpus, or a local data file is missing or of another schema.
    """
    names = task_names(metric)
    folder = cache_folder("tasks") if root is None else root / TASKS_FOLDER
    if metric.suite == "shipped":
        shipped.check_source(corpus)
        made_by = short_hash(canonical_json([shipped.fingerprint(), _source_digest()]))
        name = f"shipped-{made_by}" if split == "test" else f"shipped-{split}-{made_by}"
        return _made(folder / name, lambda new: shipped.build(new, corpus, split))
    in_template = metric.template is not None
    asked = paper.definitions(names, metric.normalization, in_template)
    content: dict[str, Any] = {
        "lm_eval": [_lm_eval_version(), str(paper.lm_eval_tasks())],
        "tasks": {definition["task"]: definition_digest(definition) for definition in asked},
    }
    if metric.path is None:
        paper.check_hub(names)
        return _made(
            folder / f"paper-{short_hash(canonical_json(content))}",
            lambda new: paper.build(new, names, None, {}, metric.normalization, in_template),
        )
    files = paper.data_files(metric.path, names, metric.shots)
    content["files"] = {str(file): content_digest(file) for splits in files.values() for file in splits.values()}

    def build(new: Path) -> None:
        rows = {
            (name, split): paper.check_file(name, file)
            for name, splits in files.items()
            for split, file in splits.items()
        }
        items = {name: count for (name, split), count in rows.items() if split != "examples"}
        paper.build(new, names, files, items, metric.normalization, in_template)

    return _made(folder / f"paper-{short_hash(canonical_json(content))}", build)


def identity(metric: ZeroShot, folder: Path) -> dict[str, Any]:
    """What provenance says of the tasks: lm-eval's version, and of each task the digest of its definition.

    Of a task with local data also the file's SHA-256 and its number of items, with shots the SHA-256 of the file of
    `examples`; of one on the hub the data set's commit.
    """
    tasks = {}
    for name in (part for task in task_names(metric) for part in paper.parts(task)):
        definition = paper.checked_definition(folder, name)
        files = data_files(folder, definition)
        examples = files.pop("examples", None)
        tasks[name] = {"definition": definition_digest(definition)}
        if not files:
            tasks[name] |= {"source": "hub", "commit": commit_of("dataset", hub_dataset(definition))}
        for file in files.values():
            known = {"file": str(file), "sha256": content_digest(file), "items": item_count(folder, definition)}
            tasks[name] |= known
        if metric.shots and examples is not None:
            tasks[name]["examples"] = content_digest(examples)
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
    """Digest of the code that makes the shipped tasks: this package's files and those that read text."""
    packages = (Path(__file__).parent, Path(text.__file__).parent)
    files = [path.read_text(encoding="utf-8") for package in packages for path in sorted(package.glob("*.py"))]
    return short_hash("\n".join(files))


def _lm_eval_version() -> str | None:
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        return None
