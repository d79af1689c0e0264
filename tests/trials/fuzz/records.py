"""Formats that the project writes and reads back: plans, run files, records, tables' files, rendered reports."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from reproduction.commands.report import make_report
from reproduction.frame.speed import read_numbers
from reproduction.identity.names import RESULTS, Results
from reproduction.identity.run import Run
from reproduction.metrics.settings import TrainingLoss
from reproduction.planning.current import current_plan
from reproduction.render.figures.arrays import array_of, history_of
from reproduction.render.html.pages import render_pages
from reproduction.render.pages.benchmarks import speed_report
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.trained import last_step
from reproduction.run import archives
from reproduction.run.plan import Plan, config_file, read_plan
from reproduction.run.results import read_result
from reproduction.run.stages import jobs
from reproduction.run.stages.measures import Subject, training_loss
from reproduction.scoreboard import standings as scoreboard
from reproduction.sources import load_project, source_of
from reproduction.tables.project import Project
from rotquant.foundation.errors import ResultError
from tests.helpers.speed import SPEED
from tests.trials.fuzz.example import NAME, SPEED_NAME, inside, some_run
from tests.trials.fuzz.formats import Format, content_of, kinds
from tests.trials.trial import REPOSITORY

TABLES, PRINTED = "workflow/papers/quarot/[ts]*.*", "workflow/papers/quarot/published/*"
MACHINES = "workflow/resources/machines.json"


def formats(root: Path) -> list[Format]:
    """Of a project with results that lies at `root`."""
    with inside(root):
        plan = current_plan(root)
        project = load_project(root=root)
        table = project.table(NAME)
        make_report(project, table, source_of(table).collect(project, table))
        (root / "reports/index.md").write_text(scoreboard.index(project))
        (root / f"reports/figures/{NAME}.svg").parent.mkdir(exist_ok=True)
        (root / f"reports/figures/{NAME}.svg").write_text(DRAWING)
        page = root / f"reports/{NAME}.md"
        page.write_text(f"{page.read_text()}\n![figure](figures/{NAME}.svg)\n")
        return [*_plans(root, plan, project), *_results(root, project), *_rendered(root)]


DRAWING = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd" [<!ENTITY a "a">]>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="10" height="10">
<g id="a" onclick="x()"><use xlink:href="#a"/><text>&a;</text></g></svg>
"""


def _plans(root: Path, plan: Plan, project: Project) -> list[Format]:
    """Plans, and records of what results are computed on."""
    small = content_of(root, "config/*.yaml", "workflow/papers/**/*", "models/**/*", "text/*", "results/**/*.json")
    small |= content_of(root, "results/**/rotations.safetensors", "results/plans/*")
    (seen,) = (name for name in small if name.endswith(".seen"))
    planned = str(plan.path)
    run = some_run(project)
    learned, stored = str(plan.run(run).rotation_key), str(plan.run(run).weights_key)
    results = plan.results()
    alone = {planned: small[planned]}

    def use(folder: Path) -> None:
        read = read_plan(folder / planned)
        config_file(folder, read)
        read.results()
        for key in read.runs:
            read.run(key)
            read.place(read.run(key))

    def refused(key: str) -> Callable[[Path], object]:
        """A job that reads a record of what it needs, up to where it would compute."""

        def job(_: Path) -> None:
            ready = mock.patch.object(jobs, "_check_inputs", side_effect=_ReadyError)
            with ready, contextlib.suppress(_ReadyError):
                jobs.make(plan, key, results)

        return job

    needed = content_of(root, f"{results.weights(stored)}/*", f"{results.rotation(learned)}/*")
    needed |= {f"{results.weights(stored)}/model/rotquant.json": b"{}"}
    records = [f"{results.weights(stored)}/weights.json", f"{results.rotation(learned)}/rotation.json"]
    return [
        Format("plans", alone, {planned: "plan"}, use, 1.5),
        Format("places of plans", small, {seen: "json"}, lambda folder: current_plan(folder, write=False), 0.3, True),
        Format("records of weights", needed, {records[0]: "json"}, refused(run)),
        Format("records of rotations", needed, {records[1]: "json"}, refused(stored)),
        *_archives(root, plan),
    ]


class _ReadyError(Exception):
    """A job has read what it needs."""


def _archives(root: Path, plan: Plan) -> list[Format]:
    """Files of results, as they are received where none of these are: damaged themselves, and what is in them."""
    files, _, _ = archives.export(plan, [NAME], root / "archives", partial=False)
    found = content_of(root, *(str(path.relative_to(root)) for path in files))
    rows = {path.stem: archives._read(path, path.stem.rpartition("-")[2]) for path in files}
    written = {f"{name}.json": json.dumps(content).encode() for name, content in rows.items()}

    def received(folder: Path) -> None:
        archives.import_(plan, [folder / name for name in found])

    def rewritten(folder: Path) -> None:
        """A file whose rows somebody has changed."""
        for name in written:
            path = folder / name
            try:
                if path.is_file():  # no pipe, which nobody writes
                    archives._write(path.with_suffix(".parquet"), json.loads(path.read_bytes()))
            except Exception:  # which is no file of such rows
                continue
            archives.import_(plan, [path.with_suffix(".parquet")])

    return [
        Format("files of results", found, dict.fromkeys(found, "bytes"), received, rewritten=True),
        Format("results in files", written, dict.fromkeys(written, "json"), rewritten, rewritten=True),
    ]


def _results(root: Path, project: Project) -> list[Format]:
    """Run files with the history behind them, as tables, figures and pages read them."""
    key = some_run(project)
    run = project.cells(NAME)[0].runs[0]
    files = content_of(root, "config/config.yaml", TABLES, "models/**/*", "text/*", "results/runs/*", PRINTED)
    files |= content_of(root, "results/rotations/*/history.json", "reports/*.md")
    results = Results(RESULTS, project.names)
    learned = next(one.rotation_key for one in _runs(project) if one.key == key)
    history = f"{results.rotation(str(learned))}/history.json"
    own = str(results.run(key))
    one = {own: files[own]}

    def page(folder: Path) -> None:
        found = load_project(root=folder)
        table = found.table(NAME)
        make_report(found, table, source_of(table).collect(found, table))

    def result(folder: Path) -> None:
        found = read_result(folder / own)
        repr((found.value, found.seconds, found.rotation))

    def histories(folder: Path) -> None:
        found = load_project(root=folder)
        history_of(found, key)
        with contextlib.suppress(ResultError):
            array_of(found, key, "nothing")

    return [
        Format("run files", one, kinds(*one), result, 2.0),
        Format("run files behind pages", files, kinds(str(results.run(run.key)), own), page),
        Format("histories of rotations", files, kinds(history), histories, 0.5),
        _training(run),
    ]


def _training(run: Run) -> Format:
    """The history of a training, which a metric of it and pages read beside the weights."""
    metric = TrainingLoss()
    nothing: Any = None

    def read(folder: Path) -> None:
        last_step(folder / "history.json")
        subject = Subject(run, nothing, nothing, nothing, nothing, 1, weights=folder / "model")
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

    def speed(folder: Path) -> None:
        project = load_project(root=folder)
        table = project.table(SPEED_NAME)
        measured = read_numbers(project, table)
        markdown(speed_report(project, table, measured))
        _ = measured.frame

    def gallery(folder: Path) -> None:
        from reproduction.commands.report import gallery as copy

        copy(Path("docs/gallery"))
        copy(Path("docs/gallery/shipped"), Path("docs/gallery"))

    def pages(folder: Path) -> None:
        render_pages(load_project(root=folder))
        gallery(folder)

    without = {name: content for name, content in files.items() if not name.startswith("results/speed")}
    return [
        Format("records of times", files, kinds(f"results/speed/{SPEED_NAME}.json"), speed),
        Format("committed records of times", without, kinds(bench, bench.replace("some", "another")), speed),
        Format("records of machines", files, kinds(MACHINES), scoreboard.machine_noise, 0.5),
        Format(
            "rendered reports", files, {f"reports/{NAME}.md": "md", f"reports/figures/{NAME}.svg": "svg"}, pages, 0.7
        ),
    ]
