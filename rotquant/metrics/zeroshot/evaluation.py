"""Accuracy of a model in memory with or without examples, and ROUGE-L of its summaries, in percent.

QuaRot Table 2 and the other papers' zero-shot tables; SpinQuant Table 18, with examples (few-shot).
"""

import contextlib
import io
import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation import progress
from rotquant.metrics.zeroshot.paper import lm_eval_tasks, parts
from rotquant.metrics.zeroshot.suites import TASKS, task_names
from rotquant.recipes.schemes import ZeroShot

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Scores:
    """What tasks found.

    metrics: see `evaluate`. items: by task the score of each item by its quoted measure, in the order of its data: 0 or
        1, or for ROUGE-L between them; without the tasks on which the network's outputs are not finite.
    """

    metrics: dict[str, float]
    items: dict[str, tuple[float, ...]]


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    metric: ZeroShot,
    folder: Path,
    batch_size: int = 64,
) -> dict[str, float]:
    """Run the metric's tasks on a model whose forward already contains its quantizers.

    Args:
        folder: the task definitions (`rotquant.metrics.zeroshot.prepare`).
        batch_size: items per forward pass; lowered where the logits would not fit into memory.

    Returns:
        In percent, per task: `<task>.acc`, `<task>.acc_norm` and `<task>.rouge_l`, as far as the task has them, each
        with its standard error `<task>.acc_stderr` and so on; `<task>.items`, how many items there were; `<task>`, the
        quoted one (see `Task.measure`). Over tasks: `average`, the mean of the quoted accuracies, and `rouge_l`, the
        mean of the ROUGE-L, with `rouge_l_stderr`. All are nan for a task on which the network's outputs are not
        finite, and so are the means.

    Raises:
        RecipeError: unknown task.
        TaskError: lm-eval is missing, a task has too few examples, or an item exceeds the model's context.
    """
    return scores(model, tokenizer, metric, folder, batch_size).metrics


def scores(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    metric: ZeroShot,
    folder: Path,
    batch_size: int = 64,
) -> Scores:
    """As `evaluate`, item by item too."""
    names = task_names(metric)
    lm_eval_tasks()
    was_training = model.training
    with progress.task(f"{metric.suite} tasks"), _quiet():
        from lm_eval.evaluator import evaluate as run_tasks

        from rotquant.metrics.zeroshot.harness import Harness, load_tasks, set_shots

        tasks = load_tasks(Path(folder).resolve(), tuple(part for name in names for part in parts(name)))
        set_shots(tasks, metric.shots)
        try:
            harness = Harness(model, tokenizer, metric.bos, batch_size)
            results: Any = run_tasks(harness, {"tasks": tasks}, limit=metric.limit, bootstrap_iters=0, log_samples=True)
        finally:
            model.train(was_training)
    finite = tuple(name for name in names if not set(parts(name)) & harness.not_finite)
    items = {name: _items(results, name, TASKS[metric.suite][name].measure) for name in finite}
    return Scores(_flat(metric, names, results, harness.not_finite), items)


def _items(results: dict[str, Any], name: str, measure: str) -> tuple[float, ...]:
    return tuple(float(item[measure]) for part in parts(name) for item in results["samples"][part])


def _flat(
    metric: ZeroShot, names: tuple[str, ...], results: dict[str, Any], not_finite: Collection[str]
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    quoted: dict[str, list[str]] = {}
    for name in names:
        metrics |= _pooled(name, results, finite=not set(parts(name)) & set(not_finite))
        measure = TASKS[metric.suite][name].measure
        metrics[name] = metrics[f"{name}.{measure}"]
        quoted.setdefault("rouge_l" if measure == "rouge_l" else "average", []).append(name)
    for summary, members in quoted.items():
        metrics[summary] = sum(metrics[name] for name in members) / len(members)
    if summarized := quoted.get("rouge_l"):
        errors = (metrics[f"{name}.rouge_l_stderr"] for name in summarized)
        metrics["rouge_l_stderr"] = math.hypot(*errors) / len(summarized)
    return metrics


def _pooled(name: str, results: dict[str, Any], *, finite: bool) -> dict[str, float]:
    """The measures of a task over the items of all its parts, with their standard errors; nan unless `finite`."""
    counts = {part: results["n-samples"][part]["effective"] for part in parts(name)}
    items = sum(counts.values())

    def mean(measure: str) -> float:
        return sum(count * results["results"][part][f"{measure},none"] for part, count in counts.items()) / items

    metrics: dict[str, float] = {f"{name}.items": items}
    for measure, squared in (("acc", "acc"), ("acc_norm", "acc_norm"), ("rouge_l", "rouge_l_squared")):
        if f"{measure},none" in results["results"][next(iter(counts))]:
            value = mean(measure)
            # The sample deviation over sqrt(n), from the mean of squares, which zeros and ones are themselves.
            variance = max(0.0, mean(squared) - value**2)
            error = math.sqrt(variance / (items - 1)) if items > 1 else math.nan
            metrics[f"{name}.{measure}"] = 100 * value if finite else math.nan
            metrics[f"{name}.{measure}_stderr"] = 100 * error if finite else math.nan
    return metrics


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's log to errors, and its bars to itself: `rotquant.foundation.progress` shows what is under way."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
