"""Section "Tasks": what the tasks ask, with examples or without, and accuracies task by task.

The shipped suite's tasks are not the paper's, so ours and the paper's stand in tables of their own.
"""

from rotquant.metrics.zeroshot.suites import TASKS, Task, task_names
from rotquant.recipes.recipe import Run
from rotquant.recipes.schemes import ZeroShot
from rotquant.reporting.words.describe import corpus_words
from rotquant.reporting.words.markdown import markdown_table
from rotquant.reporting.words.numbers import italic, show
from rotquant.study.project import Project
from rotquant.study.quantities import ROUGE_L, Quantity, quantities
from rotquant.study.results import RunResult
from rotquant.study.tables import Table
from rotquant.study.values import Values, printed_accuracies


def tasks_section(project: Project, table: Table, values: Values, results: dict[str, RunResult]) -> str:
    """How accuracy is measured, the tasks, and their accuracies by column; nothing for a table without tasks."""
    runs = [cell.runs[0] for cell in project.cells(table.id) if isinstance(cell.metric, ZeroShot)]
    if not runs:
        return ""
    firsts: dict[ZeroShot, Run] = {}
    for run in runs:
        firsts.setdefault(run.metric, run)
    facts = [part for run in firsts.values() for part in (_method(run), _facts(run.metric, results[run.key]))]
    columns = [_column(project, table, column, values, results) for column in project.columns(table)]
    return "\n".join(["## Tasks\n", *facts, *columns])


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
        f"item begins {'with' if metric.bos else 'without'} BOS; {items}{examples}.\n"
    )


def _facts(metric: ZeroShot, result: RunResult) -> str:
    """What each task asks and how it is scored."""
    rows = []
    for name in task_names(metric):
        task: Task = TASKS[metric.suite][name]
        items = result.metrics.get(f"{name}.items")
        rows.append([task.title, task.description, f"`{task.measure}`", show(task.chance, None, 1), _count(items)])
    return markdown_table(["Task", "What it asks", "Measure", "Chance", "Items"], rows, "lllrr")


def _column(project: Project, table: Table, column: str, values: Values, results: dict[str, RunResult]) -> str:
    """One column of the table, opened up by task."""
    measured = [quantity for quantity in project.quantities(table) if _is_accuracy(quantity)]
    lines = [
        [row.name, *(_ours(values, row.name, column, quantity) for quantity in measured)]
        for row in table.rows
        if (row.name, column, measured[0].name) in values
    ]
    baseline = _baseline(project, table, column, results)
    lines.append(["chance", *(show(quantity.chance, None, 1) for quantity in measured)])
    lines.append(["standard error", *(_error(baseline, quantity) for quantity in measured)])
    header = ["Method", *(quantity.title for quantity in measured)]
    parts = [f"<details><summary>{column}: accuracy by task</summary>\n", "Computed here:\n"]
    parts.append(markdown_table(header, lines, "l" + "r" * len(measured)))
    parts.append(f"The standard error is that of the {table.baseline} row, from the number of items.\n")
    if papers := _papers(table, column, values):
        parts += ["*Published*:\n", papers]
    return "\n".join([*parts, "</details>\n"])


def _papers(table: Table, column: str, values: Values) -> str:
    """The paper's accuracies in a column by its own tasks; nothing where it prints none."""
    published = {(row, name): number.mean for (row, place, name), number in values.published.items() if place == column}
    names = {name for _, name in published}
    shown = [quantity for quantity in printed_accuracies(values) if quantity.name in names]
    lines = [
        [row.name, *(italic(show(published.get((row.name, quantity.name)))) for quantity in shown)]
        for row in table.rows
        if any((row.name, quantity.name) in published for quantity in shown)
    ]
    header = ["Method", *(quantity.title for quantity in shown)]
    return markdown_table(header, lines, "l" + "r" * len(shown)) if lines else ""


def _is_accuracy(quantity: Quantity) -> bool:
    return quantity.unit == "%"


def _ours(values: Values, row: str, column: str, quantity: Quantity) -> str:
    value = values[row, column, quantity.name]
    return show(value.mean, value.deviation)


def _error(results: list[RunResult], quantity: Quantity) -> str:
    """Standard error of a task's quoted accuracy or of ROUGE-L in percent; "-" for the average."""
    result = next(result for result in results if quantity.name in result.metrics)
    assert isinstance(result.run.metric, ZeroShot)
    task = TASKS[result.run.metric.suite].get(quantity.name)
    name = f"{quantity.name}_stderr" if task is None else f"{quantity.name}.{task.measure}_stderr"
    return show(result.metrics.get(name), None, 1)


def _count(items: float | None) -> str:
    return "-" if items is None else f"{items:,.0f}"


def _baseline(project: Project, table: Table, column: str, results: dict[str, RunResult]) -> list[RunResult]:
    """Runs of a column's baseline row, one for each set of tasks."""
    return [
        results[cell.runs[0].key]
        for cell in project.cells(table.id)
        if (cell.row, cell.column) == (table.baseline, column) and isinstance(cell.metric, ZeroShot)
    ]
