"""A project of two tiny models with tables of all kinds and made-up results, of which most formats are parts."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from reproduction.identity.names import HISTORY_FILE, MODEL, ROTATION_RECORD, ROTATIONS_FILE, WEIGHTS_RECORD
from reproduction.identity.run import signed
from reproduction.planning.current import current_plan
from reproduction.run.plan import Plan
from reproduction.run.results import RunResult, write_result
from reproduction.run.samples import pack
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import quantities
from rotquant.foundation.environment import environment
from rotquant.foundation.files import file_digest, short_hash, write_json
from tests.helpers.project import TABLES, Copy
from tests.helpers.reports import TEXT
from tests.helpers.settings_tables import PUBLISHED, TABLE
from tests.helpers.speed import SPEED, record
from tests.trials.projects import tiny

NAME = "quarot_table1"
SPEED_NAME = "quarot_table14"
SETTINGS = "workflow/papers/quarot/settings.yaml"
SPEEDS = "workflow/papers/quarot/speed.yaml"
PRINTED = "row,column,metric,value,unit\nBaseline,Llama-2-7B,perplexity,5.47,ppl\n"
PRINTED_SPEED = (
    "row,column,metric,gpu,value,unit\n4096x4096 batch 1,INT4,time,NVIDIA RTX 3090,1.2,ms\n"
    "4096x4096 batch 1,FP16,time,NVIDIA RTX 3090,2.5,ms\n"
)


def make(root: Path) -> Copy:
    """The project, its results written as its stages would, without computing any."""
    copy = tiny(root)
    for path in [*root.glob("workflow/papers/*/published/*"), *root.glob("config/*.md"), root / "config/paper.yaml"]:
        path.unlink()  # of the shipped tables, which are not here
    for path in [*root.glob("models/*/*token*"), *root.glob("models/*/generation*")]:
        path.unlink()  # no model is loaded, and each file of an example is written for each case
    copy.write("workflow/papers/quarot/published/small.csv", PRINTED)
    rows = [{"name": "QuaRot", "as_in": {"table": NAME, "row": "QuaRot-128G"}, "differs": {"Cache": "A misprint."}}]
    told = json.loads(json.dumps(TABLE)) | {"rows": [*rows, TABLE["rows"][1]]}
    about = {"paper": "quarot", "title": TABLES["title"]}
    copy.write(SETTINGS, yaml.safe_dump({**about, "tables": [told]}, sort_keys=False))
    copy.write("workflow/papers/quarot/published/settings.csv", PUBLISHED)
    copy.write(SPEEDS, yaml.safe_dump(SPEED, sort_keys=False))
    copy.write("workflow/papers/quarot/published/table14.csv", PRINTED_SPEED)
    with inside(root):
        _results(root)
    return copy


def _results(root: Path) -> None:
    project = load_project(root=root)
    record(root / f"results/bench/some-gpu/{SPEED_NAME}.json", project.table(SPEED_NAME))
    record(root / f"results/bench/another-gpu/{SPEED_NAME}.json", project.table(SPEED_NAME))
    plan = current_plan(root)
    for learned in plan.rotations:
        _rotation(root, plan, learned)
    for stored in plan.weights:
        _weights(root, plan, stored)
    for key in plan.runs:
        _run(root, plan, key)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """While open, the working folder is this one."""
    earlier = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(earlier)


def _about(code: str) -> dict[str, Any]:
    told = {**environment(), "device": "cpu", "gpu": None, "code_digest": code, "seconds": 1.5}
    return {**told, "corpora": {"evaluation": TEXT}, "stages": {"rounding": 1.0}}


def _rotation(root: Path, plan: Plan, key: str) -> None:
    folder, planned = root / plan.results().rotation(key), plan.rotations[key]
    folder.mkdir(parents=True)
    (folder / ROTATIONS_FILE).write_bytes(b"matrices")
    history = [{"step": step, "loss": 3.0 - step / 10, "learning_rate": 0.1} for step in range(3)]
    write_json(folder / HISTORY_FILE, history)
    run = plan.run(planned.run)
    ends = {"first": history[0], "last": history[-1], "seed": run.seed, "checkpoint": run.checkpoint}
    told = {**_about(planned.code), **ends, "digest": file_digest(folder / ROTATIONS_FILE)}
    told["learning"] = run.recipe.learner.model_dump(mode="json") if run.recipe.learner else {}
    write_json(folder / ROTATION_RECORD, signed(told, run.rotation_identity() or {}))


def _weights(root: Path, plan: Plan, key: str) -> None:
    planned, folder = plan.weights[key], root / plan.results().weights(key)
    run = plan.run(planned.run)
    told: dict[str, Any] = {**_about(planned.code), "digests": {"quantized.safetensors": short_hash(key)}}
    if planned.rotation:
        learned = root / plan.results().rotation(planned.rotation)
        told["rotation"] = json.loads((learned / ROTATION_RECORD).read_text())
    write_json(folder / WEIGHTS_RECORD, signed(told, run.weights_identity() or {}))
    write_json(folder / HISTORY_FILE, [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.9}])
    (folder / MODEL).mkdir()


def _run(root: Path, plan: Plan, key: str) -> None:
    planned, run = plan.runs[key], plan.run(key)
    weights = (
        json.loads((root / plan.results().weights(planned.weights) / WEIGHTS_RECORD).read_text())
        if planned.weights
        else None
    )
    losses = [2.25, 2.35]
    value = math.exp(sum(losses) / 2)
    metrics = {one.name: value for one in quantities(run.metric)} | {"nll": 2.3, "tokens": 30.0}
    write_result(
        root / plan.results().run(key),
        RunResult(run, metrics, _about(planned.code), weights, samples=pack({"perplexity": losses})),
    )


def some_run(project: Project) -> str:
    """The key of a run that has stored weights and learned rotations."""
    return next(run.key for run in all_runs(project) if run.rotation_key)


def all_runs(project: Project) -> Iterator[Any]:
    """The runs of the project's table."""
    return (run for cell in project.cells(NAME) for run in cell.runs)
