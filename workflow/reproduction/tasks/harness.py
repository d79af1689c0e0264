"""lm-eval around a model in memory. Importing this module imports lm-eval, which takes seconds."""

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from reproduction.tasks.folders import definitions
from reproduction.tasks.odds import item_scores
from reproduction.tasks.scoring import Scorer
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import TaskError
from rotquant.foundation.hub import keep_to_files

#: lm-eval's own default, by which it draws examples for tasks that do not take the first ones.
_EXAMPLES_SEED = 1234


def load_tasks(folder: Path, metric: ZeroShot) -> dict[str, Task]:
    """lm-eval's task objects of a metric in `folder`; loaded once per process, since a folder never changes.

    Raises:
        TaskError: a definition is missing or changed, or the hub's data cannot be read.
    """
    return _loaded(folder, cast(Any, metric))  # which can be hashed, though type checkers do not see it


@functools.lru_cache(maxsize=8)
def _loaded(folder: Path, metric: ZeroShot) -> dict[str, Task]:
    keep_to_files()
    manager = TaskManager(include_defaults=False)
    state = random.getstate()  # loading draws from the global generator, which others may be using
    try:
        return {one["task"]: _load_task(manager, folder, one) for one in definitions(metric, folder)}
    finally:
        random.setstate(state)


def _load_task(manager: TaskManager, folder: Path, definition: dict[str, Any]) -> Task:
    name = definition["task"]
    asked: dict[str, Any] | str = definition
    if "include" in definition:
        asked = str(folder / f"{name}.yaml")  # only lm-eval's own reader follows an include
    elif "dataset_kwargs" in definition:
        files = definition["dataset_kwargs"]["data_files"]
        asked = definition | {"dataset_kwargs": {"data_files": {of: str(folder / file) for of, file in files.items()}}}
    try:
        return manager.load([asked])["tasks"][name]
    except Exception as error:  # The hub client has many failure types, some from libraries below it.
        reason = str(error).strip().split("\n")[0][:200]
        raise TaskError(
            f"the data of zero-shot task {name!r} could not be read ({type(error).__name__}: {reason}); without "
            "access to the hub, name a local folder with a data file per task."
        ) from error


def set_shots(tasks: dict[str, Task], shots: int) -> None:
    """Make every prompt begin with `shots` examples, the same ones in each evaluation.

    Raises:
        TaskError: a task has fewer.
    """
    for name, task in tasks.items():
        if shots and (available := len(cast(ConfigurableTask, task).sampler.df)) < shots:
            raise TaskError(f"zero-shot task {name!r} has {available} examples, fewer than {shots} shots.")
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(_EXAMPLES_SEED)


def choice_scores(task: Task, item: dict[str, Any], alone: bool) -> dict[str, float]:
    """Log-odds and choice of an item, by each measure that takes the likeliest of several choices (`odds.item_scores`).

    Args:
        item: lm-eval's sample. alone: whether a choice also counts against its likelihood without the question.

    Returns:
        Nothing for other tasks, and where more than one choice, or none, is right.
    """
    asked = cast(Any, task)
    if asked.OUTPUT_TYPE != "multiple_choice":
        return {}
    choices, doc = asked.doc_to_choice(item["doc"]), item["doc"]
    gold = asked.doc_to_text(doc) if asked.multiple_input else asked.doc_to_target(doc)
    right = choices.index(gold) if isinstance(gold, str) and gold in choices else gold
    if not isinstance(right, int) or not 0 <= right < len(choices):
        return {}
    likelihoods = [float(one[0]) for one in item["filtered_resps"]]
    scores, without = likelihoods[: len(choices)], likelihoods[len(choices) :]
    by_measure = {"acc": scores, "acc_norm": [one / len(choice) for one, choice in zip(scores, choices, strict=True)]}
    if alone and len(without) == len(choices):
        by_measure["acc_mutual_info"] = [one - other for one, other in zip(scores, without, strict=True)]
    found = (item_scores(measure, by, right) for measure, by in by_measure.items())
    return {name: value for one in found for name, value in one.items() if "." in name}


#: lm-eval registers its class by a decorator, after which type checkers take it for the interface that it implements.
_Model: Any = LM


class Harness(_Model):
    """A `Scorer` as lm-eval asks one.

    alone: what stands before a choice whose likelihood is asked without the question.
    prompt: what is read, by the name of a task and what it asks, where an answer is written.
    not_finite: names of the tasks on which the network's outputs were not: the first of several choices would be the
        likeliest, and accuracy that of a guess.
    """

    def __init__(
        self, scorer: Scorer, alone: str = "", prompt: Callable[[str, str], str] = lambda _, text: text
    ) -> None:
        super().__init__()
        self.scorer, self.alone, self.prompt = scorer, alone, prompt
        self.not_finite: set[str] = set()

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """As `Scorer.log_likelihoods`."""
        names = [str(request.task_name) for request in requests]
        pairs = [(context or self.alone, rest) for context, rest in (request.arguments for request in requests)]
        scores = self.scorer.log_likelihoods(pairs, names)
        self.not_finite |= {name for name, (score, _) in zip(names, scores, strict=True) if not math.isfinite(score)}
        return scores

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """As `Scorer.generate`."""
        names = [str(request.task_name) for request in requests]
        asked, options = zip(*(request.arguments for request in requests), strict=True)
        prompts = [self.prompt(name, text) for name, text in zip(names, asked, strict=True)]
        settings = [(tuple(option["until"]), option["max_gen_toks"]) for option in options]
        found = self.scorer.generate(prompts, settings, names)
        self.not_finite |= {name for name, (_, finite) in zip(names, found, strict=True) if not finite}
        return [text for text, _ in found]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not asked by any task here."""
        raise NotImplementedError
