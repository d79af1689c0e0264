"""Execution of a plan without Snakemake: a loop over its results, each after those that it needs.

Every result is a file or folder that is written at once, so after any interruption the next execution continues.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path

from reproduction.identity.names import MODEL, ROTATION_RECORD, ROTATIONS_FILE, WEIGHTS_RECORD
from reproduction.run import client
from reproduction.run.plan import Plan, occupied
from reproduction.run.stages.jobs import NEEDS_PERMISSION, runs_code
from reproduction.run.tracking.line import OWNER, settled
from reproduction.run.workers import ending
from rotquant.foundation.errors import ConfigError, ResultError, nearest
from rotquant.foundation.progress import task

Say = Callable[[str], None]
#: Words of a sentence on memory, a GPU's or the host's.
_NO_MEMORY = ("GiB are free", "GPU's memory does not suffice", "a system short of memory")
Graph = dict[str, set[str]]
"""The keys to compute, each with those that have to be computed before."""


def wanted(plan: Plan, targets: Sequence[str]) -> list[str]:
    """The keys that targets name: tables, papers, or keys of runs, weights, rotations; without targets all runs.

    Raises:
        ConfigError: a target is none of these.
    """
    found: dict[str, None] = {}
    for target in targets or plan.of_runs:
        tables = [table for name, table in plan.of_runs.items() if target in (name, table.paper)]
        keys = [run for table in tables for run in table.runs] + [target] * (target in plan.names)
        if not keys:
            known = [*plan.of_runs, *dict.fromkeys(table.paper for table in plan.of_runs.values())]
            raise ConfigError(f"nothing to compute is called {target!r}{nearest(target, known)}.")
        found.update(dict.fromkeys(keys))
    return [*found]


def to_compute(plan: Plan, keys: Sequence[str], again: bool = False) -> Graph:
    """What has to be computed for results that are not there, or for all that are asked for with `again`."""
    found = Graph()

    def add(key: str, anew: bool) -> bool:
        """Add a key and what it needs, if it has to be computed; whether it has."""
        if key not in found:
            if _is_there(plan, key) and not anew:
                return False
            found[key] = {need for need in _needs(plan, key) if need is not None and add(need, anew=False)}
        return True

    for key in keys:
        add(key, again)
    return found


def _needs(plan: Plan, key: str) -> tuple[str | None, ...]:
    """The keys of what a result is computed on, None where it is on none of a kind."""
    if key in plan.runs:
        return plan.runs[key].weights, plan.runs[key].tasks
    return (plan.weights[key].rotation,) if key in plan.weights else ()


def _is_there(plan: Plan, key: str) -> bool:
    """Whether a result is there with all that is computed on it: weights with their tensors, rotations with theirs."""
    results = plan.results()
    if key in plan.weights:
        paths = [results.weights(key) / name for name in (WEIGHTS_RECORD, MODEL)]
    elif key in plan.rotations:
        paths = [results.rotation(key) / name for name in (ROTATION_RECORD, ROTATIONS_FILE)]
    else:
        paths = [results.run(key) if key in plan.runs else results.tasks(key)]
    return all(path.exists() for path in paths)


def refused(plan: Plan, keys: Sequence[str]) -> list[str]:
    """The runs that are not there and execute what models write, where that is not allowed."""
    if plan.allow_code_execution:
        return []
    return [key for key in keys if key in plan.runs and runs_code(plan, key) and not _is_there(plan, key)]


def execute(
    plan: Plan, options: Sequence[str], keys: Sequence[str], workers: int, say: Say, again: bool, keep: bool
) -> None:
    """Compute results that are not there, several at a time; the tensors of weights go when all runs on them are there.

    Args:
        options: by which a command finds the plan and the device. workers: how many commands run at a time.
        say: called with a line for each result. again: compute existing ones anew. keep: the tensors of all weights.

    Raises:
        ResultError: some could not be computed; the others were.
    """
    failed = dict.fromkeys(refused(plan, keys), NEEDS_PERMISSION)
    for key, problem in failed.items():
        say(f"failed: {_label(plan, key)}: {problem}")
    graph = to_compute(plan, [key for key in keys if key not in failed], again)
    if not graph and not failed:
        say("nothing to compute: all that was asked for is there")
        return
    owner = str(os.getpid())
    os.environ |= {client.OWNER: owner, OWNER: owner, "ROTQUANT_PLAN": str(plan.path)}
    if workers > 1 and plan.device in ("cuda", "auto"):
        os.environ[client.SHARED] = "1"
    asked_for = set(keys)
    users: dict[str, set[str]] = {}
    for key in graph.keys() & plan.runs.keys():
        users.setdefault(plan.runs[key].weights or "", set()).add(key)
    place = {key: number for number, key in enumerate(graph)}
    order = TopologicalSorter(graph)
    order.prepare()
    running: dict[Future[str], str] = {}
    ready, crowded, alone = list[str](), list[str](), set[str]()
    counting = task("computing", "result", len(graph))
    with (
        occupied(Path.cwd(), alone=True),
        ThreadPoolExecutor(workers) as pool,
        counting as counted,
        _ended_with(running),
    ):
        while order.is_active():
            # In the order of asking: runs before further weights, whose tensors would pile up.
            ready = sorted([*ready, *order.get_ready()], key=place.__getitem__)
            if crowded and not (ready or running):  # what found too little memory beside others
                ready = [crowded.pop(0)]
                alone.update(ready)
            while ready and len(running) < workers:
                key = ready.pop(0)
                if (lost := next((need for need in graph[key] if need in failed), None)) is not None:
                    failed[key] = failed[lost]
                    order.done(key)
                else:
                    running[pool.submit(_compute, options, key)] = key
            for done in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                key, problem = running.pop(done), done.result()
                if any(words in problem for words in _NO_MEMORY) and key not in alone:
                    crowded.append(key)
                    continue
                if problem:
                    failed[key] = problem
                    say(f"failed: {_label(plan, key)}: {problem}")
                else:
                    say(f"{_label(plan, key)}: done")
                order.done(key)
                counted.advance()
                weights = plan.runs[key].weights if key in plan.runs and not problem else None
                if weights is not None:
                    users[weights].discard(key)
                    if not (users[weights] or keep or weights in asked_for):
                        shutil.rmtree(plan.results().weights(weights) / MODEL, ignore_errors=True)
    if plan.tracking and (said := settled(os.getpid())):
        say(said)
    if failed:
        key, problem = next(iter(failed.items()))
        raise ResultError(f"{len(failed)} results could not be computed; the first, {_label(plan, key)}: {problem}")


@contextmanager
def _ended_with(running: Mapping[Future[str], str]) -> Iterator[None]:
    """End the commands that run when this block is left by an error or Ctrl-C."""
    try:
        yield
    except BaseException:
        while not all(future.cancel() or future.done() for future in running):
            client.end()
            time.sleep(0.05)
        raise


def _compute(options: Sequence[str], key: str) -> str:
    """Compute a result in a process that is forked for it; why it failed, or nothing."""
    log = f"logs/cells/{key}.log"
    status = client.run("cells", log, ["runs", "make", key, *options], shown=False)
    if status == 0:
        return ""
    said = client.said_in(log)
    return ending(128 - status) if status > 128 or not said else said[-1].removeprefix("rotquant: ")


def _label(plan: Plan, key: str) -> str:
    """What a key is of."""
    for kind, known in (("rotations", plan.rotations), ("weights", plan.weights), ("", plan.runs)):
        if key in known:
            return f"{kind} {known[key].label}".strip()
    return "zero-shot tasks"
