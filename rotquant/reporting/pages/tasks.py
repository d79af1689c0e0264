"""How accuracy is measured: what the tasks ask, with examples or without, and which score is quoted.

The shipped suite's tasks are not the paper's, so ours and the paper's stand in tables of their own.
"""

from collections.abc import Iterator, Mapping

from rotquant.metrics.zeroshot.suites import TASKS, Task, task_names
from rotquant.recipes.recipe import Run
from rotquant.recipes.schemes import ZeroShot
from rotquant.reporting.pages.model import Block, Folded, Listing, Tasks
from rotquant.reporting.words.describe import corpus_words
from rotquant.reporting.words.numbers import show
from rotquant.study.project import Project
from rotquant.study.quantities import ROUGE_L, quantities
from rotquant.study.results import RunResult
from rotquant.study.tables import Table


def zero_shot_runs(project: Project, table: Table) -> list[Run]:
    """The first run of each way in which the table measures accuracy; nothing for a table without tasks."""
    found: dict[ZeroShot, Run] = {}
    for run in (cell.runs[0] for cell in project.cells(table.id)):
        if isinstance(run.metric, ZeroShot):
            found.setdefault(run.metric, run)
    return list(found.values())


def task_blocks(
    table: Table, runs: list[Run], results: Mapping[str, RunResult], columns: tuple[Tasks, ...]
) -> Iterator[Block]:
    """How accuracy is measured, the tasks, and their accuracies by column."""
    for run in runs:
        yield _method(run)
        yield _asked(run, results.get(run.key))
    note = f"The standard error is that of the {table.baseline} row, from the number of items."
    for tasks in columns:
        papers = ["*Published*:", tasks.published] if tasks.published.lines else []
        yield Folded(f"{tasks.column}: accuracy by task", ["Computed here:", tasks.ours, note, *papers])


def _method(run: Run) -> str:
    """What is measured, what is quoted and why."""
    metric = run.metric
    assert isinstance(metric, ZeroShot)
    shots = "Zero-shot" if metric.shots == 0 else f"{metric.shots}-shot"
    examples = "" if metric.shots == 0 else "; the same solved examples stand before each item"
    place = f"read from `{metric.path}`" if metric.path else "from the hub"
    text = f"the held-out part of the corpus {corpus_words(run)}"
    origin = {
        "paper": f"the paper's tasks, {place}",
        "shipped": f"the project's own tasks, made from {text} for models too small for the paper's; only the "
        "averages stand beside the paper's",
    }
    items = f"the first {metric.limit} items of each task" if metric.limit else "all items"
    rule = {
        "paper": "As in the paper, a task shows `acc_norm` where lm-eval's task has it and `acc` elsewhere",
        "shipped": "A task shows `acc` where its choices are words and `acc_norm` where they are phrases of different "
        "length, as the paper's tasks do",
    }
    if ROUGE_L in quantities(metric):
        what, scored = "ROUGE-L", "Summaries are generated greedily and scored by the F-measure of ROUGE-L"
    else:
        what = "accuracy"
        scored = (
            f"{rule[metric.suite]}: `acc` takes the likeliest choice, `acc_norm` the likeliest per byte of text; run "
            "files hold both"
        )
    return (
        f"{shots} {what} in percent through lm-eval, suite `{metric.suite}`: {origin[metric.suite]}. {scored}. Every "
        f"item begins {'with' if metric.bos else 'without'} BOS; {items}{examples}."
    )


def _asked(run: Run, result: RunResult | None) -> Listing:
    """What each task asks and how it is scored."""
    assert isinstance(run.metric, ZeroShot)
    lines = []
    for name in task_names(run.metric):
        task: Task = TASKS[run.metric.suite][name]
        items = None if result is None else result.metrics.get(f"{name}.items")
        count = "-" if items is None else f"{items:,.0f}"
        lines.append([task.title, task.description, f"`{task.measure}`", show(task.chance, None, 1), count])
    return Listing(["Task", "What it asks", "Measure", "Chance", "Items"], lines, "lllrr")
