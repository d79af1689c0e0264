"""Zero-shot accuracy through lm-eval: the papers' tasks, and tasks for the shipped models made from held-out text."""

from rotquant.zeroshot.suites import DEFAULT_TASKS, TASKS, Task, check, task_names

__all__ = ["DEFAULT_TASKS", "TASKS", "Task", "check", "task_names"]
