"""What the workflow's jobs do with a plan: what is not current is computed by its stage, and recorded at once.

So an interrupted job continues where it was. The working folder is the project's. Digests of code are the plan's as
long as the sources are those that it was made from.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from rotquant.foundation.errors import ConfigError, ResultError, RotquantError
from rotquant.foundation.files import check_output_file, read_json, write_json
from rotquant.recipes.recipe import Run
from rotquant.recipes.schemes import Metric, ZeroShot
from rotquant.study.currency import current_result, rotation_is_current, weights_are_current
from rotquant.study.plan import Plan
from rotquant.study.planning import sources_digest
from rotquant.study.quantities import quantities
from rotquant.study.results import (
    ROTATION_RECORD,
    RunResult,
    batch_path,
    group_path,
    rotation_path,
    run_path,
    task_set_path,
    weights_path,
    write_result,
)

Say = Callable[[str], None]


def learn_rotations(plan: Plan, key: str, say: Say, again: bool = False) -> None:
    """Learn rotations into their folder, where an interrupted learning continues, and record them.

    Raises:
        ConfigError: no run is on them.
    """
    planned = plan.rotation(key)
    folder, run = rotation_path(key), plan.run(planned.run)
    code = _code(plan, planned.code, "rotations", run)
    if not again and rotation_is_current(folder, code):
        say(f"rotations {key}: there already")
        return
    check_output_file(folder / ROTATION_RECORD)
    from rotquant.study.stages.rotations import compute_rotations  # torch, once it is known to be needed

    record = compute_rotations(run, plan.checkpoint_path(run.checkpoint), folder, plan.device, code)
    write_json(folder / ROTATION_RECORD, record)
    say(f"rotations {key}: {record['seconds']:.1f} s")


def make_batch(plan: Plan, key: str, say: Say, measure: bool = True, again: bool = False) -> None:
    """Make the weights of a batch, measure what all tables with these weights show, and record the batch.

    Raises:
        ConfigError: no run uses these weights.
        ResultError: the learned rotations that they need are not there.
    """
    batch = plan.batch(key)
    records = {
        weights: _make_weights(plan, weights, plan.run(run), batch.code, say, again)
        for weights, run in batch.weights.items()
    }
    if measure and batch.group is not None:
        try:
            _measure(plan, plan.group(batch.group).runs, say)
        except RotquantError as error:  # left to the group's own job, which will meet it again
            say(f"not measured ahead: {error}")
    write_json(batch_path(key), {"batch": key, "weights": records})


def prepare_tasks(plan: Plan, key: str, say: Say) -> None:
    """Make or check the data of a set of zero-shot tasks and record what they are.

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


def measure_group(plan: Plan, key: str, say: Say, again: bool = False) -> None:
    """Measure what is not measured yet of a group of runs, and record the group.

    Raises:
        ConfigError: there is no such group.
        ResultError: the weights that it needs are not there.
    """
    results = _measure(plan, plan.group(key).runs, say, again)
    write_json(group_path(key), {"group": key, "runs": {run: result.value for run, result in results.items()}})


def measure_run(plan: Plan, key: str, say: Say) -> None:
    """Measure one run, though it is there.

    Raises:
        ConfigError: no table asks for it.
        ResultError: the weights that it needs are not there.
    """
    _measure(plan, (key,), say, again=True)


def _make_weights(plan: Plan, key: str, run: Run, code: str, say: Say, again: bool) -> dict[str, Any]:
    """Make stored weights, unless they are current; return their provenance. code: as the plan says."""
    code = _code(plan, code, "weights", run)
    folder = weights_path(key)
    record = folder / "weights.json"
    rotation = None if run.rotation_key is None else rotation_path(run.rotation_key)
    digest = None if rotation is None else _rotation_record(rotation)["digest"]
    if record.exists() and not again:
        provenance = read_json(record, "weights record")
        if weights_are_current(provenance, code, digest):
            say(f"weights {key}: there already")
            return provenance
    check_output_file(record)
    from rotquant.study.stages.weights import compute_weights

    provenance = compute_weights(run, plan.checkpoint_path(run.checkpoint), folder, plan.device, code, rotation)
    write_json(record, provenance)
    say(f"weights {key}: {provenance['seconds']:.1f} s")
    return provenance


def _measure(plan: Plan, keys: Iterable[str], say: Say, again: bool = False) -> dict[str, RunResult]:
    """Measure runs that are not current, loading each weights folder once; write each result at once; return all."""
    results: dict[str, RunResult] = {}
    waiting: dict[tuple[str, str | None], list[Run]] = {}
    codes: dict[str, str] = {}
    for key in keys:
        run = plan.run(key)
        weights = _weights_record(plan, run)
        codes[key] = _code(plan, plan.planned(key).code, "runs", run, run.metric)
        found = None if again else current_result(run_path(key), codes[key], weights)
        if found is None:
            waiting.setdefault((run.checkpoint, run.weights_key), []).append(run)
        else:
            results[key] = found
            say(f"run {key}: there already")
    if not waiting:
        return results
    check_output_file(run_path(next(iter(waiting.values()))[0].key))
    from rotquant.study.stages.runs import measure_runs

    for (checkpoint, weights_key), members in waiting.items():
        weights = _weights_record(plan, members[0])
        folder = None if weights_key is None else weights_path(weights_key)
        place, batch_size = plan.checkpoint_path(checkpoint), plan.planned(members[0].key).batch_size
        measured = measure_runs(members, place, folder, plan.device, batch_size, [codes[run.key] for run in members])
        for run, found, provenance in measured:
            result = results[run.key] = RunResult(run, found.metrics, provenance, weights, found.arrays, found.samples)
            write_result(run_path(run.key), result)
            say(_summary(result))
    return results


def _code(plan: Plan, planned: str, stage: str, run: Run, metric: Metric | None = None) -> str:
    """The digest of the code that computes now: the plan's, or taken anew where sources were edited since."""
    if plan.sources == _sources():
        return planned
    from rotquant.study.digests import code_digest  # which reads the sources of all that a stage uses

    return code_digest(stage, run.recipe, metric)


_sources = functools.cache(sources_digest)


def _weights_record(plan: Plan, run: Run) -> dict[str, Any] | None:
    """The provenance of a run's stored weights; None for a run that needs none.

    Raises:
        ResultError: they are not there; the sentence says how to make them.
    """
    if run.weights_key is None:
        return None
    path = weights_path(run.weights_key) / "weights.json"
    if not path.exists():
        batch = next(key for key, batch in plan.batches.items() if run.weights_key in batch.weights)
        raise ResultError(
            f"run {run.key} needs the weights {path.parent.absolute()}, which are not there: "
            f"`rotquant runs weights {batch}` makes them (or delete {batch_path(batch)} and start Snakemake again)."
        )
    return read_json(path, "weights record")


def _rotation_record(folder: Path) -> dict[str, Any]:
    """The record of learned rotations.

    Raises:
        ResultError: they are not there; the sentence says how to make them.
    """
    path = folder / ROTATION_RECORD
    if not path.exists():
        raise ResultError(
            f"the weights need the learned rotations {folder.absolute()}, which are not there: "
            f"`rotquant runs rotations {folder.name}` learns them."
        )
    return read_json(path, "record of rotations")


def _summary(result: RunResult) -> str:
    name = quantities(result.run.metric)[0].name
    return f"run {result.key}: {name} {result.value:.4f} in {result.provenance['seconds']:.1f} s"
