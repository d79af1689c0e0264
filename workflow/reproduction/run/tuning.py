"""Tuning of methods' settings for one model: a grid of settings, each quantized with several seeds and measured.

A paper's rates are chosen for its models and amounts of text; a stand-in needs its own. The rule is the same for every
method that learns: the least perplexity on validation text. Tables report test text, so it is not used here.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from reproduction.identity.code import stage_digest
from reproduction.identity.names import ROTATION_RECORD
from reproduction.identity.run import Run
from reproduction.metrics.settings import Metric
from reproduction.run.workers import Workers, shared_gpus
from reproduction.tables.configuration import Slot
from reproduction.tables.project import Project
from reproduction.tables.resolution import resolve
from rotquant.foundation.data import merge
from rotquant.foundation.environment import environment
from rotquant.foundation.errors import ConfigError, RecipeError, ResultError, RotquantError, nearest
from rotquant.foundation.files import read_object, short_hash, write_json
from rotquant.foundation.progress import silenced, task
from rotquant.foundation.written import yaml_value
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override_all
from rotquant.recipes.schemes import Perplexity

#: Folder of tuning records, which are committed with their models.
RECORDS = Path("workflow/resources/tuning")

Grid = dict[tuple[str, str], tuple[Any, ...]]
"""Values to try, by method and field."""
Point = dict[str, dict[str, Any]]
"""One value for each field of a grid, in the form of a configuration's `methods`."""


def read_grid(options: Sequence[str], recipe: Recipe) -> Grid:
    """Parse a grid from `field=v1,v2` options; a field of the recipe's methods, `method.field` where two have it.

    Raises:
        RecipeError: an option in another form, or a field that is unknown, ambiguous or given twice.
    """
    fields = [(name, field) for name, method in recipe.methods.items() for field in type(method).model_fields]
    grid: Grid = {}
    for option in options:
        written, equals, values = option.partition("=")
        path = written.removeprefix("methods.")
        if not equals or not all(value.strip() for value in values.split(",")):
            raise RecipeError(f"--grid {option}: write it as field=value,value.")
        found = [place for place in fields if path in (place[1], ".".join(place))]
        if not found:
            known = [".".join(place) for place in fields]
            raise RecipeError(f"--grid {option}: no method of the recipe has the field {path!r}{nearest(path, known)}.")
        if len(found) > 1:
            raise RecipeError(f"--grid {option}: both {' and '.join('.'.join(place) for place in found)}: name one.")
        if found[0] in grid:
            raise RecipeError(f"--grid {option}: {path} occurs twice.")
        grid[found[0]] = tuple(map(_value, values.split(",")))
    return grid


def _value(text: str) -> Any:
    """Parse a value as YAML, and numbers such as 2e-4, which YAML reads as text."""
    try:
        value = yaml_value(text, f"--grid: {text.strip()!r}")
    except ConfigError:
        raise RecipeError(f"--grid: {text.strip()!r} is no value: write numbers, names, true, false or null.") from None
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return text.strip()


def points(grid: Grid) -> Iterator[Point]:
    """Every combination of a grid's values."""
    for values in itertools.product(*grid.values()):
        point: Point = {}
        for (method, field), value in zip(grid, values, strict=True):
            point.setdefault(method, {})[field] = value
        yield point


def tuning_run(project: Project, slot: Slot, recipe: Recipe, changes: dict[str, Any], metric: Metric, seed: int) -> Run:
    """Make the run of one point on one slot with one seed.

    Args:
        changes: the user's and the point's, which override the slot's own settings.

    Raises:
        ConfigError, RecipeError: invalid settings, what the slot's model cannot do, or a metric on other than
            validation text.
    """
    if getattr(metric, "split", None) != "validation":
        raise ConfigError("settings are chosen on validation text: test text is for the tables' own numbers.")
    chosen = resolve(override_all(recipe, [changes], "--grid"), slot, f"slot {slot.name}", changes)
    found = project.fitted(chosen, metric, slot, sorted(changes.get("rotation") or ()))
    if found.recipe is None:
        raise ConfigError(f"slot {slot.name}: {found.sentence}")
    return project.run_of(
        {
            "checkpoint": slot.checkpoint,
            "checkpoint_digest": project.digest(slot.name),
            "recipe": found.recipe,
            "metric": metric,
            "corpora": project.config.corpora,
            "seed": seed,
            "dtype": project.config.dtype,
        }
    )


def tune(
    project: Project,
    slot: Slot,
    method: str,
    grid: Grid,
    changes: dict[str, Any],
    seeds: Sequence[int],
    record: Path,
    device: str,
    *,
    max_windows: int | None = None,
    workers: int = 1,
    measure: Callable[["TuningJob"], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Measure every point of a grid on validation text with every seed; write and return the record.

    Each number is recorded at once, and recorded numbers of the same code are reused: an interrupted tuning continues,
    and a wider grid only measures new points.

    Args:
        method: a preset. changes: to its recipe.
        record: the JSON file.
        max_windows: windows of validation text; None for the slot's number.
        workers: number of processes; one measures in this process.
        measure: how a job is measured; by default as `measure_run` does.

    Raises:
        RotquantError: bad input, detected before the first number where possible; or a process was ended.
    """
    fewer = {} if max_windows is None else {"max_windows": max_windows}
    metric = Perplexity.model_validate({**slot.evaluation, "split": "validation", **fewer})
    recipe = preset(method)
    tried = [
        (point, [tuning_run(project, slot, recipe, merge(changes, {"methods": point}), metric, seed) for seed in seeds])
        for point in points(grid)
    ]
    runs = {run.key: run for _, members in tried for run in members}
    found: dict[str, Any] = {
        "method": method,
        "changes": changes,
        "slot": slot.name,
        "checkpoint": slot.checkpoint,
        "checkpoint_digest": project.digest(slot.name),
        "corpus": project.config.corpora[metric.corpus].model_dump(mode="json"),
        "metric": metric.model_dump(mode="json"),
        "seeds": list(seeds),
        "grid": {".".join(place): list(values) for place, values in grid.items()},
        "environment": environment(project.root),
        "device": device,
    }
    known = recorded_runs(record) if record.exists() else {}
    checkpoint = project.checkpoint_path(slot.checkpoint)
    jobs = [TuningJob(run, checkpoint, device, slot.batch_size, _code(run)) for run in runs.values()]
    lacking = [job for job in jobs if known.get(job.run.key, {}).get("code_digest") != job.code]
    with task(f"tuning {method} on {slot.name}", "run", len(lacking)) as under_way:
        for job, numbers in _measured(lacking, workers, measure or measure_run):
            known[job.run.key] = {"seed": job.run.seed, "code_digest": job.code, **numbers}
            write_json(record, found | {"runs": known})
            under_way.advance(note=f"perplexity {numbers['perplexity']:.3f}")
    found["runs"] = {key: known[key] for key in runs}
    found["points"] = [_summary(point, [known[run.key] for run in members]) for point, members in tried]
    found["chosen"] = min(found["points"], key=lambda point: point["perplexity"])["methods"]
    write_json(record, found)
    return found


def recorded_runs(record: Path) -> dict[str, dict[str, Any]]:
    """The entries of a tuning record for measured runs, by the run's key.

    Raises:
        ResultError: it is damaged.
    """
    runs = read_object(record, "record of a tuning").get("runs")
    if not isinstance(runs, dict) or not all(map(_is_measured, runs.values())):
        raise ResultError(f"record of a tuning {record} is damaged (runs); delete it and run again to recompute it.")
    return runs


def _is_measured(run: Any) -> bool:
    """Whether an entry of a record has the fields that are used in computations."""
    numbers = [run.get(name) for name in ("perplexity", "seconds")] if isinstance(run, dict) else [None]
    return all(isinstance(number, int | float) or number in ("inf", "nan") for number in numbers)


@dataclass(frozen=True)
class TuningJob:
    """A run to measure. code: the digest of the code that measures it."""

    run: Run
    checkpoint: str
    device: str
    batch_size: int
    code: str


def _code(run: Run) -> str:
    """Digest of the code that learns, quantizes and measures a run."""
    return short_hash("".join(stage_digest(stage, run.recipe) for stage in ("rotations", "weights", "runs")))


def _measured(
    jobs: Sequence[TuningJob], workers: int, measure: Callable[["TuningJob"], dict[str, float]]
) -> Iterator[tuple[TuningJob, dict[str, float]]]:
    """The measurements of each job, in the order of completion."""
    if workers == 1 or len(jobs) < 2:
        yield from ((job, measure(job)) for job in jobs)
        return
    waiting = [*jobs]
    count = min(workers, len(jobs))
    with Workers(count, partial(_perform, measure), shared_gpus(jobs[0].device, count)) as processes:
        while waiting or processes.jobs:
            while waiting and processes.free:
                processes.give(waiting.pop(0))
            for job, found in processes.outcomes(1.0):
                if isinstance(found, RotquantError):
                    raise found
                if isinstance(found, str):
                    raise RotquantError(f"{found}.")
                yield job, found


def _perform(measure: Callable[[TuningJob], dict[str, float]], job: TuningJob) -> dict[str, float] | RotquantError:
    """Measure a job in a worker, whose parent shows the progress of all."""
    with silenced():
        try:
            return measure(job)
        except RotquantError as error:
            return error


def measure_run(job: TuningJob) -> dict[str, float]:
    """Learn, quantize and measure a run as the workflow's jobs do; the perplexity of a method that diverges is inf.

    Raises:
        RotquantError: bad input, in one sentence.
    """
    from reproduction.run.stages.rotations import compute_rotations
    from reproduction.run.stages.runs import measure_run as measured_run
    from reproduction.run.stages.weights import compute_weights

    run, checkpoint, device, code = job.run, job.checkpoint, job.device, job.code
    started = time.perf_counter()
    with TemporaryDirectory() as place:
        weights, rotation = Path(place) / "weights", None
        try:
            if run.rotation_key is not None:
                rotation = Path(place) / "rotation"
                learned = compute_rotations(run, checkpoint, rotation, device, code)
                write_json(rotation / ROTATION_RECORD, learned)
            compute_weights(run, checkpoint, weights, device, code, rotation)
            measured, _ = measured_run(run, checkpoint, weights, device, job.batch_size, code)
            found = {name: measured.metrics[name] for name in ("perplexity", "nll")}
        except RotquantError as error:
            if type(error) is not RotquantError:  # only this type can result from the rate, not from bad input
                raise
            found = {"perplexity": math.inf, "nll": math.inf}
    return found | {"seconds": time.perf_counter() - started}


def at_an_end(found: Mapping[str, Any]) -> list[str]:
    """The fields of a record whose chosen value is at an end of its grid, so a better value may be outside."""
    ends = []
    for place, values in found["grid"].items():
        method, field = place.split(".")
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) > 1 and found["chosen"][method][field] in (min(numbers), max(numbers)):
            ends.append(place)
    return ends


def _summary(point: Point, numbers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over the seeds of one point; a nan perplexity counts as infinite."""
    values = [float(one["perplexity"]) for one in numbers]
    mean = fmean(values) if all(map(math.isfinite, values)) else math.inf
    spread = stdev(values) if len(values) > 1 and math.isfinite(mean) else None
    seconds = fmean(one["seconds"] for one in numbers)
    return {"methods": point, "perplexity": mean, "deviation": spread, "seconds": seconds}
