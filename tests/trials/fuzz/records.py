"""Formats that the project writes and reads back: plans, run files, records, tables' files, rendered reports, marks."""

import contextlib
import json
from pathlib import Path
from typing import Any

from reproduction.run.states import MARKS, States

from reproduction.commands.tracking import make_report
from reproduction.frame import values
from reproduction.frame.speed import read_numbers
from reproduction.identity.run import Run
from reproduction.metrics.settings import TrainingLoss
from reproduction.planning.current import current_plan
from reproduction.rehearsal.running import read_rehearsal, write_page
from reproduction.render.figures.arrays import array_of, history_of
from reproduction.render.html.pages import render_pages
from reproduction.render.pages.benchmarks import speed_report
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.trained import last_step
from reproduction.run.archives import archive_of, pack, unpack
from reproduction.run.plan import Plan, config_file, read_plan
from reproduction.run.results import part_path, read_result, rotation_path, run_path, weights_path
from reproduction.run.stages.jobs import record_part, result_current, rotation_current, weights_current
from reproduction.run.stages.measures import Subject, training_loss
from reproduction.run.tuning import recorded_runs
from reproduction.scoreboard import standings as scoreboard
from reproduction.sources import load_project, source_of
from reproduction.tables.project import Project
from tests.helpers.speed import SPEED
from tests.trials.fuzz.example import NAME, SPEED_NAME, inside, parts, some_run
from tests.trials.fuzz.formats import Format, content_of, kinds
from tests.trials.trial import REPOSITORY

TUNING = "workflow/resources/tuning/llm-qat-Llama-2-7B.json"
TABLES, PRINTED = "workflow/papers/quarot/[ts]*.*", "workflow/papers/quarot/published/*"
MACHINES = "workflow/resources/machines.json"


def formats(root: Path) -> list[Format]:
    """Of a project with results that lies at `root`."""
    with inside(root):
        plan = current_plan(root)
        parts(root, plan)
        project = load_project(root=root)
        numbers, _ = values.collect(project, project.table(NAME))
        values.write_values(root, NAME, numbers)
        table = project.table(NAME)
        make_report(project, table, source_of(table).agreed(project, table), None)
        for name, text in {"reports/index.md": scoreboard.index(project), f"{MARKS}/{part_path('x')}": "state"}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (root / f"reports/figures/{NAME}.svg").parent.mkdir(exist_ok=True)
        (root / f"reports/figures/{NAME}.svg").write_text(DRAWING)
        page = root / f"reports/{NAME}.md"
        page.write_text(f"{page.read_text()}\n![figure](figures/{NAME}.svg)\n")
        return [*_plans(root, plan, project), *_results(root, project), *_rendered(root)]


REHEARSAL = """{"shape": "tiny", "layers": 2, "gpu": null, "environment": {"cpu": "one"}, "kinds": [{"name": "gptq",
"cells": 3, "run": "0123456789abcdef", "code": "0123456789abcdef", "state": "done", "value": 5.5, "steps": [{"name":
"weights", "seconds": 1.5, "gpu_bytes": 1, "host_bytes": 2, "stages": {"GPTQ": [1.0, 7]}, "problem": ""}]}]}"""
DRAWING = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd" [<!ENTITY a "a">]>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="10" height="10">
<g id="a" onclick="x()"><use xlink:href="#a"/><text>&a;</text></g></svg>
"""


def _plans(root: Path, plan: Plan, project: Project) -> list[Format]:
    """Plans, and the records by which it is decided what of a plan is current."""
    small = content_of(root, "config/*.yaml", "workflow/papers/**/*", "models/**/*", "text/*", "results/**/*.json")
    small |= content_of(root, "results/**/rotations.safetensors", f"{MARKS}/**/*", "results/plans/*")
    (seen,) = (name for name in small if name.endswith(".seen"))
    planned = str(plan.path)
    run = some_run(project)
    learned, stored = str(plan.run(run).rotation_key), str(plan.run(run).weights_key)
    part = next(name for name, one in plan.parts.items() if run in one.runs)
    alone = {planned: small[planned]}

    def use(folder: Path) -> None:
        read = read_plan(folder / planned)
        config_file(folder, read)
        for key in read.runs:
            read.run(key)
            read.place(read.run(key))

    def states(folder: Path) -> None:
        found = States(plan)
        for name in plan.parts:
            found.part(name), found.part_sign(name)
        found.table(NAME), found.page(NAME), found.index()

    def current(folder: Path) -> None:
        rotation_current(plan, learned)
        weights_current(plan, stored)
        result_current(plan, run)

    own = content_of(root, f"{weights_path(stored)}/*", f"{rotation_path(learned)}/*", str(run_path(run)))
    own |= {name: content for name, content in small.items() if name.startswith("results/tasks")}
    measured = content_of(root, *(str(run_path(key)) for key in plan.parts[part].runs), str(part_path(part)))
    marked = content_of(root, f"{MARKS}/**/*")
    records = [f"{weights_path(stored)}/weights.json", f"{rotation_path(learned)}/rotation.json", str(run_path(run))]
    return [
        Format("plans", alone, {planned: "plan"}, use, 1.5),
        Format("places of plans", small, {seen: "json"}, lambda folder: current_plan(folder, write=False), 0.3, True),
        Format("records of weights", own, {records[0]: "json"}, current),
        Format("records of rotations", own, {records[1]: "json"}, current),
        Format("run files that are current", own, {records[2]: "json"}, current),
        Format(
            "records of measured parts",
            measured,
            {str(part_path(part)): "json"},
            lambda folder: (record_part(plan, part, dict.fromkeys(plan.parts[part].runs, 1.0)), states(folder)),
            rewritten=True,
        ),
        Format("marks of jobs", marked, {f"{MARKS}/{part_path('x')}": "txt"}, states, 0.5),
        _tasks(own, plan, run),
        _archive(root, plan, part),
    ]


def _archive(root: Path, plan: Plan, part: str) -> Format:
    """The archive of a part of a table, as it is received where none of its results are."""
    name = archive_of(plan, "measured", part)
    pack(plan, Path(name))
    archive = content_of(root, name)
    (root / name).unlink()
    return Format("archives of results", archive, {name: "bytes"}, lambda folder: unpack(plan, [folder / name]))


def _tasks(files: dict[str, bytes], plan: Plan, run: str) -> Format:
    """A record of zero-shot tasks, by which it is decided whether a run that answered them is current."""
    record = REPOSITORY / "workflow/resources/models/tasks.json"
    name = "results/tasks/0123456789abcdef.json"
    told = b'{"suite": "shipped", "lm_eval": "0.4.13", "tasks": {"next_word": {"definition": "ab", "items": 3}}}'
    answered = plan.runs[run].model_copy(update={"tasks": "0123456789abcdef"})
    changed = plan.model_copy(update={"runs": {**plan.runs, run: answered}})
    assert record.exists()
    return Format(
        "records of tasks", {**files, name: told}, {name: "json"}, lambda folder: result_current(changed, run)
    )


def _results(root: Path, project: Project) -> list[Format]:
    """Run files with the history behind them, as tables, figures and pages read them."""
    key = some_run(project)
    run = project.cells(NAME)[0].runs[0]
    files = content_of(root, "config/config.yaml", TABLES, "models/**/*", "text/*", "results/runs/*", PRINTED)
    files |= content_of(root, "results/tables/*", "results/rotations/*/history.json", "reports/*.md")
    history = f"{rotation_path(next(one.rotation_key for one in _runs(project) if one.key == key))}/history.json"
    one = {str(run_path(key)): files[str(run_path(key))]}
    table = {f"results/tables/{NAME}{suffix}": suffix[1:] for suffix in (".csv", ".parquet")}
    tables = {name: files[name] for name in table}

    def page(folder: Path) -> None:
        found = load_project(root=folder)
        table = found.table(NAME)
        make_report(found, table, source_of(table).agreed(found, table), None)
        source_of(table).collect(found, table)

    def result(folder: Path) -> None:
        found = read_result(folder / run_path(key))
        repr((found.value, found.seconds, found.rotation))

    def learned(folder: Path) -> None:
        found = load_project(root=folder)
        history_of(found, key)
        with contextlib.suppress(values.ResultError):
            array_of(found, key, "nothing")

    def frames(folder: Path) -> None:
        for name in table:
            values.read_frame(folder / name, values.NAMES)
        values.read_values(folder, NAME)

    return [
        Format("run files", one, kinds(*one), result, 2.0),
        Format("run files behind pages", files, kinds(str(run_path(run.key)), str(run_path(key))), page),
        Format("histories of rotations", files, kinds(history), learned, 0.5),
        _training(run),
        Format("tables' numbers", tables, table, frames, 1.5),
        Format("tables' numbers behind pages", files, table, page, 0.5),
    ]


def _training(run: Run) -> Format:
    """The history of a training, which a metric of it and pages read beside the weights."""
    metric = TrainingLoss()
    nothing: Any = None

    def read(folder: Path) -> None:
        last_step(folder / "history.json")
        subject = Subject(run, nothing, nothing, nothing, nothing, 1, weights=folder)
        training_loss(metric, subject)

    steps = [{"step": step, "loss": 3.0 - step / 10, "from_uniform": step / 1000} for step in range(30)]
    return Format("histories of trainings", {"history.json": json.dumps(steps).encode()}, kinds("history.json"), read)


def _runs(project: Project) -> list:
    return [run for cell in project.cells(NAME) for run in cell.runs]


def _rendered(root: Path) -> list[Format]:
    """Records of times, and what pages are made of."""
    files = content_of(root, "config/*.yaml", TABLES, PRINTED, "text/*", "results/bench/**/*", "reports/**/*")
    files[MACHINES] = (REPOSITORY / MACHINES).read_bytes()
    bench = f"results/bench/some-gpu/{SPEED_NAME}.json"
    files[f"results/speed/{SPEED_NAME}.json"] = files[bench]
    assert SPEED["tables"][0]["id"] == SPEED_NAME
    tuning = {TUNING: (REPOSITORY / TUNING).read_bytes()}

    def speed(folder: Path) -> None:
        project = load_project(root=folder)
        table = project.table(SPEED_NAME)
        measured = read_numbers(project, table)
        markdown(speed_report(project, table, measured))
        _ = measured.frame

    def rehearsal(folder: Path) -> None:
        write_page(folder / "done.md", read_rehearsal(folder / "done.json"))

    def gallery(folder: Path) -> None:
        from reproduction.commands.report import gallery as copy

        copy(Path("docs/gallery"))

    def pages(folder: Path) -> None:
        render_pages(load_project(root=folder))
        gallery(folder)

    without = {name: content for name, content in files.items() if not name.startswith("results/speed")}
    return [
        Format("records of times", files, kinds(f"results/speed/{SPEED_NAME}.json"), speed),
        Format("committed records of times", without, kinds(bench, bench.replace("some", "another")), speed),
        Format("records of machines", files, kinds(MACHINES), scoreboard.machine_noise, 0.5),
        Format("records of rehearsals", {"done.json": REHEARSAL.encode()}, kinds("done.json"), rehearsal, 0.5),
        Format("records of tunings", tuning, kinds(TUNING), lambda folder: recorded_runs(folder / TUNING), 0.5),
        Format(
            "rendered reports", files, {f"reports/{NAME}.md": "md", f"reports/figures/{NAME}.svg": "svg"}, pages, 0.7
        ),
    ]
