"""Accuracy of a model in memory with or without examples, and ROUGE-L of its summaries, in percent.

QuaRot Table 2 and the other papers' zero-shot tables; SpinQuant Table 18, with examples (few-shot).
"""

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from reproduction.tasks.paper import is_shortened, lm_eval_tasks, parts, stands_in_template
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import (
    ANSWER,
    Measure,
    check_allowed,
    choices_of,
    has_choices,
    log_odds_of,
    quoted,
    task_names,
)
from rotquant.foundation import progress
from rotquant.metrics.lm_eval import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from reproduction.tasks.questions import Measures
    from reproduction.tasks.scoring import Scorer


@dataclass(frozen=True)
class Scores:
    """What tasks found.

    metrics: see `scores`. items: by task the score of each item by its quoted measure, in the order of its data: 0 or
        1, or for ROUGE-L between them; of a task with choices also `<task>_log_odds`, of the right choice by that
        measure, and `<task>_choices`, which one was taken. Without the tasks on which the network's outputs are not
        finite.
    """

    metrics: dict[str, float]
    items: dict[str, tuple[float, ...]]


def scores(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    metric: ZeroShot,
    folder: Path,
    batch_size: int = 64,
    allow_code_execution: bool = False,
) -> Scores:
    """Run the metric's tasks on a model whose forward already contains its quantizers.

    Args:
        folder: the task definitions (`reproduction.tasks.prepare`).
        batch_size: items of 32 tokens per forward pass; lowered where the logits would not fit into memory.
        allow_code_execution: whether programs that the model writes may be run (`sandbox`).

    Returns:
        Items too; metrics in percent, per task: `<task>.acc`, `<task>.acc_norm`, `<task>.acc_mutual_info`,
        `<task>.exact_match`,
        `<task>.pass_at_1`, `<task>.score` and `<task>.rouge_l`, as far as the task has them, each with its standard
        error `<task>.acc_stderr` and so on; for a task with choices `<task>_log_odds`, the mean log-odds of the right
        one in nats by the quoted measure;
        `<task>.items`, how many items there were; `<task>`, the quoted one (see `Task.measure`). Over tasks: `average`,
        the mean of the quoted accuracies, `log_odds` and `log_odds_median`, the means of tasks' mean and median
        log-odds, and `rouge_l`, the mean of the ROUGE-L, with `rouge_l_stderr`. All are nan
        for a task on which the network's outputs are not finite, and so are the means.

    Raises:
        RecipeError: unknown task.
        TaskError: lm-eval, which the paper suite needs, is missing; a task has too few examples, or runs programs where
            none may be run; or an item exceeds the model's context.
    """
    names = task_names(metric)
    check_allowed(metric, allow_code_execution)
    if metric.suite == "paper":
        lm_eval_tasks()
    was_training = model.training
    with progress.task(f"{metric.suite} tasks"):
        from reproduction.tasks.questions import Questions, ask
        from reproduction.tasks.scoring import Scorer

        try:
            scorer = Scorer(model.eval(), tokenizer, metric.bos, batch_size)
            if metric.suite == "paper":
                found = _by_lm_eval(scorer, metric, folder)
            else:
                found = ask(scorer, [Questions(folder, name, metric.shots, metric.limit) for name in names])
        finally:
            model.train(was_training)
    return _summarized(metric, found)


def _by_lm_eval(scorer: "Scorer", metric: ZeroShot, folder: Path) -> "dict[str, list[Measures]]":
    """What each item scores by task; the items of a task are those of all its parts, in order."""
    with quiet():
        from lm_eval.evaluator import evaluate as run_tasks

        from reproduction.tasks.harness import Harness, choice_scores, load_tasks, set_shots

        tasks = load_tasks(Path(folder).resolve(), metric)
        set_shots(tasks, metric.shots)
        alone = ANSWER if metric.normalization == "unconditional" else ""
        harness = Harness(scorer, alone, functools.partial(_prompt, scorer, metric))
        results: Any = run_tasks(
            harness,
            {"tasks": tasks},
            limit=metric.limit,
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=True,  # `scores` has asked whether it is allowed
        )

    def measured(part: str) -> "Iterator[Measures]":
        finite = part not in harness.not_finite
        for item in results["samples"][part]:
            scored = choice_scores(tasks[part], item, bool(alone)) if finite else {}
            yield {
                name: float(item[name]) if finite else math.nan for name in get_args(Measure) if name in item
            } | scored

    return {name: [item for part in parts(name) for item in measured(part)] for name in task_names(metric)}


def _prompt(scorer: "Scorer", metric: ZeroShot, task: str, asked: str) -> str:
    """What a model reads before it writes an answer: what a task asks, shortened and in the metric's template."""
    if metric.longest_prompt is not None and is_shortened(task):
        asked = scorer.shortened(asked, metric.longest_prompt)
    if metric.template is not None and stands_in_template(task):
        return metric.template.replace("{question}", asked)
    return asked


def _summarized(metric: ZeroShot, found: "dict[str, list[Measures]]") -> Scores:
    """Means over items and tasks, and the items of the quoted measures."""
    metrics: dict[str, float] = {}
    items: dict[str, tuple[float, ...]] = {}
    means: dict[str, float] = {}
    medians: list[float] = []
    summaries: dict[str, list[str]] = {}
    for name, scored in found.items():
        measure = quoted(metric, name).measure
        metrics |= _of_task(name, scored)
        metrics[name] = metrics[f"{name}.{measure}"]
        summaries.setdefault("rouge_l" if measure == "rouge_l" else "average", []).append(name)
        values = tuple(item[measure] for item in scored)
        if all(map(math.isfinite, values)):
            items[name] = values
        if has_choices(metric, name):
            odds, choices = (
                tuple(item.get(f"{measure}.{what}", math.nan) for item in scored) for what in ("log_odds", "choice")
            )
            finite = all(map(math.isfinite, odds))
            means[log_odds_of(name)] = statistics.fmean(odds) if finite else math.nan
            medians.append(statistics.median(odds) if finite else math.nan)
            if finite:
                items |= {log_odds_of(name): odds, choices_of(name): choices}
    for summary, names in summaries.items():
        metrics[summary] = statistics.fmean(metrics[name] for name in names)
    if names := summaries.get("rouge_l"):
        metrics["rouge_l_stderr"] = math.hypot(*(metrics[f"{name}.rouge_l_stderr"] for name in names)) / len(names)
    if means:
        metrics |= means
        metrics |= {"log_odds": statistics.fmean(means.values()), "log_odds_median": statistics.fmean(medians)}
    return Scores(metrics, items)


def _of_task(name: str, items: "list[Measures]") -> dict[str, float]:
    """The measures of a task over its items, in percent, with their standard errors."""
    metrics: dict[str, float] = {f"{name}.items": len(items)}
    for measure in (measure for measure in items[0] if "." not in measure):
        values = [100 * item[measure] for item in items]
        mean = statistics.fmean(values)
        metrics[f"{name}.{measure}"] = mean
        squares = math.fsum((value - mean) ** 2 for value in values)
        many = len(values) > 1
        metrics[f"{name}.{measure}_stderr"] = math.sqrt(squares / (len(values) - 1) / len(values)) if many else math.nan
    return metrics
