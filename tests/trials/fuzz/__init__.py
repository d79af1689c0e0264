"""Fuzzing of every format that the project reads: `python -m tests.trials.fuzzing` is the trial, here are its parts.

`formats` says what a format is; `written`, `results`, `records`, `models`, `stored`, `texts` and `caches` hold valid
examples and the readers that commands call; `mutation` and `documents` change an example, `cases` draws changes by
hypothesis; `guarded` reads a case in a process that is watched; `readers` lists every function that reads.
"""
