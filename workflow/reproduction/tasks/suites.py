"""The zero-shot tasks as data: what each is called, which accuracy is quoted, and what guessing would score.

Nothing here imports torch or lm-eval, so workflow and reports can ask for names and chance levels at no cost.
"""

from dataclasses import dataclass, replace
from typing import Literal

from reproduction.tasks import sandbox
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import RecipeError, TaskError, nearest

Measure = Literal["acc", "acc_norm", "acc_mutual_info", "exact_match", "pass_at_1", "score", "rouge_l"]
"""What an item is scored by."""


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    title: the name that tables print.
    measure: what is quoted. Of accuracies, `acc` takes the choice with the highest log-likelihood, `acc_norm` the one
        with the highest log-likelihood per character; QuaRot quotes `acc_norm` where lm-eval's task has it.
        `acc_mutual_info` takes the one whose likelihood the question raises most (`quoted`).
        `exact_match` asks for a generated text to be the true one, `pass_at_1` for a generated program to pass tests;
        `score` is LongBench's of a task (`longbench`), `rouge_l` scores a generated summary (`rouge`).
    chance: accuracy of guessing, in percent; 0 where any word could be the answer, None for what is no accuracy.
    """

    title: str
    measure: Measure
    chance: float | None
    description: str


PAPER = {
    "piqa": Task("PIQA", "acc_norm", 50.0, "Which of two solutions reaches an everyday goal."),
    "winogrande": Task("WinoGrande", "acc", 50.0, "Which of two nouns a blank stands for."),
    "hellaswag": Task("HellaSwag", "acc_norm", 25.0, "Which of four endings continues the description of an event."),
    "arc_easy": Task("ARC-e", "acc_norm", 25.0, "Science questions with (mostly) four answers, the easy part."),
    "arc_challenge": Task("ARC-c", "acc_norm", 25.0, "Science questions with (mostly) four answers, the hard part."),
    "lambada_openai": Task("LAMBADA", "acc", 0.0, "The last word of a passage, exactly."),
    "boolq": Task("BoolQ", "acc", 50.0, "Yes or no to a question about a passage."),
    "social_iqa": Task("SIQA", "acc", 100 / 3, "Which of three answers fits a social situation."),
    "openbookqa": Task("OBQA", "acc_norm", 25.0, "Elementary science questions with four answers."),
    "mmlu": Task("MMLU", "acc", 25.0, "Exam questions with four answers on 57 subjects, all questions pooled."),
    "tldr": Task("TLDR9+", "rouge_l", None, "The summary that the author of a forum post wrote for it."),
    "humaneval": Task("HumanEval", "pass_at_1", 0.0, "Programs from their documentation, run on tests (RCP Table 3)."),
    "gsm8k": Task("GSM8K", "exact_match", 0.0, "The number that grade-school mathematics ends with (RCP Table 3)."),
    "hotpotqa": Task("HotpotQA", "score", 0.0, "LongBench: a question about several passages; F1 of words."),
    "multifieldqa_en": Task("MultiFieldQA-en", "score", 0.0, "LongBench: a question about a long text; F1 of words."),
    "triviaqa": Task("TriviaQA", "score", 0.0, "LongBench: a question after many solved examples; F1 of words."),
    "2wikimqa": Task("2WikiMQA", "score", 0.0, "LongBench: a question about several passages; F1 of words."),
    "musique": Task("MuSiQue", "score", 0.0, "LongBench: a question about several passages; F1 of words."),
    "samsum": Task("SAMSum", "score", 0.0, "LongBench: a dialogue's summary after many examples; ROUGE-L."),
    "passage_count": Task("PassageCount", "score", 0.0, "LongBench: how many different paragraphs there are."),
}

SHIPPED = {
    "last_word": Task(
        "Last word", "acc", 0.0, "The last name of a line of code, which occurs before, exactly (as LAMBADA asks)."
    ),
    "next_word": Task("Next word", "acc", 25.0, "Which of four words of similar frequency documentation has next."),
    "continuation": Task("Continuation", "acc_norm", 25.0, "Which of four lines of a module continues a function."),
    "function_name": Task("Function name", "acc", 25.0, "Which of four functions that a module calls is called next."),
    "parameter": Task("Parameter", "acc", 50.0, "Which of two of its parameters a function's body has next."),
    "grammar": Task("Grammar", "acc", 25.0, "Which closing bracket, comma or colon code has next."),
    "preposition": Task("Preposition", "acc", 100 / 3, "Which of three prepositions documentation has next."),
    "mentioned": Task("Mentioned", "acc", 50.0, "Which of two names that a function has mentioned comes next in it."),
    "complete_line": Task("Complete a line", "exact_match", 0.0, "The rest of a line of code, written out."),
    "complete_import": Task(
        "Complete an import", "exact_match", 0.0, "What a module imports from another, written out."
    ),
    "complete_return": Task("Complete a return", "exact_match", 0.0, "What a function returns, written out."),
    "recall_512": Task(
        "Recall, 512",
        "acc",
        25.0,
        "Which of four names was defined at the beginning of up to 512 tokens of other modules.",
    ),
    "recall_1024": Task("Recall, 1024", "acc", 25.0, "The same at up to 1,024 tokens."),
    "recall_2048": Task("Recall, 2048", "acc", 25.0, "The same at up to 2,048 tokens."),
    "arithmetic": Task("Arithmetic", "acc", 25.0, "Which of four numbers is the sum of two, after four solved ones."),
    "summary": Task("Summary", "rouge_l", None, "The first line of a function's documentation, from the rest."),
}

TASKS: dict[str, dict[str, Task]] = {"paper": PAPER, "shipped": SHIPPED}
"""Every task by suite and name; the names of `paper` are lm-eval's, which has no `tldr`, and LongBench's."""

RUN_CODE = ("humaneval",)
"""Tasks that are judged by running the programs that a model writes, which must be allowed."""

#: Tasks that Brown et al. 2020, Sec. 2.4, score by the unconditional likelihood of a choice, and what stands before it.
UNCONDITIONAL = ("arc_easy", "arc_challenge", "openbookqa")
ANSWER = "Answer:"

DEFAULT_TASKS: dict[str, tuple[str, ...]] = {"paper": tuple(PAPER)[:6], "shipped": tuple(SHIPPED)[:6]}
"""What a metric without tasks stands for: six of each suite, as QuaRot's Table 2 has."""


def suite_of(tasks: tuple[str, ...]) -> str:
    """The suite that has the first of `tasks`, for a user who names tasks only; `shipped` for none.

    Raises:
        RecipeError: no suite has it.
    """
    if not tasks:
        return "shipped"
    for suite, known in TASKS.items():
        if tasks[0] in known:
            return suite
    raise RecipeError(f"no zero-shot task {tasks[0]!r}{nearest(tasks[0], (*PAPER, *SHIPPED))}.")


def check(metric: ZeroShot) -> None:
    """Raise `RecipeError` for a task that the metric's suite does not have; cheap enough for the workflow's start."""
    known = TASKS[metric.suite]
    for name in metric.tasks:
        if name not in known:
            raise RecipeError(f"suite {metric.suite!r} has no task {name!r}{nearest(name, tuple(known))}.")
    if len(set(metric.tasks)) < len(metric.tasks):
        raise RecipeError(f"zero-shot tasks are named twice: {', '.join(metric.tasks)}.")


def check_allowed(metric: ZeroShot, allowed: bool) -> None:
    """Raise `TaskError` for a task that runs what a model writes, unless that is allowed and can be confined."""
    name = next((name for name in metric.tasks if metric.suite == "paper" and name in RUN_CODE), None)
    if name is None:
        return
    if not allowed:
        raise TaskError(
            f"zero-shot task {name!r} runs programs that the model writes: allow it by --allow-code-execution (or "
            "`allow_code_execution: true` in the configuration), or leave the task out."
        )
    sandbox.check()


def quoted(metric: ZeroShot, name: str) -> Task:
    """A task with the measure that the metric quotes of it."""
    task = TASKS[metric.suite][name]
    unconditional = metric.normalization == "unconditional" and name in UNCONDITIONAL
    return replace(task, measure="acc_mutual_info") if unconditional else task


def task_names(metric: ZeroShot) -> tuple[str, ...]:
    """The metric's tasks in the order asked for, with the suite's default for none. Raises as `check` does."""
    check(metric)
    return metric.tasks or DEFAULT_TASKS[metric.suite]


def has_choices(metric: ZeroShot, name: str) -> bool:
    """Whether a task's items have several choices of which one is right: those that guessing can answer."""
    return bool(TASKS[metric.suite][name].chance)


def log_odds_of(task: str) -> str:
    """What the log-odds of a task's right choices are called in result files."""
    return f"{task}_log_odds"


def choices_of(task: str) -> str:
    """What the choices that were taken in a task are called in result files."""
    return f"{task}_choices"
