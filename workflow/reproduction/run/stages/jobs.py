"""The computing jobs of a plan, one for each cell: learned rotations, stored weights, a run, the tasks of runs.

A job computes and writes one result. It only runs with the code, checkpoint and texts of the plan: a difference ends
it with a message. The working folder is the project's.
"""

from pathlib import Path
from typing import Any, cast

from reproduction.identity.code import refuse_other_code
from reproduction.identity.names import HISTORY_FILE, MODEL, ROTATION_RECORD, ROTATIONS_FILE, WEIGHTS_RECORD, Results
from reproduction.identity.run import Run, check_signed, signed
from reproduction.run.plan import Plan
from reproduction.run.results import RunResult, write_result
from reproduction.run.tracking.job import logged
from reproduction.tables.quantities import quantities
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import RUN_CODE
from rotquant.foundation.errors import ConfigError, ResultError
from rotquant.foundation.files import check_output_file, read_object, write_json
from rotquant.models.digests import refuse_other

NEEDS_PERMISSION = (
    "this run executes programs that models write (HumanEval), which needs --allow-code-execution or "
    "`allow_code_execution: true` in the configuration."
)


def make(plan: Plan, key: str, results: Results) -> str:
    """Compute what a key is of: learned rotations, stored weights, zero-shot tasks or a run; what it was, in a line.

    Raises:
        ConfigError: no table asks for it.
        ResultError: what it needs is missing; the code or an input is not the planned one.
    """
    jobs = (
        (plan.rotations, learn_rotations),
        (plan.weights, make_weights),
        (plan.tasks, prepare_tasks),
        (plan.runs, measure),
    )
    for known, job in jobs:
        if key in known:
            with logged(plan, key, results):
                return job(plan, key, results)
    raise ConfigError(f"no table asks for {key!r} under this configuration; `rotquant runs list` prints all keys.")


def learn_rotations(plan: Plan, key: str, results: Results) -> str:
    """Learn rotations into their folder, where an interrupted learning continues, and record them."""
    planned, folder = plan.rotations[key], results.rotation(key)
    run = plan.run(planned.run)
    check_output_file(folder / ROTATION_RECORD)
    _check_inputs(plan, "rotations", planned.code, run)
    from reproduction.run.stages.rotations import compute_rotations  # imports torch, only when needed

    record = compute_rotations(run, plan.place(run), folder, plan.device, planned.code)
    _check_inputs(plan, "rotations", planned.code, run)
    write_json(folder / ROTATION_RECORD, signed(record, run.rotation_identity() or {}))
    return f"rotations {key}: {record['seconds']:.1f} s"


def make_weights(plan: Plan, key: str, results: Results) -> str:
    """Make stored weights: their tensors, the history of a training, and last the record of how they were made."""
    planned, folder = plan.weights[key], results.weights(key)
    run = plan.run(planned.run)
    rotation = None if planned.rotation is None else results.rotation(planned.rotation)
    if rotation is not None:
        check_signed(_record(rotation / ROTATION_RECORD, planned.rotation or ""), rotation / ROTATION_RECORD)
        _at_hand(rotation / ROTATIONS_FILE, planned.rotation or "")
    check_output_file(folder / WEIGHTS_RECORD)
    _check_inputs(plan, "weights", planned.code, run)
    from reproduction.run.stages.weights import compute_weights
    from rotquant.models.folders import MANIFEST

    provenance, history = compute_weights(run, plan.place(run), folder / MODEL, plan.device, planned.code, rotation)
    _check_inputs(plan, "weights", planned.code, run)
    digests: dict[str, str] = read_object(folder / MODEL / MANIFEST, "manifest")["digests"]
    tensors = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    write_json(folder / HISTORY_FILE, history)
    write_json(folder / WEIGHTS_RECORD, signed({**provenance, "digests": tensors}, run.weights_identity() or {}))
    return f"weights {key}: {provenance['seconds']:.1f} s"


def prepare_tasks(plan: Plan, key: str, results: Results) -> str:
    """Make or check the data of a set of zero-shot tasks and record it."""
    from reproduction import tasks

    run = plan.run(plan.tasks[key])
    metric = cast(ZeroShot, run.metric)
    folder = tasks.prepare(metric, Path(), run.corpora.get(metric.corpus or ""))
    write_json(results.tasks(key), tasks.identity(metric, folder))
    return str(folder)


def measure(plan: Plan, key: str, results: Results) -> str:
    """Measure a run and write its file."""
    planned, path = plan.runs[key], results.run(key)
    if not plan.allow_code_execution and runs_code(plan, key):
        raise ConfigError(NEEDS_PERMISSION)
    check_output_file(path)
    run, weights, folder = plan.run(key), None, None
    if planned.weights is not None:
        place = results.weights(planned.weights)
        weights, folder = _record(place / WEIGHTS_RECORD, planned.weights), place / MODEL
        check_signed(weights, place / WEIGHTS_RECORD)
        _at_hand(folder, planned.weights)
    _check_inputs(plan, "runs", planned.code, run)
    from reproduction.run.stages.runs import measure_run

    found, provenance = measure_run(
        run, plan.place(run), folder, plan.device, planned.batch_size, planned.code, plan.allow_code_execution
    )
    _check_inputs(plan, "runs", planned.code, run)
    result = RunResult(run, found.metrics, provenance, weights, found.arrays, found.samples, found.texts)
    write_result(path, result)
    name = quantities(run.metric)[0].name
    return f"run {key}: {name} {result.value:.4f} in {provenance['seconds']:.1f} s"


def runs_code(plan: Plan, key: str) -> bool:
    """Whether a run executes code that a model writes."""
    metric = plan.metric(key)
    return metric.get("suite") == "paper" and not set(RUN_CODE).isdisjoint(metric["tasks"])


def _check_inputs(plan: Plan, stage: str, code: str, run: Run) -> None:
    """Refuse to compute or record with other code or another checkpoint than planned.

    Raises:
        CheckpointError, ResultError: they differ now.
    """
    refuse_other_code(code, plan.sources, stage, run.recipe)
    refuse_other(plan.place(run), run.checkpoint_digest)


def _record(path: Path, key: str) -> dict[str, Any]:
    """The record of something that a result needs.

    Raises:
        ResultError: it is not there; the sentence says how to make it.
    """
    _at_hand(path, key)
    return read_object(path, "record")


def _at_hand(path: Path, key: str) -> None:
    if not path.exists():
        raise ResultError(f"{path} is needed and not there: `rotquant runs execute {key}` makes it.")
