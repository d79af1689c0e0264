"""Expansion of all tables of a project into a plan, with digests of tables and of the code of each result.

Expansion takes seconds, so it is done once per configuration and state of the sources (`planning.current`).
"""

import os
from pathlib import Path
from typing import Any, Literal, cast

from reproduction.benchmarks.records import BENCH
from reproduction.corpora.digests import files_of_text
from reproduction.corpora.packages import PACKAGES
from reproduction.identity.code import code_digest, stage_digest, stage_entries
from reproduction.identity.run import Run
from reproduction.run.plan import LARGE, Places, Plan, PlannedRotation, PlannedRun, PlannedTable, PlannedWeights
from reproduction.sources import source_of
from reproduction.sources import sources as all_sources
from reproduction.tables.project import Project, task_set
from reproduction.tables.tables import RunTable
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.models.deltas import base_folder


def places_seen(project: Project) -> Places:
    """The places that a plan of the project depends on without reading them whole."""
    checkpoints = {slot.checkpoint for slot in project.config.slots.values()}
    bases = (base_folder(project.checkpoint_path(name)) for name in checkpoints)
    checkpoints |= {os.path.relpath(base, project.root.resolve()) for base in bases if base is not None}
    portions = {portion for run in project.runs.values() for portion in run.portions}
    corpora = project.config.corpora
    texts = {str(path) for name, split, size in portions for path in files_of_text(corpora[name], split, size)}
    every = (part for name in {name for name, *_ in portions} for part in corpora[name].sources)
    hub: set[tuple[Literal["model", "dataset"], str]] = {
        ("dataset", str(corpus.path)) for corpus in every if corpus.source == "hub"
    }
    hub |= {("model", name) for name in checkpoints - _local(project, checkpoints)}
    metrics = [cast(ZeroShot, run.metric) for run in project.task_sets.values()]
    tasks = {str(Path(metric.path).expanduser()) for metric in metrics if metric.path is not None}
    shipped = (*PACKAGES["test"], *PACKAGES["validation"]) if any(one.suite == "shipped" for one in metrics) else ()
    packages = {*shipped, *["lm-eval"] * any(one.suite == "paper" for one in metrics)}
    papers = map(str, project.config.folders(project.root))
    content = tuple(sorted({*checkpoints, *texts, *tasks, *papers, str(BENCH)}))
    return Places(content=content, hub=tuple(sorted(hub)), packages=tuple(sorted(packages)))


def make_plan(project: Project, inputs: str, sources: str) -> Plan:
    """The plan of a project.

    Args:
        inputs: digest of everything that it depends on. sources: digest of all code, taken before.

    Raises:
        ConfigError, RecipeError, CheckpointError: an error in a table, a checkpoint or a source.
    """
    shared: dict[str, Any] = {}
    tables = project.of(RunTable).values()
    without_cells = (table for table in tables if project.asked(table) and not project.cells(table.id))
    impossible = {table.id: project.remarks(table)[0] for table in without_cells}
    renders = (type(source).__module__ for source in all_sources().values())  # which the scoreboard does
    return Plan(
        inputs=inputs,
        sources=sources,
        config=project.config.alone,
        device=project.config.device,
        tracking=project.config.tracking,
        allow_code_execution=project.config.allow_code_execution,
        codes={"tasks": stage_digest("tasks"), "index": code_digest(*stage_entries("index"), *renders)},
        local=tuple(sorted(_local(project, {run.checkpoint for run in project.runs.values()}))),
        shown=tuple(
            sorted({one.checkpoint for name, one in project.config.slots.items() if project.is_only_shown(name)})
        ),
        small=tuple(sorted(filter(project.is_small, {run.checkpoint for run in project.runs.values()}))),
        names=project.names,
        tables={name: _table(project, name) for name in project.tables if name not in impossible},
        weights={key: _weights(project, runs[0]) for key, runs in project.weights.items()},
        rotations={key: _rotation(project, key) for key in project.rotations},
        tasks={key: run.key for key, run in project.task_sets.items()},
        runs={key: _run(project, run, shared) for key, run in project.runs.items()},
        shared=shared,
        left_out={**project.left_out, **impossible},
        fits={name: one.model_dump(mode="json") for name, one in project.fittings.items() if one},
    )


def _local(project: Project, checkpoints: set[str]) -> set[str]:
    return {name for name in checkpoints if project.checkpoint_path(name) != name or Path(name).is_absolute()}


def _table(project: Project, name: str) -> PlannedTable:
    table = project.table(name)
    source = source_of(table)
    codes = {output: code_digest(*modules) for output, modules in source.code.items()}
    data = {"source": source.name, "paper": table.paper, "codes": codes, **source.planned(project, table)}
    return PlannedTable.model_validate(data)


def _weights(project: Project, run: Run) -> PlannedWeights:
    code = stage_digest("weights", run.recipe)
    return PlannedWeights(label=_place(project, run), code=code, run=run.key, rotation=run.rotation_key)


def _rotation(project: Project, key: str) -> PlannedRotation:
    run = project.rotations[key][0]
    return PlannedRotation(label=_place(project, run), code=stage_digest("rotations", run.recipe), run=run.key)


def _run(project: Project, run: Run, shared: dict[str, Any]) -> PlannedRun:
    """Prepare a run for its job; its large fields go to `shared` by their digest."""
    fields = run.model_dump(mode="json")
    for name in LARGE:
        value = fields[name]
        fields[name] = short_hash(canonical_json(value))
        shared[fields[name]] = value
    cell = project.places[run.key]
    batch_size = project.slot(project.one(RunTable, cell.table), cell.column).batch_size
    return PlannedRun(
        label=f"{_place(project, run)}, {run.metric.kind.replace('_', ' ')}",
        fields=fields,
        code=stage_digest("runs", run.recipe),
        batch_size=batch_size,
        weights=run.weights_key,
        tasks=task_set(run),
        unquantized=run.recipe.is_baseline,
    )


def _place(project: Project, run: Run) -> str:
    cell = project.places[run.key]
    return f"{cell.row} on {cell.column}, seed {run.seed}"
