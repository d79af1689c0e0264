"""Zero-shot accuracy: the papers' tasks through lm-eval, and tasks for the shipped models made from held-out text.

Importing this package imports neither torch nor lm-eval.
"""

from reproduction.tasks.evaluation import Scores, scores
from reproduction.tasks.folders import folder_name, identity, prepare
from reproduction.tasks.suites import DEFAULT_TASKS, TASKS, Task, check, check_allowed, quoted, suite_of, task_names

__all__ = [
    "DEFAULT_TASKS",
    "TASKS",
    "Scores",
    "Task",
    "check",
    "check_allowed",
    "folder_name",
    "identity",
    "prepare",
    "quoted",
    "scores",
    "suite_of",
    "task_names",
]
