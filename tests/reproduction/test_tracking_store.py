"""The store that MLflow keeps runs in: where it is, and that results and reports do not depend on it."""

import fcntl
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.commands import report
from reproduction.commands import tracking as commands
from reproduction.render import tracking
from reproduction.render.tracking import TrackingError, find_location
from reproduction.sources import load_project
from reproduction.tables.project import Project
from rotquant.foundation.errors import ResultError
from tests.helpers.project import CONFIG
from tests.helpers.tracked import log, make_project, search

URI = "MLFLOW_TRACKING_URI"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Path) -> Project:
    """The computed project, in its folder as users are, with MLflow switched on."""
    root = make_project(tmp_path / "project", monkeypatch, fresh_database).root
    (root / "config/config.yaml").write_text(yaml.safe_dump({**CONFIG, "tracking": True}))
    return load_project(root=root)


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv(URI, uri)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        yield uri


def artifacts(project: Project, run: str) -> list[str]:
    with tracking.opened(project.root) as store:
        return sorted(item.path for item in store.client.list_artifacts(run))


@pytest.mark.parametrize(
    ("given", "uri", "path"),
    [
        ("", "sqlite:///{root}/mlflow.db", "mlflow.db"),
        ("sqlite:///runs/all.db", "sqlite:///{root}/runs/all.db", "runs/all.db"),
        ("sqlite:////tmp/runs.db", "sqlite:////tmp/runs.db", "/tmp/runs.db"),
        ("sqlite:///runs.db?timeout=5", "sqlite:///{root}/runs.db?timeout=5", "runs.db"),
        ("https://me:secret@host:5000", "https://me:secret@host:5000", None),
        ("postgresql://me:secret@host/runs", "postgresql://me:secret@host/runs", None),
        ("databricks", "databricks", None),
    ],
)
def test_relative_paths_of_a_store_begin_at_the_project(
    given: str, uri: str, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI, given)
    monkeypatch.chdir("/")
    (tmp_path / "runs").mkdir()
    found = find_location(tmp_path)
    assert found.uri == uri.format(root=tmp_path)
    assert found.path == (None if path is None else tmp_path / path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:runs.db", "names no file"),
        ("sqlite:////nowhere/x.db", "there is no folder /nowhere; make it"),
        ("sqlite:///no/x.db", "there is no folder .*/no; make it"),
        ("mlruns", "MLFLOW_ALLOW_FILE_STORE=true"),
        ("file:///somewhere/mlruns", "MLFLOW_ALLOW_FILE_STORE=true"),
        ("http://", "names no host"),
        ("http://[host", "is not a URI"),
        ("htp://host:5000", "cannot be used"),
    ],
)
def test_what_is_no_store_is_refused_in_a_sentence(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI, given)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(TrackingError, match=said) as error:
        tracking.initialise(tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_a_store_where_the_user_allows_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URI, "mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (logged,) = log(project, "quarot_table1")
    assert {run.info.run_id for run in search(project)} == set(logged.runs.values())
    assert (project.root / "mlruns").is_dir()


#: Forked once mlflow is imported, so that all meet the database at the same time.
MANY = """
import os, sys
from pathlib import Path
from reproduction.render.tracking import store
os.environ.update(store._SETTINGS)
import mlflow.store.tracking.sqlalchemy_store
processes = []
for number in range(5):
    processes.append(os.fork())
    if processes[-1] == 0:
        store.initialise(Path())
        with store.opened(Path()) as found:
            found.client.create_experiment(str(number))
        Path(f"done-{number}").touch()
        sys.exit()
sys.exit(any(os.waitpid(process, 0)[1] for process in processes))
"""


def test_many_processes_on_a_fresh_database_all_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URI, raising=False)
    done = subprocess.run([sys.executable, "-c", MANY], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("done-*"))) == 5


def test_passwords_are_not_printed_and_an_unusable_store_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking.printable("http://me:secret@host:5000") == "http://me:***@host:5000"
    monkeypatch.setenv(URI, f"sqlite:///{tmp_path}/no/such/folder/mlflow.db")
    (tmp_path / "no").write_text("a file where a folder should be")
    with pytest.raises(TrackingError, match=r"there is no folder .*/no/such/folder"):
        tracking.initialise(tmp_path)


def test_no_process_waits_for_another_that_waits_for_a_server(
    silent_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: Any) -> None:
        pytest.fail("a lock is held while a server is waited for")

    monkeypatch.setattr(fcntl, "flock", locked)
    with pytest.raises(TrackingError, match=rf"{silent_server} cannot be used .it does not answer within 1 s"):
        tracking.initialise(tmp_path)


def test_a_server_is_waited_for_for_seconds_unless_the_user_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import environment_variables as variables

    for name in ("TIMEOUT", "MAX_RETRIES", "BACKOFF_FACTOR"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")  # to be put back
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv(URI, "http://127.0.0.1:1")
    with pytest.raises(TrackingError, match="Connection refused"):
        tracking.initialise(tmp_path)
    assert variables.MLFLOW_HTTP_REQUEST_TIMEOUT.get() <= 10
    assert variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 0  # as the user says


def test_a_page_is_written_without_mlflow_and_shown_in_it_later(
    project: Project, silent_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report.table("quarot_table1", json=False)
    report.page("quarot_table1")
    page = project.root / "reports/quarot_table1.md"
    assert "MLflow" not in page.read_text()
    said = capsys.readouterr().err
    assert "warning: the MLflow store" in said
    assert "The page of quarot_table1 is written without MLflow" in said
    monkeypatch.delenv(URI)
    commands.sync_tracking(["quarot_table1"])
    (logged,) = log(project, "quarot_table1")
    assert logged.parent in page.read_text()
    assert artifacts(project, logged.parent) == ["quarot_table1.csv", "quarot_table1.md"]


def test_the_workflow_starts_without_mlflow(
    project: Project, silent_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.init_tracking(Path("results/tracking.json"))
    assert (project.root / "results/tracking.json").exists()
    assert f"warning: the MLflow store {silent_server}" in capsys.readouterr().err
    with pytest.raises(TrackingError):
        commands.init_tracking()


def test_a_database_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full\n[SQL: CREATE TABLE spans")

    with monkeypatch.context() as patched:
        patched.setattr("mlflow.MlflowClient.search_experiments", fill)
        with pytest.raises(TrackingError, match=r"\(OperationalError: database or disk is full\); see to the file"):
            tracking.initialise(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db.lock"]


@pytest.mark.parametrize("damage", ["not a database", "a page overwritten"])
def test_a_damaged_database_is_to_be_deleted_and_made_anew(
    project: Project, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log(project, "quarot_table1")
    database = project.root / "mlflow.db"
    whole = database.read_bytes()
    middle = len(whole) // 8192 * 4096
    parts = whole[:middle], b"x" * 4096, whole[middle + 4096 :]
    database.write_bytes(b"x" * 5000 if damage == "not a database" else b"".join(parts))
    for call in (lambda: log(project, "quarot_table1"), commands.init_tracking, commands.ui, commands.sync_tracking):
        with pytest.raises(TrackingError, match=rf"{database} is damaged .*delete it and run `rotquant runs sync-"):
            call()
    report.page("quarot_table1")
    assert "is damaged" in capsys.readouterr().err


def test_a_deleted_database_is_made_anew_with_its_artifacts(project: Project) -> None:
    report.table("quarot_table1", json=False)
    report.page("quarot_table1")
    (project.root / "mlflow.db").unlink()
    code = (
        "from pathlib import Path; from reproduction.tables import project as projects\n"
        "from reproduction.render import tracking; from reproduction.sources import load_project\n"
        "from reproduction.commands.tracking import sync_tracking; from rotquant.foundation.files import short_hash\n"
        "projects.checkpoint_digest = lambda path: short_hash(Path(path).name)\n"
        "sync_tracking()\n"
        "project = load_project()\n"
        "(logged,) = tracking.log_tables(project, [project.table('quarot_table1')])\n"
        "with tracking.opened(project.root) as store:\n"
        "    print(*sorted(item.path for item in store.client.list_artifacts(logged.parent)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project.root, capture_output=True, text=True, check=True)
    first, second, attached = done.stdout.splitlines()
    assert [first.split(":")[0], second.split(":")[0]] == ["quarot_table1", "quarot_table9"]
    assert attached.split() == ["quarot_table1.csv", "quarot_table1.md"]


def test_what_is_not_computed_is_not_synchronized(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    only = {run.key for cell in project.cells("quarot_table9") for run in cell.runs}
    only -= {run.key for cell in project.cells("quarot_table1") for run in cell.runs}
    for key in only:
        (project.results.run(key)).unlink()
    commands.sync_tracking()
    assert capsys.readouterr().out.split(":")[0] == "quarot_table1"
    with pytest.raises(ResultError):
        commands.sync_tracking(["quarot_table9"])
    for file in (project.root / "results/runs").iterdir():
        file.unlink()
    with pytest.raises(ResultError, match="no table is computed yet"):
        commands.sync_tracking()


def test_a_project_that_was_moved_keeps_its_artifacts_and_never_writes_to_its_old_folder(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (logged,) = log(project, "quarot_table1")
    old, new = project.root, project.root.with_name("moved")
    earlier = old / "mlartifacts/quarot" / logged.parent / "artifacts/earlier.md"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    old.rename(new)
    monkeypatch.chdir(new)
    moved = load_project(root=new)
    report.page("quarot_table1")
    assert artifacts(moved, logged.parent) == ["earlier.md", "quarot_table1.csv", "quarot_table1.md"]
    assert not old.exists()
    assert log(moved, "quarot_table1") == [replace(logged, uri=f"sqlite:///{new}/mlflow.db")]


def test_a_place_for_artifacts_that_the_user_chose_stays(project: Project) -> None:
    with tracking.opened(project.root) as store:
        store.client.create_experiment("quarot", artifact_location="s3://bucket/mlartifacts/quarot")
    log(project, "quarot_table1")
    with tracking.opened(project.root) as store:
        found = store.client.get_experiment_by_name("quarot").artifact_location
    assert found == "s3://bucket/mlartifacts/quarot"


def test_the_interface_starts_on_this_machine_alone_and_its_links_are_printed(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (logged,) = log(project, "quarot_table1")
    started: list[list[str]] = []
    for name in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI"):
        monkeypatch.setenv(name, "")  # to be put back
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # the user's own setting
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(TrackingError, match=f"port {port} of 127.0.0.1 cannot be used"):
            commands.ui(port)
    commands.ui(port)
    address = f"http://127.0.0.1:{port}/#/experiments/{logged.experiment_id}/runs?"
    shown = capsys.readouterr().out
    assert f"quarot runs: {address}" in shown
    assert f"MLflow starts at http://127.0.0.1:{port}; Ctrl-C ends it." in shown
    (command,) = started
    given = dict(zip(command[4::2], command[5::2], strict=True))
    assert (given["--host"], given["--port"], given["--uvicorn-opts"]) == (
        "127.0.0.1",
        str(port),
        "--log-level warning",
    )
    store = f"sqlite:///{project.root}/mlflow.db"
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == os.environ["MLFLOW_REGISTRY_STORE_URI"] == store
    assert os.environ["PYTHONWARNINGS"] == "error"
