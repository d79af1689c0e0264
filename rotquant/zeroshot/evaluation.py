"""Zero-shot accuracy of a model in memory, in percent (QuaRot Table 2 and the other papers' zero-shot tables)."""

import contextlib
import io
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.errors import TaskError
from rotquant.schemes import ZeroShot
from rotquant.zeroshot.paper import lm_eval_tasks
from rotquant.zeroshot.suites import TASKS, task_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    metric: ZeroShot,
    folder: Path,
    batch_size: int = 64,
) -> dict[str, float]:
    """Run the metric's tasks on a model whose forward already contains its quantizers.

    Args:
        folder: the task definitions (`rotquant.zeroshot.prepare`).
        batch_size: items per forward pass; lowered where the logits would not fit into memory.

    Returns:
        In percent, per task: `<task>.acc` and, where the task has it, `<task>.acc_norm`, each with its standard error
        `<task>.acc_stderr`; `<task>.items`, how many items there were; `<task>`, the quoted one of the two (see
        `Task.measure`); and `average`, the mean of the quoted ones.

    Raises:
        RecipeError: unknown task.
        TaskError: lm-eval is missing, the tokenizer has no BOS to put there, or an item exceeds the model's context.
    """
    names = task_names(metric)
    lm_eval_tasks()
    if metric.bos and tokenizer.bos_token_id is None:
        raise TaskError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no BOS token, which each zero-shot item "
            "begins with; set the metric's `bos` to false."
        )
    was_training = model.training
    with _quiet():
        from lm_eval.evaluator import evaluate as run_tasks

        from rotquant.zeroshot.harness import Harness, load_tasks

        tasks = load_tasks(Path(folder).resolve(), names)
        try:
            harness = Harness(model, tokenizer, metric.bos, batch_size)
            results = run_tasks(harness, {"tasks": tasks}, limit=metric.limit, bootstrap_iters=0, log_samples=False)
        finally:
            model.train(was_training)
    return _flat(metric, names, results)


def _flat(metric: ZeroShot, names: tuple[str, ...], results: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in names:
        items = results["n-samples"][name]["effective"]
        for measure in ("acc", "acc_norm"):
            accuracy = results["results"][name].get(f"{measure},none")
            if accuracy is not None:
                # The sample deviation of zeros and ones over sqrt(n), which is what lm-eval prints.
                error = math.sqrt(accuracy * (1 - accuracy) / (items - 1)) if items > 1 else math.nan
                metrics[f"{name}.{measure}"] = 100 * accuracy
                metrics[f"{name}.{measure}_stderr"] = 100 * error
        metrics[f"{name}.items"] = items
        metrics[name] = metrics[f"{name}.{TASKS[metric.suite][name].measure}"]
    metrics["average"] = sum(metrics[name] for name in names) / len(names)
    return metrics


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's log to errors and, where nobody watches a terminal, its progress bars to itself."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    silence = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with silence:
            yield
    finally:
        logger.setLevel(level)
