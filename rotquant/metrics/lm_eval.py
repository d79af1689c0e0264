"""Tasks of lm-eval on a model in memory: its names, prompts, rules and numbers, by its own class for transformers.

Importing this module imports neither torch nor lm-eval, which take seconds.
"""

import contextlib
import copy
import fnmatch
import functools
import importlib.util
import io
import logging
import math
import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rotquant.foundation.errors import RecipeError, RotquantError, TaskError, nearest
from rotquant.foundation.files import json_text
from rotquant.foundation.hub import keep_to_files
from rotquant.foundation.progress import task
from rotquant.text import adds_bos

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: lm-eval's seed of examples and of the generators of numpy and torch.
_SEED = 1234
#: File types of a task's own data, and the builder of the `datasets` library that reads each.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
#: Where a definition may name tasks, groups and tags: after such a key, or in a list.
_NAMING = re.compile(r"""^\s*(?:-\s+)?(?:["']?(?:task|group|tag)["']?\s*:|-)(.*)$""", re.MULTILINE)


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    include_path: Path | None = None,
    task_data: Path | None = None,
    batch_size: int = 8,
    bos: bool | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate` finds of a model whose forward already contains its transforms and quantizers.

    It seeds the generators of Python, numpy and torch, as lm-eval does.

    Args:
        tasks: names of lm-eval's tasks, groups or tags, or patterns of them.
        num_fewshot: examples before each item; None leaves it to the task.
        limit: items of each task, a number or below 1 a share.
        include_path: a folder of task definitions in YAML, in which relative names of data files are looked up. Python
            functions that these name are run.
        task_data: a folder with files `<task>.jsonl`, `.json` or `.parquet` of the rows that a task evaluates, in place
            of its data set; examples stand in `<task>.examples.jsonl`.
        batch_size: of items. One at a time where texts that are filled up would change inputs' scales.
        bos: whether texts begin with BOS; None leaves it to the tokenizer.
        max_length: tokens that the model reads at most; None leaves it to the configuration.

    Returns:
        What lm-eval returns, without the items. Numbers are nan where the network's outputs are not finite.

    Raises:
        RecipeError: no such task.
        TaskError: data that cannot be read, examples that are not there, or a task that runs what a model writes or a
            program of the hub's.
    """
    _check_folders(include_path, task_data)
    with task("lm-eval tasks"), quiet(), _no_hub_code(), _loaded(tasks, include_path, task_data, num_fewshot) as loaded:
        from lm_eval.evaluator import evaluate as run_tasks

        device = _device_class()(model, copy.deepcopy(tokenizer), batch_size, bos, max_length)
        _seed()
        found: Any = run_tasks(device, loaded, limit=cast(Any, limit), log_samples=False)
    return found if device.finite else {**found, "results": _without_numbers(found["results"])}


def check_tasks(
    tasks: Sequence[str],
    include_path: Path | None = None,
    task_data: Path | None = None,
    num_fewshot: int | None = None,
) -> None:
    """Refuse, before a model is loaded, what `evaluate` would: a task that is not known, or folders that are not there;
    where the hub is not asked, data that are not here, too.

    Raises:
        RecipeError, TaskError: see `evaluate`.
    """
    from huggingface_hub import constants

    _check_folders(include_path, task_data)
    if include_path is None:
        names = written_names()
        for name in tasks:
            if not fnmatch.filter(names, name):
                raise _unknown(name, names)
    with task("reading lm-eval's tasks"), quiet(), _no_hub_code():
        if constants.HF_HUB_OFFLINE:
            with _loaded(tasks, include_path, task_data, num_fewshot):
                return
        _known(_manager([] if include_path is None else [include_path.resolve()], tasks), tasks)


def written_names() -> list[str]:
    """Names in lm-eval's definitions, all of its tasks among them: to read these as YAML takes some twenty times as
    long."""
    package = importlib.util.find_spec("lm_eval")  # without its import
    (place,) = (package and package.submodule_search_locations) or ("",)
    found: set[str] = set()
    for file in Path(place, "tasks").rglob("*"):
        if file.suffix in ("", ".yaml") and file.is_file():
            for words in _NAMING.findall(file.read_text(encoding="utf-8", errors="replace")):
                found.update(re.findall(r"[^\s,\[\]'\"#]+", words))
    return sorted(found)


def _unknown(name: str, known: Sequence[str]) -> RecipeError:
    return RecipeError(f"lm-eval has no task {name!r}{nearest(name, [*known])}.")


def _check_folders(*folders: Path | None) -> None:
    for folder in folders:
        if folder is not None and not folder.is_dir():
            raise TaskError(f"there is no folder {folder} with definitions or data of tasks.")


@contextlib.contextmanager
def _loaded(
    tasks: Sequence[str], include_path: Path | None, task_data: Path | None, num_fewshot: int | None
) -> Iterator[Any]:
    """Tasks with their data as lm-eval takes them; what it does not take, here or while it asks, is one sentence."""
    with tempfile.TemporaryDirectory() as local:
        keep_to_files()
        if task_data is not None:
            _write_local(task_data, Path(local), num_fewshot)
        manager = _manager([path.resolve() for path in (include_path, Path(local)) if path is not None], tasks)
        names = _known(manager, tasks)
        try:
            with contextlib.chdir(include_path or "."):
                loaded = manager.load(names)
            _set_shots(loaded["tasks"], num_fewshot)
            yield loaded
        except Exception as error:  # data sets and definitions fail in many ways, in lm-eval and libraries below
            raise error if isinstance(error, RotquantError) else _refused(error, names) from error


@functools.cache
def _built_in() -> "TaskManager":
    """lm-eval's own tasks, whose definitions take some ten seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _manager(folders: list[str | Path], tasks: Iterable[str]) -> "TaskManager":
    """The tasks in some folders, with lm-eval's own where these are asked for too."""
    from lm_eval.tasks import TaskManager

    alone = TaskManager(include_path=folders, include_defaults=False)
    if all(alone.match_tasks([name]) for name in tasks):
        return alone
    return TaskManager(include_path=folders) if alone.all_tasks else _built_in()


def _set_shots(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Set the number of examples as `lm_eval.simple_evaluate` does: a task that is defined with none keeps none."""
    for one in tasks.values():
        if num_fewshot is not None and one.get_config("num_fewshot") != 0:
            one.set_config(key="num_fewshot", value=num_fewshot)
        elif one.get_config("num_fewshot") is None:
            one.set_config(key="num_fewshot", value=0)
        one.set_fewshot_seed(seed=_SEED)


def _seed() -> None:
    """Seed all generators as `lm_eval.simple_evaluate` does."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _device_class() -> Any:
    """lm-eval's class for transformers' models, which also says whether all outputs were finite."""
    import torch
    from lm_eval.models.huggingface import HFLM

    base: Any = HFLM  # registered by a decorator, after which type checkers do not know it

    class InMemory(base):
        def __init__(self, model: Any, tokenizer: Any, batch_size: int, bos: bool | None, most: int | None) -> None:
            options: Any = {"add_bos_token": bos, "max_length": most}
            tokenizer = _with_bos(tokenizer) if bos else tokenizer
            super().__init__(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size, **options)
            self.finite = True

        def _model_call(self, inps: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            logits = super()._model_call(inps, *others, **named)
            self.finite = self.finite and bool(logits.isfinite().all())
            return logits

        def _model_generate(self, context: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            self._model_call(context[:1])  # of the longest text, which nothing fills up
            return super()._model_generate(context, *others, **named)

    return InMemory


def _with_bos(tokenizer: Any) -> Any:
    """A tokenizer that puts BOS in front of a text, where there is one: lm-eval leaves that to the tokenizer."""
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    if bos is not None and not adds_bos(tokenizer):
        tokens = [(bos, tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=tokens)
    return tokenizer


def _known(manager: "TaskManager", tasks: Iterable[str]) -> list[str]:
    """The names that patterns stand for."""
    found: list[str] = []
    for name in tasks:
        matching = manager.match_tasks([name])
        if not matching:
            raise _unknown(name, manager.all_tasks)
        found += matching
    if len({*found}) < len(found):
        raise RecipeError(f"tasks are named twice: {', '.join(found)}.")
    return found


def _write_local(data: Path, folder: Path, num_fewshot: int | None) -> None:
    """Write a definition for each task that has a file of data: the task's own, with these rows."""
    for file in sorted(data.resolve().iterdir()):
        entry = _built_in().task_index.get(file.stem)
        if file.suffix not in _BUILDERS or entry is None or entry.yaml_path is None:
            continue
        examples = file.with_suffix(f".examples{file.suffix}")
        if num_fewshot and not examples.is_file():
            raise TaskError(f"task {file.stem!r} has no examples for {num_fewshot} shots: expected {examples}.")
        files = {"items": str(file)} | ({"examples": str(examples)} if examples.is_file() else {})
        definition = {
            "include": str(entry.yaml_path),
            "task": file.stem,
            "dataset_path": _BUILDERS[file.suffix],
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
            "training_split": None,
            "validation_split": None,
            "test_split": "items",
            "fewshot_split": "examples" if "examples" in files else None,
            **({} if "examples" in files else {"num_fewshot": 0}),
        }
        (folder / f"{file.stem}.yaml").write_text(json_text(definition), encoding="utf-8")  # JSON is YAML


def _refused(error: Exception, names: list[str]) -> TaskError:
    """One sentence about what lm-eval or the `datasets` library below it did not take."""
    reason = " ".join(str(error).split())
    if "marked as unsafe" in reason:
        name = re.search(r"run task: (\S+)", reason)
        return TaskError(
            f"task {name[1] if name else names} runs programs that the model writes, which is not done here."
        )
    return TaskError(
        f"lm-eval could not ask {', '.join(names)} ({type(error).__name__}: {reason[:200]}); without access to the "
        "hub, name a folder with a data file for each task (--task-data)."
    )


def _without_numbers(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: math.nan if isinstance(value, int | float) else value for key, value in found.items()}
        for name, found in results.items()
    }


@contextlib.contextmanager
def _no_hub_code() -> Iterator[None]:
    """Refuse measures that the library `evaluate` would fetch from the hub as programs."""
    import evaluate as library

    def refuse(name: str, *_: Any, **__: Any) -> None:
        raise TaskError(f"the measure {name!r} is a program on the hub, which is not run here: leave its task out.")

    load, library.load = library.load, refuse
    try:
        yield
    finally:
        library.load = load


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's log to errors, its bars and words to itself: `rotquant.foundation.progress` shows what goes on."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
