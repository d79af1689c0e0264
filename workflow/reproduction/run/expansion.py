"""Making a plan: every table of a project expanded, with digests of the code behind each result and of what tables say.

It takes seconds, so it is done once per configuration and state of the sources (`reproduction.run.planning`).
"""

import os
from pathlib import Path
from typing import Any, Literal

from reproduction.benchmarks.records import BENCH
from reproduction.benchmarks.registry import benchmark_digest
from reproduction.identity.code import stage_digest
from reproduction.identity.run import Run
from reproduction.run.plan import (
    LARGE,
    Places,
    Plan,
    PlannedCell,
    PlannedPart,
    PlannedRotation,
    PlannedRun,
    PlannedSettings,
    PlannedSpeed,
    PlannedTable,
    PlannedWeights,
)
from reproduction.tables.project import Project, task_set
from reproduction.tables.speed.records import committed_path
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.models.checkpoints import base_folder
from rotquant.text.digests import files_of_text

#: Stages of which all results are made by the same code, whatever the recipe.
STAGES = ("tasks", "tables", "figures", "reports", "speed", "settings", "index")


def places_seen(project: Project) -> Places:
    """The places that a plan of the project looks at without reading them whole."""
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
    return Places(content=tuple(sorted({*checkpoints, *texts, str(BENCH)})), hub=tuple(sorted(hub)))


def make_plan(project: Project, inputs: str, sources: str) -> Plan:
    """The plan of a project.

    Args:
        inputs: digest of all that it follows from. sources: of the files with all code, taken before.

    Raises:
        ConfigError, RecipeError, CheckpointError: what is wrong with a table, a checkpoint or a source.
    """
    shared: dict[str, Any] = {}
    return Plan(
        inputs=inputs,
        sources=sources,
        config=project.config.alone,
        device=project.config.device,
        tracking=project.config.tracking,
        allow_code_execution=project.config.allow_code_execution,
        codes={stage: stage_digest(stage) for stage in STAGES},
        local=tuple(sorted(_local(project, {run.checkpoint for run in project.runs.values()}))),
        tables={name: _table(project, name) for name in project.tables},
        speed={name: _speed(project, name) for name in project.speed},
        settings={name: _settings(project, name) for name in project.settings},
        parts={
            name: _part(project, name, runs) for table in project.tables for name, runs in project.parts(table).items()
        },
        weights={key: _weights(project, runs[0]) for key, runs in project.weights.items()},
        rotations={key: _rotation(project, key) for key in project.rotations},
        tasks={key: run.key for key, run in project.task_sets.items()},
        runs={key: _run(project, run, shared) for key, run in project.runs.items()},
        shared=shared,
    )


def definition(project: Project, name: str) -> str:
    """Digest of what a table follows from besides the numbers computed: YAML, published values, slots, its runs."""
    table = project.table(name)
    published = sorted((*cell, *map(str, printed)) for cell, printed in project.published(table).items())
    slots = {column: project.slot(table, column).model_dump(mode="json") for column in project.columns(table)}
    keys = [run.key for cell in project.cells(name) for run in cell.runs]
    return short_hash(canonical_json([table.model_dump(mode="json"), published, slots, keys]))


def speed_definition(project: Project, name: str) -> str:
    """Digest of everything that the definitions and the papers' numbers behind a page of speed say."""
    tables = [project.speed[source] for source in dict.fromkeys([name, *project.speed[name].sources])]
    texts = [(project.root / table.published).read_text() for table in tables if table.published]
    return short_hash(canonical_json([[table.model_dump(mode="json") for table in tables], texts]))


def _local(project: Project, checkpoints: set[str]) -> set[str]:
    return {name for name in checkpoints if project.checkpoint_path(name) != name or Path(name).is_absolute()}


def _table(project: Project, name: str) -> PlannedTable:
    table, cells = project.table(name), project.cells(name)
    return PlannedTable(
        paper=table.paper,
        definition=definition(project, name),
        figure=project.picture(table),
        columns=project.columns(table),
        quantities=tuple(quantity.name for quantity in project.quantities(table)),
        cells=tuple(PlannedCell(row=c.row, column=c.column, runs=tuple(run.key for run in c.runs)) for c in cells),
        parts=tuple(project.parts(name)),
    )


def _speed(project: Project, name: str) -> PlannedSpeed:
    table = project.speed[name]
    committed = {source: committed_path(project.root, source) for source in table.sources}
    return PlannedSpeed(
        paper=table.paper,
        definition=speed_definition(project, name),
        figure=table.drawing is not None,
        measured=table.device == "gpu",
        cells=tuple(sorted(cell.key for cell in table.cells)),
        kernels=tuple(sorted({benchmark_digest(cell.benchmark) for cell in table.cells})),
        sources={source: None if path is None else str(path) for source, path in committed.items()},
    )


def _settings(project: Project, name: str) -> PlannedSettings:
    """A page of settings changes with what its files say and with the recipes that its cells follow from."""
    found = project.settings[name]
    recipes = {row: recipe.model_dump(mode="json") for row, recipe in found.recipes.items()}
    said = [found.table.model_dump(mode="json"), recipes, [[*vars(cell).values()] for cell in found.cells]]
    return PlannedSettings(paper=found.table.paper, definition=short_hash(canonical_json(said)))


def _part(project: Project, name: str, runs: tuple[Run, ...]) -> PlannedPart:
    table, _, rest = name.partition("-")
    label = table + (f" on {runs[0].checkpoint}" if rest else "")
    tasks = sorted({key for key in map(task_set, runs) if key})
    return PlannedPart(label=label, runs=tuple(run.key for run in runs), tasks=tuple(tasks))


def _weights(project: Project, run: Run) -> PlannedWeights:
    code = stage_digest("weights", run.recipe)
    return PlannedWeights(label=_place(project, run), code=code, run=run.key, rotation=run.rotation_key)


def _rotation(project: Project, key: str) -> PlannedRotation:
    run = project.rotations[key][0]
    return PlannedRotation(label=_place(project, run), code=stage_digest("rotations", run.recipe), run=run.key)


def _run(project: Project, run: Run, shared: dict[str, Any]) -> PlannedRun:
    """A run for its job; its large fields go to `shared` by their digest."""
    fields = run.model_dump(mode="json")
    for name in LARGE:
        value = fields[name]
        fields[name] = short_hash(canonical_json(value))
        shared[fields[name]] = value
    cell = project.places[run.key]
    batch_size = project.slot(project.table(cell.table), cell.column).batch_size
    return PlannedRun(
        label=f"{_place(project, run)}, {run.metric.kind.replace('_', ' ')}",
        fields=fields,
        code=stage_digest("runs", run.recipe),
        batch_size=batch_size,
        weights=run.weights_key,
        tasks=task_set(run),
    )


def _place(project: Project, run: Run) -> str:
    cell = project.places[run.key]
    return f"{cell.row} on {cell.column}, seed {run.seed}"
