"""Running of a rehearsal: each kind in processes of its own, its time and memory, and the record.

The record is a JSON file that is rewritten after each kind, so a rehearsal that was killed continues with the kinds
that are not in it. Those that failed are tried again.
"""

import functools
import multiprocessing
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from reproduction.rehearsal.kinds import Kind
from reproduction.run import execution
from reproduction.run.execution import WorkUnit
from reproduction.run.plan import Plan
from reproduction.run.results import weights_path
from reproduction.run.workers import Workers
from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.environment import environment
from rotquant.foundation.errors import ResultError, RotquantError
from rotquant.foundation.files import read_json, write_json, write_text

#: What a converted decoder is asked for: tokens of a prompt and of its continuation.
PROMPT, CONTINUED = "def __init__(self", 16
_DECODER = "decoder"


class KindStep(Frozen):
    """A unit of work of a kind. seconds: of the process, imports apart. gpu_bytes: torch's peak; host_bytes: the
    process's. stages: seconds and GPU bytes of each method that made weights, by its title."""

    name: str
    seconds: float
    gpu_bytes: int = 0
    host_bytes: int = 0
    stages: dict[str, tuple[float, int]] = Field(default_factory=dict)
    problem: str = ""


class KindOutcome(Frozen):
    """What became of a kind. run, code: of the run that stood for it, by which it is known to be done."""

    name: str
    cells: int
    run: str
    code: str
    state: Literal["done", "failed", "not reached"]
    steps: tuple[KindStep, ...] = ()
    value: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def problem(self) -> str:
        """Why it failed."""
        return next((step.problem for step in self.steps if step.problem), "")


class Rehearsal(Frozen):
    """The record of a rehearsal. layers: of the shape that were kept, None for all. gpu: its name, None on a CPU."""

    shape: str
    layers: int | None
    gpu: str | None
    environment: dict[str, Any]
    kinds: tuple[KindOutcome, ...] = ()


def rehearse(
    plan: Plan,
    kinds: Sequence[Kind],
    record: Path,
    about: dict[str, Any],
    *,
    jobs: int,
    until: float,
    longest: float,
    say: Callable[[str], None],
) -> Rehearsal:
    """Run the kinds that are not done, in the working folder, and write the record after each.

    Args:
        about: shape, layers and gpu of the record.
        jobs: kinds that run at a time. Those on the same rotations or weights run one after the other.
        until: time of `time.monotonic` after which no further kind begins. longest: seconds of one step, after which it
            is ended.

    Raises:
        ResultError: the record is of another shape, or damaged.
    """
    rehearsing = _Rehearsing(plan, record, _started(record, about), len(kinds), until, longest, say)
    groups: dict[str, list[Kind]] = {}
    for kind in kinds:
        weights = plan.planned(kind.run).weights
        groups.setdefault((weights and plan.stored(weights).rotation) or weights or kind.name, []).append(kind)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(rehearsing.run, groups.values()))
        except BaseException:
            rehearsing.until = 0.0
            for process in multiprocessing.active_children():
                process.kill()
            raise
    return rehearsing.rehearsal


@dataclass
class _Rehearsing:
    """A running rehearsal, whose kinds may run in several threads. count: of all kinds; see `rehearse` for the others.

    decodes: whether no decoder is converted yet.
    """

    plan: Plan
    record: Path
    rehearsal: Rehearsal
    count: int
    until: float
    longest: float
    say: Callable[[str], None]
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.known = {one.name: one for one in self.rehearsal.kinds if one.state == "done"}
        self.decodes = _DECODER not in self.known

    def run(self, kinds: Sequence[Kind]) -> None:
        """Run kinds one after the other, and drop the tensors of their weights."""
        for kind in kinds:
            planned, done = self.plan.planned(kind.run), self.known.get(kind.name)
            if done is not None and (done.run, done.code) == (kind.run, planned.code):
                continue
            outcome = _outcome(self.plan, kind, self.until, self.longest)
            self._add(outcome)
            if planned.weights and outcome.state == "done" and self._takes_decoder(planned.weights):
                self._add(_decoder(self.plan, planned.weights, self.longest))
        for weights in {self.plan.planned(kind.run).weights for kind in kinds} - {None}:
            _drop(str(weights))

    def _takes_decoder(self, weights: str) -> bool:
        """Whether the decoder is converted from these weights: the first that one can be of."""
        with self.lock:
            taken = self.decodes and _converts(weights)
            self.decodes = self.decodes and not taken
        return taken

    def _add(self, outcome: KindOutcome) -> None:
        with self.lock:
            kept = {one.name: one for one in (*self.rehearsal.kinds, outcome)}
            self.rehearsal = self.rehearsal.model_copy(update={"kinds": tuple(kept.values())})
            write_json(self.record, self.rehearsal.model_dump(mode="json"))
            ended = sum(one.state != "not reached" for one in self.rehearsal.kinds)
            self.say(f"{ended} of {self.count}: {line(outcome)}")


def _started(record: Path, about: dict[str, Any]) -> Rehearsal:
    if not record.exists():
        return Rehearsal(**about, environment=environment())
    found = read_rehearsal(record)
    other = [name for name, value in about.items() if getattr(found, name) != value]
    if other:
        raise ResultError(
            f"{record} is of another {other[0]} ({getattr(found, other[0])}): delete it, or name another."
        )
    return found


def read_rehearsal(record: Path) -> Rehearsal:
    """Read a record.

    Raises:
        ResultError: it is missing or damaged.
    """
    try:
        return Rehearsal.model_validate(read_json(record, "record of a rehearsal"))
    except ValidationError as error:
        raise ResultError(f"record {record} is damaged ({first_problem(error)}); delete it to begin anew.") from None


def _outcome(plan: Plan, kind: Kind, until: float, longest: float) -> KindOutcome:
    """Compute a kind's run and what it needs, unless time is over."""
    about = {"name": kind.name, "cells": kind.cells, "run": kind.run, "code": plan.planned(kind.run).code}
    if time.monotonic() >= until:
        return KindOutcome(**about, state="not reached")
    steps: list[KindStep] = []
    units, values = execution.units(plan, execution.wanted(plan, [kind.run]))
    for unit in units:
        step, found = _alone(functools.partial(_perform, plan), unit, longest)
        steps.append(step)
        values |= found
        if step.problem:
            break
    value = values.get(kind.run)
    return KindOutcome(**about, state="done" if value is not None else "failed", steps=tuple(steps), value=value)


def _decoder(plan: Plan, weights: str, longest: float) -> KindOutcome:
    """Convert stored weights to a decoder, and let that continue a text."""
    step, _ = _alone(functools.partial(_decode, plan.device), weights, longest)
    state = "failed" if step.problem else "done"
    return KindOutcome(name=_DECODER, cells=0, run=weights, code="", state=state, steps=(step,))


def _alone(perform: Callable[[Any], tuple[KindStep, dict[str, float]]], job: Any, longest: float) -> Any:
    """The result of a job in a process of its own, whose memory is its alone and whose end is no one else's."""
    name = job.kind if isinstance(job, WorkUnit) else _DECODER
    started = time.monotonic()
    with Workers(1, perform) as workers:
        workers.give(job)
        while time.monotonic() - started < longest:
            for _, outcome in workers.outcomes(1.0):
                if not isinstance(outcome, str):
                    return outcome
                return KindStep(name=name, seconds=time.monotonic() - started, problem=outcome), {}
    return KindStep(name=name, seconds=longest, problem=f"took longer than {longest:.0f} s and was ended"), {}


def _perform(plan: Plan, unit: WorkUnit) -> tuple[KindStep, dict[str, float]]:
    """In the process: a unit of `rotquant runs execute`, measured."""
    started = time.perf_counter()
    outcome = execution.perform(plan, True, unit)
    stages = _stages(unit.key) if unit.kind == "weights" and not outcome.problem else {}
    step = KindStep(
        name=unit.kind,
        seconds=time.perf_counter() - started,
        gpu_bytes=max((_gpu_bytes(), *(size for _, size in stages.values()))),
        host_bytes=outcome.peak,
        stages=stages,
        problem=outcome.problem,
    )
    return step, outcome.values


def _stages(weights: str) -> dict[str, tuple[float, int]]:
    """What each method took that made weights, by its title: seconds, and torch's peak."""
    from rotquant.weights.storage import read_manifest

    manifest = read_manifest(weights_path(weights))
    return {name: (seconds, manifest.peak_bytes.get(name, 0)) for name, seconds in manifest.seconds.items()}


def _decode(device: str, weights: str) -> tuple[KindStep, dict[str, float]]:
    """In the process: convert, store, load and generate."""
    import resource

    from rotquant.decoder import Generation, conversion, load_decoder, save_decoder
    from rotquant.models.checkpoints import load_tokenizer
    from rotquant.tensors.devices import torch_device
    from rotquant.text import tokenize

    folder, started, problem = weights_path(weights), time.perf_counter(), ""
    try:
        tokenizer = load_tokenizer(folder)
        save_decoder(Path(_DECODER), conversion.convert(folder), tokenizer, {})
        decoder = load_decoder(Path(_DECODER), torch_device(device)).decoder
        ids = tokenize(PROMPT, tokenizer).whole
        Generation(decoder, 1, len(ids) + CONTINUED).generate(ids[None], CONTINUED)
    except (RotquantError, RuntimeError) as error:  # the latter is torch's, of memory and kernels
        problem = " ".join(str(error).split())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = time.perf_counter() - started
    return KindStep(name=_DECODER, seconds=seconds, gpu_bytes=_gpu_bytes(), host_bytes=peak, problem=problem), {}


def _gpu_bytes() -> int:
    """torch's peak in this process."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def _converts(weights: str) -> bool:
    """Whether the decoder computes what stored weights simulate."""
    from rotquant.decoder.conversion import check_convertible
    from rotquant.models.checkpoints import load_config
    from rotquant.weights.storage import read_manifest

    folder = weights_path(weights)
    try:
        check_convertible(read_manifest(folder).recipe, load_config(folder))
    except RotquantError:
        return False
    return True


def _drop(weights: str) -> None:
    """Delete the tensors of weights that no further kind needs; their record stays."""
    for path in weights_path(weights).glob("*.safetensors"):
        path.unlink()


def line(outcome: KindOutcome) -> str:
    """An outcome in a line."""
    took = f"{outcome.seconds:.0f} s, GPU {_gib(outcome, 'gpu_bytes')}, host {_gib(outcome, 'host_bytes')}"
    return f"{outcome.name}: {outcome.state}, {took}{outcome.problem and f'; {outcome.problem}'}"


def _gib(outcome: KindOutcome, kind: str) -> str:
    most = max((getattr(step, kind) for step in outcome.steps), default=0)
    return f"{most / 2**30:.1f} GiB" if most else "-"


def write_page(path: Path, rehearsal: Rehearsal) -> None:
    """Write the record as a table in Markdown."""
    states = Counter(one.state for one in rehearsal.kinds)
    where = rehearsal.gpu or rehearsal.environment.get("cpu") or "a CPU"
    layers = "" if rehearsal.layers is None else f", {rehearsal.layers} layers"
    counts = ", ".join(f"{states[state]} {state}" for state in ("done", "failed", "not reached"))
    rows = [
        f"| {one.name} | {one.cells} | {one.state} | {one.seconds:.0f} | {_gib(one, 'gpu_bytes')} "
        f"| {_gib(one, 'host_bytes')} | {_details(one)} |"
        for one in rehearsal.kinds
    ]
    text = [
        "# Rehearsal of config/paper.yaml",
        "",
        f"Every kind of cell once with reduced amounts (config/rehearsal.yaml), on random weights of {rehearsal.shape}"
        f"{layers}, on {where}: {counts}. Seconds are of the reduced amounts.",
        "",
        "| kind of cell | cells | state | seconds | GPU peak | host peak | seconds of its parts, or why it failed |",
        "| --- | --: | --- | --: | --: | --: | --- |",
        *rows,
    ]
    write_text(path, "\n".join(text) + "\n")


def _details(outcome: KindOutcome) -> str:
    if outcome.problem:
        return outcome.problem.replace("|", "\\|")
    parts = [f"{step.name} {step.seconds:.1f}{_stages_of(step)}" for step in outcome.steps]
    return ", ".join(parts)


def _stages_of(step: KindStep) -> str:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, (seconds, _) in step.stages.items())
    return f" ({stages})" if stages else ""


def remove(folder: Path) -> None:
    """Delete what a rehearsal leaves that is large: the checkpoint, the decoder and stored tensors."""
    for name in ("model", _DECODER, "results/weights"):
        shutil.rmtree(folder / name, ignore_errors=True)
