"""A store that projects and machines share: each project's runs apart, none lost, none twice; without a real server."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.frame.values import collect
from reproduction.render import tracking
from reproduction.render.pages.runs import runs_report
from reproduction.render.tracking import TrackingError, papers, runs, store
from reproduction.render.tracking.location import Location, printable
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from rotquant.foundation.environment import environment
from tests.helpers.project import CONFIG
from tests.helpers.tracked import TABLES, compute, log, make_project

#: The trial `tracking` does the same on a real server.
pytestmark = pytest.mark.long
URI = "MLFLOW_TRACKING_URI"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Path) -> Project:
    """A computed project named `group`, whose store is taken for a server: nobody locks it."""
    make_project(tmp_path, monkeypatch, fresh_database)
    found = store.find_location
    monkeypatch.setattr(store, "find_location", lambda root: replace(found(root), path=None))
    return named(tmp_path, "group")


def named(root: Path, name: str | bool) -> Project:
    """The project with another name."""
    (root / "config/config.yaml").write_text(yaml.safe_dump({**CONFIG, "tracking": name}))
    return load_project(root=root)


def live(project: Project, name: str = "group") -> list[Any]:
    """The runs of an experiment."""
    with tracking.opened(project.root) as opened:
        experiment = opened.client.get_experiment_by_name(f"{name}/quarot")
        return list(opened.client.search_runs([experiment.experiment_id]))


def shown(project: Project, name: str = "group") -> list[Any]:
    """What an experiment shows, in an order that does not change."""
    return sorted((run.to_dictionary() for run in live(project, name)), key=lambda run: run["info"]["run_id"])


def compute_later(project: Project, value: float) -> str:
    """Compute one run of a quantized model again; its key."""
    key, run = next((key, run) for key, run in project.runs.items() if run.weights_key)
    record = {**environment(), "date": "2099-01-01T00:00:00+00:00", "code_digest": "feed", "seconds": 1.0}
    write_result(project.results.run(key), RunResult(run, {"perplexity": value}, record, None))
    return key


def test_a_project_without_a_name_writes_nothing_to_a_server(project: Project) -> None:
    unnamed = named(project.root, True)
    with pytest.raises(TrackingError, match="kept apart by their names: write `tracking: NAME`"):
        log(unnamed)
    with tracking.opened(project.root) as opened:
        assert [one.name for one in opened.client.search_experiments()] == ["Default"]


def test_two_projects_of_one_server_stay_apart(project: Project) -> None:
    (first, _) = log(project)
    before = shown(project)
    path = project.root / "workflow/papers/quarot/tables.yaml"
    path.write_text(yaml.safe_dump({**TABLES, "tables": [{**TABLES["tables"][0], "title": "another"}]}))
    other = named(project.root, "other")
    compute(other, value=13.0)
    (second,) = log(other)
    assert [first.experiment, second.experiment] == ["group/quarot", "other/quarot"]
    assert shown(project) == before
    assert first.runs.keys() == second.runs.keys()
    assert not {*first.runs.values()} & {*second.runs.values()}
    with tracking.opened(project.root) as opened:
        (description,) = {
            one.tags["mlflow.note.content"].partition("\n")[0]
            for one in opened.client.search_experiments()
            if one.name != "Default"
        }
    assert description == TABLES["title"]


def test_a_named_project_has_its_name_in_a_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Path
) -> None:
    make_project(tmp_path, monkeypatch, fresh_database)
    for logged in log(named(tmp_path, "group")):
        assert logged.experiment == "group/quarot"
    assert all("mlartifacts/group/quarot" in run.info.artifact_uri for run in live(named(tmp_path, "group")))


def test_of_results_that_two_clones_computed_the_later_is_shown(project: Project) -> None:
    earlier = (project.results.run(compute_later(project, 9.0))).read_text()
    key = compute_later(project, 9.0)
    path = project.results.run(key)
    log(project)
    before = shown(project)
    path.write_text(earlier.replace("2099", "2098").replace("9.0", "8.0"))
    (again, _) = log(project)
    assert shown(project) == before
    (run,) = (run for run in live(project) if run.data.tags["rotquant.key"] == key)
    assert run.data.metrics["perplexity"] == 9
    assert again.runs[key] == run.info.run_id


def test_of_different_results_shown_at_once_both_writers_keep_the_later(project: Project) -> None:
    tables = list(project.tables.values())
    with tracking.opened(project.root) as opened:
        writers = [papers.Paper(opened, project, "quarot") for _ in range(2)]
        for value, writer in zip((11.0, 9.0), writers, strict=True):
            key = compute_later(project, value) if value == 9 else ""
            for table in tables:
                writer.show_table(table, collect(project, table)[1])
        for writer in writers:
            writer.finish()
        found = [writer.logged("quarot_table1", project.runs, {}) for writer in writers]
    assert found[0] == found[1]
    (run,) = (run for run in live(project) if run.data.tags["rotquant.key"] == key)
    assert run.data.metrics["perplexity"] == 9
    assert len({run.data.tags["rotquant.key"] for run in live(project)}) == len(live(project))


@pytest.mark.parametrize(("age", "left"), [(60, 1), (7200, 0), (None, 0)])
def test_an_unfinished_run_is_deleted_when_nobody_can_be_writing_it(
    age: int | None, left: int, project: Project
) -> None:
    (logged, _) = log(project)
    begun = {} if age is None else {"rotquant.begun": str(time.time() - age)}
    with tracking.opened(project.root) as opened:
        made = opened.client.create_run(logged.experiment_id, 0, {"rotquant.kind": "run", **begun}).info.run_id
    log(project)
    assert [run.info.run_id for run in live(project)].count(made) == left


def test_a_run_that_was_read_while_another_process_finished_it_is_in_no_view(project: Project) -> None:
    (logged, _) = log(project)
    tags = {f"rotquant.table.quarot_table1{end}": "another" for end in ("", ".row")}
    with tracking.opened(project.root) as opened:
        opened.client.create_run(
            logged.experiment_id, 0, {"rotquant.kind": "run", "rotquant.key": "another", **tags}
        )  # its parameters were read before they were there
    log(project)


def test_a_report_goes_to_the_run_that_took_the_place_of_its_tables(project: Project) -> None:
    (logged, _) = log(project)
    with tracking.opened(project.root) as opened:
        opened.client.delete_run(logged.parent)
    (again, _) = log(project)
    page = project.root / "quarot_table1.md"
    page.write_text("# Report")
    chosen = project.table("quarot_table1")
    tracking.log_report(project.root, logged, runs_report(project, chosen, *collect(project, chosen)), [page])
    (parent,) = (run for run in live(project) if run.info.run_id == again.parent)
    assert "# Report" in parent.data.tags["mlflow.note.content"]
    assert f"/runs/{again.parent}/artifacts/quarot_table1.md" in parent.data.tags["mlflow.note.content"]


def test_a_reports_beginning_stays_when_its_table_is_shown_again(project: Project) -> None:
    (logged, _) = log(project)
    page = project.root / "quarot_table1.md"
    page.write_text("# Report")
    chosen = project.table("quarot_table1")
    tracking.log_report(project.root, logged, runs_report(project, chosen, *collect(project, chosen)), [page])
    before = shown(project)
    log(project)
    assert shown(project) == before


def test_all_runs_are_found_page_by_page(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first = log(project)
    monkeypatch.setattr(runs, "_PAGE", 3)  # many of these runs started at the same time
    assert log(project) == first
    assert len({run.data.tags["rotquant.key"] for run in live(project)}) == len(live(project))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("http://host:5000/path", "http://host:5000/path"),
        ("postgresql://me:se:c/r@et@host/runs", "postgresql://me:***@host/runs"),
        ("postgresql://host/runs?user=me&password=secret&sslmode=require", "postgresql://host/runs?user=me&password=***&sslmode=require"),
        ("it says 'postgresql://me:secret@host/runs' is wrong", "it says 'postgresql://me:***@host/runs' is wrong"),
    ],
)  # fmt: skip
def test_no_password_is_printed(given: str, said: str) -> None:
    assert printable(given) == said


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("postgresql://me:secret@127.0.0.1:1/runs", "Connection refused"),
        ("postgresql://me:secret@no-such-host.invalid/runs", "could not translate host name"),
        ("postgresql://127.0.0.1:1/runs?user=me&password=secret", "Connection refused"),
        ("htp://me:secret@host/runs", "cannot be used"),
        ("http://me:secret@[host", "is not a URI"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_sentence_without_its_password(
    uri: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg2")
    monkeypatch.setenv(URI, uri)
    started = time.monotonic()
    with pytest.raises(TrackingError, match=said) as error:
        tracking.initialise(tmp_path)
    assert time.monotonic() - started < 60  # MLflow alone would try for 100 s
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_without_the_driver_of_postgresql_it_is_said_how_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI, "postgresql://me:secret@127.0.0.1:1/runs")
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(TrackingError, match=r"pip install -e ./workflow\[postgresql\]"):
        tracking.initialise(tmp_path)


def test_files_are_attached_where_a_database_names_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Location("postgresql://host/runs", root=tmp_path)
    here = f"{database.artifacts('group/quarot')}/run/artifacts"
    assert here == (tmp_path / "mlartifacts/group/quarot/run/artifacts").as_uri()
    assert not database.reaches(here)  # it is another machine's, where that folder was made
    (tmp_path / "mlartifacts/group/quarot").mkdir(parents=True)
    assert database.reaches(here)
    assert database.reaches("s3://bucket/runs/run/artifacts")
    monkeypatch.setenv("MLFLOW_DEFAULT_ARTIFACT_ROOT", "s3://bucket/runs/")
    assert database.artifacts("group/quarot") == "s3://bucket/runs/group/quarot"
