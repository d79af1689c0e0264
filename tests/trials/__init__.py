"""Trials of what can go wrong beyond one process on one machine: a cluster, a shared server, faults, foreign input.

Each module is one trial, started as `python -m tests.trials.<name>` from the project's folder. It sets up what it
needs below a temporary folder, tries, and prints every check; `--quick` is the part that CI runs, `--record` keeps the
figures in results/reliability/, from which docs/reliability.md is made (`tests.trials.page`). Where a machine lacks
what a trial needs, it is skipped with a sentence.
"""
