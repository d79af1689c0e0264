"""Execution of a plan without Snakemake: worker processes compute requested results that are not current.

Learned rotations, stored weights and runs are units, ordered by their dependencies. Every result is a file written at
once, so after any interruption the next execution continues. Several executions may run on one project: a unit that
another has locked is left to it.
"""

import functools
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from reproduction.run.locks import LOCKS, locked
from reproduction.run.plan import Plan
from reproduction.run.results import RunResult
from reproduction.run.stages import jobs
from reproduction.run.workers import Workers, shared_gpus
from rotquant.foundation import progress
from rotquant.foundation.errors import ConfigError, ResultError, RotquantError, nearest
from rotquant.foundation.files import check_output_file, folder_size
from rotquant.metrics.zeroshot.suites import RUN_CODE
from rotquant.tensors.devices import check_gpu

#: Largest number of runs that a worker measures on weights that it has loaded once.
TOGETHER = 6
#: Seconds until a unit that another execution has locked is tried again.
LOCKED = 2.0
#: Fields of a method that trains.
_STEPS = {"steps", "epochs"}
#: Words of a GPU's errors for too little memory: its allocator's, and those of cuBLAS and others that begin.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class Wanted:
    """Requested results by key, in the order of the request; the values tell whether to compute them anew."""

    parts: tuple[str, ...]
    rotations: dict[str, bool]
    weights: dict[str, bool]
    runs: dict[str, bool]


@dataclass(frozen=True)
class WorkUnit:
    """One unit of a worker's work. kind: tasks, rotation, weights or runs, the latter on equal weights.

    after: the units that it needs, as (kind, key). again: compute it although it is current.
    """

    kind: str
    key: str
    label: str
    runs: tuple[str, ...] = ()
    after: frozenset[tuple[str, str]] = frozenset()
    again: bool = False


@dataclass(frozen=True)
class UnitOutcome:
    """The outcome of a unit. values: of its runs; problem: why it failed; peak: the worker's largest memory, bytes.

    locked: another execution has it. crowded: the problem is that the GPU had too little free memory.
    """

    values: dict[str, float] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    problem: str = ""
    locked: bool = False
    crowded: bool = False
    peak: int = 0


def wanted(plan: Plan, targets: Sequence[str], again: bool = False) -> Wanted:
    """Resolve targets: tables, papers, parts of tables, or keys of runs, weights or rotations; all without targets.

    Args:
        again: compute anew the named results, and the runs of named tables.

    Raises:
        ConfigError: a target is none of these.
    """
    found: tuple[dict[str, bool], ...] = ({}, {}, {}, {})
    parts, rotations, weights, runs = found
    for target in targets or plan.of_runs:
        tables = [table for name, table in plan.of_runs.items() if target in (name, table.paper)]
        named = [part for table in tables for part in table.parts]
        named += [target] if target in plan.parts and target not in plan.tables else []
        parts.update(dict.fromkeys(named, again))
        runs.update({run: again for part in named for run in plan.parts[part].runs})
        kinds = (plan.rotations, plan.weights, plan.runs)
        keys = [(here, kind) for here, kind in zip(found[1:], kinds, strict=True) if target in kind]
        for here, _ in keys:
            here[target] = again
        if not (named or keys):
            known = [*plan.of_runs, *dict.fromkeys(table.paper for table in plan.of_runs.values())]
            raise ConfigError(f"nothing to compute is called {target!r}{nearest(target, known)}.")
    weights.update({key: False for run in runs if (key := plan.runs[run].weights) and key not in weights})
    needed = (plan.weights[key].rotation for key in weights)
    rotations.update({key: False for key in needed if key and key not in rotations})
    return Wanted(tuple(parts), rotations, weights, runs)


def units(plan: Plan, asked: Wanted) -> tuple[list[WorkUnit], dict[str, float]]:
    """The units of requested results that are not current, in order of request after their dependencies; and the values
    of current runs."""
    rotations, weights, current = _needed(plan, asked)
    remade = set(weights)
    found: dict[tuple[str, str], WorkUnit] = {}
    for key in rotations:
        found["rotation", key] = WorkUnit("rotation", key, plan.rotations[key].label, again=asked.rotations[key])
    for key in weights:
        after = frozenset({("rotation", plan.weights[key].rotation or "")} & found.keys())
        found["weights", key] = WorkUnit("weights", key, plan.weights[key].label, (), after, asked.weights[key])
    values: dict[str, float] = {}
    waiting: dict[tuple[Any, ...], list[str]] = {}
    for key, again in asked.runs.items():
        run, result = plan.runs[key], current[key]
        if result is None or run.weights in remade:
            place = run.weights or run.fields["checkpoint"], _metric(plan, key)["kind"], again
            waiting.setdefault(place, []).append(key)
        else:
            values[key] = result.value
    for keys in waiting.values():
        for together in (tuple(keys[start : start + TOGETHER]) for start in range(0, len(keys), TOGETHER)):
            first = plan.runs[together[0]]
            needs = {("weights", first.weights or ""), ("tasks", first.tasks or "")}
            if first.tasks is not None:
                found["tasks", first.tasks] = WorkUnit("tasks", first.tasks, "the tasks of zero-shot accuracy")
            again = asked.runs[together[0]]
            found["runs", together[0]] = WorkUnit(
                "runs", together[0], first.label, together, frozenset(needs & found.keys()), again
            )
    return _in_order(plan, asked, found), values


def _needed(plan: Plan, asked: Wanted) -> tuple[list[str], list[str], dict[str, RunResult | None]]:
    """The rotations and weights to be made, and the result of each run if it is current.

    Results may have been copied here without their weights and rotations, which are made again only if something still
    needs them.
    """
    current = {key: None if again else jobs.result_current(plan, key) for key, again in asked.runs.items()}
    measured = {plan.runs[key].weights for key in asked.runs}
    unmeasured = {plan.runs[key].weights for key, result in current.items() if result is None}
    weights = {
        key: again
        or not jobs.weights_current(plan, key)
        or ((key in unmeasured or key not in measured) and not jobs.weights_at_hand(key))
        for key, again in asked.weights.items()
    }
    stored = {plan.weights[key].rotation for key in weights}
    unstored = {plan.weights[key].rotation for key, to_do in weights.items() if to_do}
    rotations = {
        key: again or not jobs.rotation_current(plan, key, at_hand=key in unstored or key not in stored)
        for key, again in asked.rotations.items()
    }
    remade = [key for key, to_do in weights.items() if to_do or rotations.get(plan.weights[key].rotation or "", False)]
    return [key for key, to_do in rotations.items() if to_do], remade, current


def execute(plan: Plan, targets: Sequence[str], workers: int, say: jobs.Say, again: bool = False) -> None:
    """Compute requested results that are not current, and record the parts of tables that are then complete.

    Args:
        targets: see `wanted`. workers: how many processes compute, spread over all GPUs.
        say: called with a line for each result.
        again: compute existing results anew.

    Raises:
        ConfigError: a target does not exist.
        ResultError: results cannot be written, or some could not be computed; the others were.
    """
    asked, refused = permitted(plan, wanted(plan, targets, again))
    if refused:
        say(f"not computed: {_refusal(len(refused))}")
    todo, values = units(plan, asked)
    lacks_lm_eval = find_spec("lm_eval") is None
    lacking = [
        unit for unit in todo if unit.runs and lacks_lm_eval and _metric(plan, unit.runs[0]).get("suite") == "paper"
    ]
    execution = _Execution(plan, asked, values, say)
    execution.record()
    todo = [unit for unit in todo if unit not in lacking]
    needed = {need for unit in todo for need in unit.after}
    if todo := [unit for unit in todo if unit.kind != "tasks" or ("tasks", unit.key) in needed]:
        check_output_file(LOCKS)
        check_gpu(plan.device)
        several = workers > 1  # a single worker shows its own progress
        gpus = shared_gpus(plan.device, workers)
        with Workers(workers, functools.partial(perform, plan, several), gpus) as processes:
            execution.run(todo, processes, several)
    execution.close(lacking, refused)


def permitted(plan: Plan, asked: Wanted) -> tuple[Wanted, tuple[str, ...]]:
    """The permitted part of a request, and the refused runs: those that would execute a model's code where that is not
    allowed. Weights and rotations that only these use are left out; current results are kept."""
    refused = tuple(
        key
        for key, again in asked.runs.items()
        if _runs_code(plan, key) and (again or jobs.result_current(plan, key) is None)
    )
    if plan.allow_code_execution or not refused:
        return asked, ()
    runs = {key: again for key, again in asked.runs.items() if key not in refused}
    idle = {plan.runs[key].weights for key in refused} - {plan.runs[key].weights for key in runs}
    weights = {key: again for key, again in asked.weights.items() if key not in idle}
    unused = {plan.weights[key].rotation for key in idle if key} - {plan.weights[key].rotation for key in weights}
    rotations = {key: again for key, again in asked.rotations.items() if key not in unused}
    return Wanted(asked.parts, rotations, weights, runs), refused


def perform(plan: Plan, silently: bool, unit: WorkUnit) -> UnitOutcome:
    """Compute a unit in a worker."""
    said: list[str] = []
    problem, crowded = "", False
    try:
        with locked([unit.key, *unit.runs]) as mine, progress.silenced(silently), _gpu(plan.device):
            if not mine:
                return UnitOutcome(locked=True)
            if unit.kind == "tasks":
                jobs.prepare_tasks(plan, unit.key, lambda _: None)
            elif unit.kind == "rotation":
                jobs.learn_rotations(plan, unit.key, said.append, unit.again)
            elif unit.kind == "weights":
                jobs.make_weights(plan, unit.key, said.append, unit.again)
            else:
                jobs.measure(plan, unit.runs, said.append, unit.again)
    except RotquantError as error:
        problem = str(error)
        crowded = "GiB are free" in problem  # as `rotquant.models.placement` says it
    except RuntimeError as error:  # torch's are several
        if not any(words in str(error) for words in _NO_MEMORY):
            raise
        problem, crowded = "the GPU's memory does not suffice: use a smaller batch or another GPU.", True
    results = {key: jobs.result_current(plan, key) for key in unit.runs}
    values = {key: result.value for key, result in results.items() if result is not None}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return UnitOutcome(values, tuple(said), problem, crowded=crowded, peak=peak)


@contextmanager
def _gpu(device: str) -> Iterator[None]:
    """While open, a worker uses a GPU, if it is to; then others that share it may have the memory."""
    if device == "cpu":
        yield
        return
    import torch

    from rotquant.models.placement import current_gpu

    try:
        with current_gpu(device):
            yield
    finally:
        torch.cuda.empty_cache()


class _Execution:
    """A running execution: known values, failures and messages.

    A unit for which a GPU had too little memory left beside others waits until one of them has ended, and has failed
    only where it was alone.
    """

    def __init__(self, plan: Plan, asked: Wanted, values: dict[str, float], say: jobs.Say) -> None:
        self.plan, self.asked, self.values, self.say = plan, asked, values, say
        self.failed: dict[tuple[str, str], str] = {}
        self.first = ""
        self.peak = 0
        self.started = time.monotonic()
        self._open = [*asked.parts]
        self._heading: progress.Headings | None = None
        self._crowded: list[WorkUnit] = []
        self._alone: WorkUnit | None = None

    def run(self, todo: Sequence[WorkUnit], workers: Workers[WorkUnit, UnitOutcome], shown: bool) -> None:
        """Give the units to workers, each when its dependencies exist, until none is left.

        Args:
            shown: whether progress is counted here; else the one worker shows its own, below the unit's name.
        """
        self._heading = None if shown else progress.Headings(len(todo))
        waiting = {(unit.kind, unit.key): unit for unit in todo}
        later: dict[tuple[str, str], float] = {}
        under_way = progress.task("computing", "step", len(todo)) if shown else nullcontext()
        with under_way as counted:
            while waiting or self._crowded or workers.jobs:
                self._give(waiting, later, workers)
                if not workers.jobs:
                    self._readmit(waiting)
                    self._give(waiting, later, workers)
                for unit, outcome in workers.outcomes(LOCKED / 4):
                    place = (unit.kind, unit.key)
                    if isinstance(outcome, UnitOutcome) and outcome.locked:
                        waiting[place], later[place] = unit, time.monotonic() + LOCKED
                        continue
                    if isinstance(outcome, UnitOutcome) and outcome.crowded and unit is not self._alone:
                        self._crowded.append(unit)
                        continue
                    self._ended(unit, outcome)
                    self._readmit(waiting)
                    if counted is not None:
                        counted.advance()

    def _readmit(self, waiting: dict[tuple[str, str], WorkUnit]) -> None:
        """Let the first unit wait for a worker that waited for memory."""
        if self._crowded:
            unit = self._crowded.pop(0)
            waiting[unit.kind, unit.key] = unit

    def _give(
        self,
        waiting: dict[tuple[str, str], WorkUnit],
        later: Mapping[tuple[str, str], float],
        workers: Workers[WorkUnit, UnitOutcome],
    ) -> None:
        open_ = {*waiting, *((unit.kind, unit.key) for unit in (*workers.jobs, *self._crowded))}
        for place, unit in [*waiting.items()]:
            lost = next((self.failed[need] for need in unit.after if need in self.failed), None)
            if lost is not None:
                self.failed[place] = lost
                del waiting[place]
                open_.remove(place)
            elif workers.free and later.get(place, 0) <= time.monotonic() and open_.isdisjoint(unit.after):
                self._alone = None if workers.jobs else unit
                if self._heading is not None:
                    self._heading.begins(unit.label)
                workers.give(waiting.pop(place))

    def _ended(self, unit: WorkUnit, outcome: UnitOutcome | str) -> None:
        if isinstance(outcome, str):
            outcome = UnitOutcome(problem=f"{outcome}.")
        for line in outcome.said:
            self.say(f"{unit.label}: {line}")
        self.peak = max(self.peak, outcome.peak)
        self.values.update(outcome.values)
        if outcome.problem:
            self.failed[unit.kind, unit.key] = outcome.problem
            self.first = self.first or f"{unit.label}: {outcome.problem}"
            self.say(f"failed: {unit.label}: {outcome.problem}")
        self.record()

    def record(self) -> None:
        """Record the parts that are complete now."""
        for part in [part for part in self._open if all(run in self.values for run in self.plan.parts[part].runs)]:
            jobs.record_part(self.plan, part, self.values)
            self._open.remove(part)

    def close(self, lacking: Sequence[WorkUnit], refused: Sequence[str]) -> None:
        """Report what was done.

        Raises:
            ResultError: something is missing.
        """
        if not (self.peak or self.failed or lacking or refused):
            self.say("nothing to compute: all that was asked for is there")
        if self.peak:
            took = progress.duration(time.monotonic() - self.started)
            self.say(f"done in {took}; the largest process had {self.peak / 1e9:.1f} GB of memory")
        left_out = sum(len(unit.runs) for unit in lacking)
        missing = f" ({', '.join(self._open)})" if self._open else ""
        if self.failed:
            raise ResultError(f"{len(self.failed)} steps could not be computed{missing}; the first, {self.first}")
        if left_out:
            raise ResultError(
                f"{left_out} runs of the papers' zero-shot tasks were left out{missing}: they need lm-eval, "
                "which is not installed here; all else is computed."
            )
        if refused:
            raise ResultError(f"{_refusal(len(refused))}{missing}")


def _in_order(plan: Plan, asked: Wanted, found: Mapping[tuple[str, str], WorkUnit]) -> list[WorkUnit]:
    """Units in order of the requested tables, trainings and the largest models first, each after its dependencies.

    What takes longest goes first, so that processes end together.
    """
    size = functools.cache(lambda checkpoint: folder_size(checkpoint, "*.safetensors"))
    table: dict[str, int] = {}  # the first table that shows a run
    for number, part in enumerate(asked.parts):
        for run in plan.parts[part].runs:
            table.setdefault(run, number)
    ordered: dict[tuple[str, str], WorkUnit] = {}

    def place(unit: WorkUnit) -> tuple[int, bool, int]:
        fields = plan.runs[unit.runs[0]].fields
        methods = plan.shared[fields["recipe"]]["methods"].values()
        trains = any(_STEPS & method.keys() for method in methods)
        return table.get(unit.runs[0], 0), not trains, -size(fields["checkpoint"])

    def add(unit: WorkUnit) -> None:
        for need in sorted(unit.after):
            add(found[need])
        ordered.setdefault((unit.kind, unit.key), unit)

    for unit in sorted((unit for unit in found.values() if unit.runs), key=place):
        add(unit)
    for unit in found.values():
        add(unit)
    return [*ordered.values()]


def _runs_code(plan: Plan, run: str) -> bool:
    """Whether a run executes code that a model writes."""
    metric = _metric(plan, run)
    return metric.get("suite") == "paper" and not set(RUN_CODE).isdisjoint(metric["tasks"])


def _refusal(count: int) -> str:
    return (
        f"{count} runs execute programs that models write (HumanEval), which needs --allow-code-execution or "
        "`allow_code_execution: true` in the configuration"
    )


def _metric(plan: Plan, run: str) -> dict[str, Any]:
    """The metric of a run."""
    return plan.shared[plan.runs[run].fields["metric"]]
