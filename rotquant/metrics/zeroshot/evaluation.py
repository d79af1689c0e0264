"""Accuracy of a model in memory with or without examples, and ROUGE-L of its summaries, in percent.

QuaRot Table 2 and the other papers' zero-shot tables; SpinQuant Table 18, with examples (few-shot).
"""

import contextlib
import functools
import io
import logging
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation import progress
from rotquant.metrics.zeroshot.paper import is_shortened, lm_eval_tasks, parts, stands_in_template
from rotquant.metrics.zeroshot.suites import (
    ANSWER,
    check_allowed,
    choices_of,
    has_choices,
    log_odds_of,
    quoted,
    task_names,
)
from rotquant.recipes.schemes import ZeroShot

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rotquant.metrics.zeroshot.questions import Measures
    from rotquant.metrics.zeroshot.scoring import Scorer

#: What an item with choices says beside its score, by measure (`odds.told`).
ODDS = ("log_odds", "choice")
#: What an item is scored by.
_MEASURES = ("acc", "acc_norm", "acc_mutual_info", "exact_match", "pass_at_1", "score", "rouge_l")


@dataclass(frozen=True)
class Scores:
    """What tasks found.

    metrics: see `evaluate`. items: by task the score of each item by its quoted measure, in the order of its data: 0 or
        1, or for ROUGE-L between them; of a task with choices also `<task>_log_odds`, of the right choice by that
        measure, and `<task>_choices`, which one was taken. Without the tasks on which the network's outputs are not
        finite.
    """

    metrics: dict[str, float]
    items: dict[str, tuple[float, ...]]


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    metric: ZeroShot,
    folder: Path,
    batch_size: int = 64,
    allow_code_execution: bool = False,
) -> dict[str, float]:
    """Run the metric's tasks on a model whose forward already contains its quantizers.

    Args:
        folder: the task definitions (`rotquant.metrics.zeroshot.prepare`).
        batch_size: items of 32 tokens per forward pass; lowered where the logits would not fit into memory.
        allow_code_execution: whether programs that the model writes may be run (`sandbox`).

    Returns:
        In percent, per task: `<task>.acc`, `<task>.acc_norm`, `<task>.acc_mutual_info`, `<task>.exact_match`,
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
    return scores(model, tokenizer, metric, folder, batch_size, allow_code_execution).metrics


def scores(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    metric: ZeroShot,
    folder: Path,
    batch_size: int = 64,
    allow_code_execution: bool = False,
) -> Scores:
    """As `evaluate`, item by item too."""
    names = task_names(metric)
    check_allowed(metric, allow_code_execution)
    ask = _by_lm_eval if metric.suite == "paper" else _directly
    if metric.suite == "paper":
        lm_eval_tasks()
    was_training = model.training
    with progress.task(f"{metric.suite} tasks"):
        from rotquant.metrics.zeroshot.scoring import Scorer

        try:
            found = ask(Scorer(model.eval(), tokenizer, metric.bos, batch_size), metric, names, folder)
        finally:
            model.train(was_training)
    metrics: dict[str, float] = {}
    for name in names:
        metrics |= _summary(name, found[name])
    values = {name: [item[quoted(metric, name).measure] for item in found[name]] for name in names}
    items = {name: tuple(scores) for name, scores in values.items() if all(map(math.isfinite, scores))}
    more, of_choices = _of_choices(metric, names, found)
    return Scores(metrics | _over_tasks(metric, names, metrics) | more, items | of_choices)


def _directly(scorer: "Scorer", metric: ZeroShot, names: tuple[str, ...], folder: Path) -> "dict[str, list[Measures]]":
    from rotquant.metrics.zeroshot.questions import Questions, ask

    return ask(scorer, [Questions(folder, name, metric.shots, metric.limit) for name in names])


def _by_lm_eval(
    scorer: "Scorer", metric: ZeroShot, names: tuple[str, ...], folder: Path
) -> "dict[str, list[Measures]]":
    """The items of a task are those of all its parts, in order."""
    with _quiet():
        from lm_eval.evaluator import evaluate as run_tasks

        from rotquant.metrics.zeroshot.harness import Harness, choices_told, load_tasks, set_shots

        tasks = load_tasks(Path(folder).resolve(), tuple(part for name in names for part in parts(name)))
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
            told = choices_told(tasks[part], item, bool(alone)) if finite else {}
            yield {name: float(item[name]) if finite else math.nan for name in _MEASURES if name in item} | told

    return {name: [item for part in parts(name) for item in measured(part)] for name in names}


def _prompt(scorer: "Scorer", metric: ZeroShot, task: str, asked: str) -> str:
    """What a model reads before it writes an answer: what a task asks, shortened and in the metric's template."""
    if metric.longest_prompt is not None and is_shortened(task):
        asked = scorer.shortened(asked, metric.longest_prompt)
    if metric.template is not None and stands_in_template(task):
        return metric.template.replace("{question}", asked)
    return asked


def _summary(name: str, items: "list[Measures]") -> dict[str, float]:
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


def _over_tasks(metric: ZeroShot, names: tuple[str, ...], metrics: dict[str, float]) -> dict[str, float]:
    """What each task quotes, and the means of that."""
    found: dict[str, float] = {}
    summaries: dict[str, list[str]] = {}
    for name in names:
        measure = quoted(metric, name).measure
        found[name] = metrics[f"{name}.{measure}"]
        summaries.setdefault("rouge_l" if measure == "rouge_l" else "average", []).append(name)
    for summary, members in summaries.items():
        found[summary] = statistics.fmean(found[name] for name in members)
    if summarized := summaries.get("rouge_l"):
        errors = (metrics[f"{name}.rouge_l_stderr"] for name in summarized)
        found["rouge_l_stderr"] = math.hypot(*errors) / len(summarized)
    return found


def _of_choices(
    metric: ZeroShot, names: tuple[str, ...], found: "dict[str, list[Measures]]"
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Means of the log-odds of tasks with choices, and these and the choices item by item; nan, and no items, of a task
    on which the network is not finite."""
    means: dict[str, float] = {}
    medians: list[float] = []
    items: dict[str, tuple[float, ...]] = {}
    for name in (name for name in names if has_choices(metric, name)):
        measure = quoted(metric, name).measure
        odds, choices = ([item.get(f"{measure}.{what}", math.nan) for item in found[name]] for what in ODDS)
        whole = all(map(math.isfinite, odds))
        means[log_odds_of(name)] = statistics.fmean(odds) if whole else math.nan
        medians.append(statistics.median(odds) if whole else math.nan)
        if whole:
            items |= {log_odds_of(name): tuple(odds), choices_of(name): tuple(choices)}
    if means:
        means |= {"log_odds": statistics.fmean(means.values()), "log_odds_median": statistics.fmean(medians)}
    return means, items


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
