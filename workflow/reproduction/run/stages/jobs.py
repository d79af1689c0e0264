"""Jobs of a plan: rotations, weights or runs that are not current are computed by their stage and recorded.

So an interrupted job continues where it stopped. The working folder is the project's. A job only runs with the code,
checkpoint and texts of the plan: a difference ends it with a message.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from reproduction.identity.code import refuse_other_code
from reproduction.identity.records import (
    check_signed,
    none_newer,
    rotation_is_current,
    run_is_current,
    signed,
    weights_are_current,
)
from reproduction.identity.run import Run
from reproduction.run.plan import Plan
from reproduction.run.results import (
    HISTORY_FILE,
    ROTATION_RECORD,
    ROTATIONS_FILE,
    WEIGHTS_RECORD,
    RunResult,
    part_path,
    read_result,
    rotation_path,
    run_path,
    task_set_path,
    weights_path,
    write_result,
)
from reproduction.tables.quantities import quantities
from rotquant.foundation.errors import ConfigError, ResultError
from rotquant.foundation.files import check_output_file, json_text, read_object, write_json, write_text
from rotquant.models.digests import refuse_other
from rotquant.recipes.schemes import ZeroShot

Say = Callable[[str], None]


def learn_rotations(plan: Plan, key: str, say: Say, again: bool = False) -> None:
    """Learn rotations into their folder, where an interrupted learning continues, and record them.

    Raises:
        ConfigError: no run is on them.
    """
    if not again and rotation_current(plan, key):
        return
    planned = plan.rotation(key)
    folder, run = rotation_path(key), plan.run(planned.run)
    check_output_file(folder / ROTATION_RECORD)
    from reproduction.run.stages.rotations import compute_rotations  # imports torch, only when needed

    _check_inputs(plan, "rotations", planned.code, run)
    record = compute_rotations(run, plan.place(run), folder, plan.device, planned.code)
    _check_inputs(plan, "rotations", planned.code, run)
    write_json(folder / ROTATION_RECORD, signed(record, run.rotation_identity() or {}))
    say(f"rotations {key}: {record['seconds']:.1f} s")


def make_weights(plan: Plan, key: str, say: Say, again: bool = False) -> None:
    """Make stored weights, unless they are current.

    Raises:
        ConfigError: no run uses them.
        ResultError: the learned rotations that they need are missing.
    """
    if not again and weights_current(plan, key) and weights_at_hand(key):
        return
    planned = plan.stored(key)
    folder, run = weights_path(key), plan.run(planned.run)
    rotation = None if planned.rotation is None else rotation_path(planned.rotation)
    if rotation is not None:
        check_signed(_rotation_record(rotation), rotation / ROTATION_RECORD)
    record = folder / WEIGHTS_RECORD
    check_output_file(record)
    from reproduction.run.stages.weights import compute_weights
    from rotquant.models.folders import MANIFEST

    _check_inputs(plan, "weights", planned.code, run)
    provenance = compute_weights(run, plan.place(run), folder, plan.device, planned.code, rotation)
    _check_inputs(plan, "weights", planned.code, run)
    digests: dict[str, str] = read_object(folder / MANIFEST, "manifest")["digests"]
    tensors = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    made = {**provenance, "digests": tensors}
    write_json(record, signed(made, run.weights_identity() or {}))
    say(f"weights {key}: {provenance['seconds']:.1f} s")


def prepare_tasks(plan: Plan, key: str, say: Say) -> None:
    """Make or check the data of a set of zero-shot tasks and record it.

    Raises:
        ConfigError: no run is measured on them.
    """
    from rotquant.metrics import zeroshot

    if key not in plan.tasks:
        raise ConfigError(f"no run is measured on the tasks {key!r} under this configuration.")
    run = plan.run(plan.tasks[key])
    metric = cast(ZeroShot, run.metric)
    folder = zeroshot.prepare(metric, Path(), run.corpora.get(metric.corpus or ""))
    write_json(task_set_path(key), zeroshot.identity(metric, folder))
    say(str(folder))


def measure(plan: Plan, keys: Iterable[str], say: Say, again: bool = False) -> None:
    """Measure the runs that are not current, loading each weights folder once; write each result at once.

    Raises:
        ConfigError: no table asks for one of them.
        ResultError: the weights that one needs are missing.
    """
    waiting: dict[str, list[Run]] = {}
    for key in keys:
        if again or result_current(plan, key) is None:
            run = plan.run(key)
            waiting.setdefault(run.weights_key or run.checkpoint_digest, []).append(run)
    for members in waiting.values():
        check_output_file(run_path(members[0].key))
        from reproduction.run.stages.runs import measure_runs

        weights, weights_key = _weights_record(plan, members[0].key), members[0].weights_key
        if weights is not None and weights_key is not None:
            check_signed(weights, weights_path(weights_key) / WEIGHTS_RECORD)
        folder = None if weights_key is None else weights_path(weights_key)
        place, batch_size = plan.place(members[0]), plan.planned(members[0].key).batch_size
        codes = [plan.planned(run.key).code for run in members]
        allowed = plan.allow_code_execution
        for run in members:
            _check_inputs(plan, "runs", plan.planned(run.key).code, run)
        for run, found, provenance in measure_runs(members, place, folder, plan.device, batch_size, codes, allowed):
            _check_inputs(plan, "runs", plan.planned(run.key).code, run)
            result = RunResult(run, found.metrics, provenance, weights, found.arrays, found.samples, found.texts)
            write_result(run_path(run.key), result)
            say(_summary(result))


def record_part(plan: Plan, name: str, values: Mapping[str, float]) -> None:
    """Record a part of a table whose runs the planned code has all measured; an equal existing record keeps its time.

    Args:
        values: the main quantity of each run.
    """
    part, path = plan.part(name), part_path(name)
    text = json_text({"part": name, "digest": plan.part_digest(name), "runs": {run: values[run] for run in part.runs}})
    behind = [*map(run_path, part.runs), *map(task_set_path, part.tasks)]
    if not (none_newer(path, behind) and path.read_bytes() == text.encode()):
        write_text(path, text)


def rotation_current(plan: Plan, key: str, at_hand: bool = True) -> bool:
    """Whether rotations were learned by the planned code, and exist if `at_hand`."""
    folder = rotation_path(key)
    path = folder / ROTATION_RECORD
    if not path.exists() or not (folder / HISTORY_FILE).exists():
        return False
    record = read_object(path, "record of rotations")
    return rotation_is_current(record, path, plan.rotation(key).code, folder / ROTATIONS_FILE, at_hand)


def weights_at_hand(key: str) -> bool:
    """Whether stored weights themselves are here, as measuring needs."""
    return any(weights_path(key).glob("*.safetensors"))


def weights_current(plan: Plan, key: str) -> bool:
    """Whether weights were stored by the planned code and with the present rotations; they may be elsewhere."""
    planned, record = plan.stored(key), weights_path(key) / WEIGHTS_RECORD
    if not record.exists():
        return False
    learned = None
    if planned.rotation is not None:
        path = rotation_path(planned.rotation) / ROTATION_RECORD
        if not path.exists():
            return False
        learned = read_object(path, "record of rotations").get("digest")
    return weights_are_current(read_object(record, "weights record"), record, planned.code, learned)


def result_current(plan: Plan, key: str) -> RunResult | None:
    """A run's result if it is complete, by the planned code and on the present weights and tasks; else None."""
    planned, path = plan.planned(key), run_path(key)
    lacks_weights = planned.weights is not None and not (weights_path(planned.weights) / WEIGHTS_RECORD).exists()
    if lacks_weights or not path.exists():
        return None
    tasks = None if planned.tasks is None else task_set_path(planned.tasks)
    record = read_object(tasks, "record of tasks") if tasks is not None and tasks.exists() else None
    try:
        result = read_result(path)
    except ResultError:
        return None
    stored = _weights_record(plan, key)
    return result if run_is_current(result.provenance, result.weights, planned.code, stored, record) else None


def _check_inputs(plan: Plan, stage: str, code: str, run: Run) -> None:
    """Refuse to compute or record with other code or another checkpoint than planned.

    Raises:
        CheckpointError, ResultError: they differ now.
    """
    refuse_other_code(code, plan.sources, stage, run.recipe)
    refuse_other(plan.place(run), run.checkpoint_digest)


def _weights_record(plan: Plan, key: str) -> dict[str, Any] | None:
    """The provenance of a run's stored weights; None for a run that needs none.

    Raises:
        ResultError: they are not there; the sentence says how to make them.
    """
    weights = plan.planned(key).weights
    if weights is None:
        return None
    path = weights_path(weights) / WEIGHTS_RECORD
    if not path.exists():
        raise ResultError(
            f"run {key} needs the weights {path.parent.absolute()}, which are not there: "
            f"`rotquant runs execute {weights}` makes them."
        )
    return read_object(path, "weights record")


def _rotation_record(folder: Path) -> dict[str, Any]:
    """The record of learned rotations.

    Raises:
        ResultError: they are not there; the sentence says how to make them.
    """
    path = folder / ROTATION_RECORD
    if not path.exists():
        raise ResultError(
            f"the weights need the learned rotations {folder.absolute()}, which are not there: "
            f"`rotquant runs execute {folder.name}` learns them."
        )
    return read_object(path, "record of rotations")


def _summary(result: RunResult) -> str:
    name = quantities(result.run.metric)[0].name
    return f"run {result.key}: {name} {result.value:.4f} in {result.provenance['seconds']:.1f} s"
