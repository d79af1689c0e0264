"""Making a plan: every table of a project expanded, with digests of the code behind each result and of what tables say.

It takes seconds, so it is done once per configuration and state of the sources (`rotquant.study.planning`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rotquant.bench.records import BENCH
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.recipes.recipe import Run
from rotquant.study.digests import benchmark_digest, code_digest
from rotquant.study.plan import (
    LARGE,
    Places,
    Plan,
    PlannedBatch,
    PlannedCell,
    PlannedGroup,
    PlannedRotation,
    PlannedRun,
    PlannedSpeed,
    PlannedTable,
)
from rotquant.study.project import Project, task_set
from rotquant.study.speed.records import committed_path

#: Stages of which all results are made by the same code, whatever the recipe.
STAGES = ("tasks", "tables", "figures", "reports", "speed", "index")


def places_seen(project: Project) -> Places:
    """The places that a plan of the project looks at without reading them whole."""
    checkpoints = {slot.checkpoint for slot in project.config.slots.values()}
    corpora = {corpus.path for corpus in project.config.corpora.values() if corpus.source == "local"}
    return Places(content=tuple(sorted({*checkpoints, str(BENCH)})), existence=tuple(sorted(filter(None, corpora))))


def make_plan(project: Project, inputs: str, sources: str) -> Plan:
    """The plan of a project.

    Args:
        inputs: digest of all that it follows from. sources: of the files with all code, taken before.

    Raises:
        ConfigError, RecipeError, CheckpointError: what is wrong with a table, a checkpoint or a source.
    """
    parts: dict[str, Any] = {}
    return Plan(
        inputs=inputs,
        sources=sources,
        config=project.config.alone,
        device=project.config.device,
        tracking=project.config.tracking,
        codes={stage: code_digest(stage) for stage in STAGES},
        local=tuple(sorted(_local(project))),
        tables={name: _table(project, name) for name in project.tables},
        speed={name: _speed(project, name) for name in project.speed},
        groups={key: _group(project, key) for key in project.groups},
        batches={key: _batch(project, key) for key in project.batches},
        rotations={key: _rotation(project, key) for key in project.rotations},
        tasks={key: run.key for key, run in project.task_sets.items()},
        runs={key: _run(project, run, parts) for key, run in project.runs.items()},
        parts=parts,
    )


def definition(project: Project, name: str) -> str:
    """Digest of what a table's files say besides the numbers computed: its YAML, the published values, the slots."""
    table = project.table(name)
    published = sorted((*cell, *map(str, printed)) for cell, printed in project.published(table).items())
    slots = {column: project.slot(table, column).model_dump(mode="json") for column in project.columns(table)}
    return short_hash(canonical_json([table.model_dump(mode="json"), published, slots]))


def speed_definition(project: Project, name: str) -> str:
    """Digest of everything that the definitions and the papers' numbers behind a page of speed say."""
    tables = [project.speed[source] for source in dict.fromkeys([name, *project.speed[name].sources])]
    texts = [(project.root / table.published).read_text() for table in tables if table.published]
    return short_hash(canonical_json([[table.model_dump(mode="json") for table in tables], texts]))


def _local(project: Project) -> set[str]:
    checkpoints = {run.checkpoint for run in project.runs.values()}
    return {name for name in checkpoints if project.checkpoint_path(name) != name or Path(name).is_absolute()}


def _table(project: Project, name: str) -> PlannedTable:
    table, cells = project.table(name), project.cells(name)
    keys = [run.key for cell in cells for run in cell.runs]
    return PlannedTable(
        paper=table.paper,
        definition=definition(project, name),
        figure=table.figure is not None,
        columns=project.columns(table),
        quantities=tuple(quantity.name for quantity in project.quantities(table)),
        cells=tuple(PlannedCell(row=c.row, column=c.column, runs=tuple(run.key for run in c.runs)) for c in cells),
        groups=tuple(sorted({project.group_of[key] for key in keys})),
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


def _group(project: Project, key: str) -> PlannedGroup:
    first, *others = runs = project.groups[key]
    more = f" and {len(others)} more" if others else ""
    return PlannedGroup(
        label=_place(project, first) + more,
        runs=tuple(run.key for run in runs),
        batch=project.batch_of(first),
        tasks=_tasks(runs),
    )


def _batch(project: Project, key: str) -> PlannedBatch:
    members = project.batches[key]
    runs = [run for users in members.values() for run in users]
    group = project.measured_with(key)
    return PlannedBatch(
        label=_place(project, runs[0]) + (", measured at once" if group else ""),
        code=code_digest("weights", runs[0].recipe),
        weights={weights: users[0].key for weights, users in members.items()},
        rotations=tuple(sorted({run.rotation_key for run in runs if run.rotation_key})),
        group=group,
        tasks=() if group is None else _tasks(project.groups[group]),
    )


def _rotation(project: Project, key: str) -> PlannedRotation:
    run = project.rotations[key][0]
    label = f"{_place(project, run)}, seed {run.seed}"
    return PlannedRotation(label=label, code=code_digest("rotations", run.recipe), run=run.key)


def _run(project: Project, run: Run, parts: dict[str, Any]) -> PlannedRun:
    """A run for its job; its large fields go to `parts` by their digest."""
    fields = run.model_dump(mode="json")
    for name in LARGE:
        value = fields[name]
        fields[name] = short_hash(canonical_json(value))
        parts[fields[name]] = value
    cell = project.places[run.key]
    batch_size = project.slot(project.table(cell.table), cell.column).batch_size
    return PlannedRun(fields=fields, code=code_digest("runs", run.recipe, run.metric), batch_size=batch_size)


def _place(project: Project, run: Run) -> str:
    cell = project.places[run.key]
    return f"{cell.row} on {cell.column}"


def _tasks(runs: Iterable[Run]) -> tuple[str, ...]:
    return tuple(sorted({key for key in map(task_set, runs) if key}))
