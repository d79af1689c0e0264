"""MLflow shows exactly what the result files say: one per run, replaced and never doubled, also when many start."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rotquant import tables, tracking
from rotquant.files import short_hash
from rotquant.results import RunResult, run_path, write_result
from tests.project import Copy
from tests.test_reporting import compute, provenance


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tables.Project:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tables, "checkpoint_digest", lambda path: short_hash(Path(path).name))
    Copy(tmp_path)
    loaded = tables.load_project(root=tmp_path)
    compute(loaded)
    return loaded


def live_runs(project: tables.Project) -> list[Any]:
    client = tracking._client(project.root)
    experiment = client.get_experiment_by_name("quarot")
    return list(client.search_runs([experiment.experiment_id], filter_string="tags.`rotquant.kind` = 'run'"))


def test_one_mlflow_run_per_run_with_parameters_metrics_and_tags(project: tables.Project) -> None:
    table = project.table("quarot_table1")
    logged = tracking.log_table(project, table)
    runs = {run.info.run_id: run for run in live_runs(project)}
    assert sorted(logged.runs) == sorted(project.runs)
    assert sorted(logged.runs.values()) == sorted(runs)
    cell = next(cell for cell in project.cells(table.id) if cell.row == "QuaRot")
    run = runs[logged.runs[cell.runs[1].key]]
    assert run.data.metrics["perplexity"] == pytest.approx(11.1)
    assert run.data.params["recipe.weights.scheme.bits"] == "4"
    assert run.data.params["recipe.rotation.residual"] == "hadamard"
    expected = {"paper": "quarot", "table": table.id, "row": "QuaRot", "column": "Llama-2-7B", "seed": "1"}
    assert {name: run.data.tags[name] for name in expected} == expected
    assert run.data.tags["key"] == cell.runs[1].key
    assert run.data.tags["mlflow.parentRunId"] == logged.parent


def test_logging_again_changes_nothing_and_a_new_result_replaces_the_old(project: tables.Project) -> None:
    table = project.table("quarot_table1")
    first = tracking.log_table(project, table)
    assert tracking.log_table(project, table) == first
    run = project.cells(table.id)[0].runs[0]
    write_result(project.root / run_path(run.key), RunResult(run, {"perplexity": 9.0}, provenance(), None))
    second = tracking.log_table(project, table)
    assert {key for key in first.runs if first.runs[key] != second.runs[key]} == {run.key}
    assert len(live_runs(project)) == len(project.runs)


def test_a_deleted_database_is_rebuilt_from_the_files(project: tables.Project) -> None:
    table = project.table("quarot_table1")
    tracking.log_table(project, table)
    (project.root / "mlflow.db").unlink()
    code = (
        "from pathlib import Path; from rotquant import tables, tracking; from rotquant.files import short_hash\n"
        "tables.checkpoint_digest = lambda path: short_hash(Path(path).name)\n"
        "project = tables.load_project()\n"
        "print(len(tracking.log_table(project, project.table('quarot_table1')).runs))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project.root, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(len(project.runs))


def test_an_infinite_perplexity_is_kept(project: tables.Project) -> None:
    compute(project, QuaRot=float("inf"))
    tracking.log_table(project, project.table("quarot_table1"))
    shown = [run for run in live_runs(project) if run.data.tags["row"] == "QuaRot"]
    assert len(shown) == 4
    assert all(run.data.tags["metric.perplexity"] == "inf" for run in shown)


def test_artifacts_lie_on_the_tables_run(project: tables.Project) -> None:
    logged = tracking.log_table(project, project.table("quarot_table1"))
    report = project.root / "report.md"
    report.write_text("# Report")
    for _ in range(2):
        tracking.log_artifacts(project, logged, [report])
    client = tracking._client(project.root)
    assert [item.path for item in client.list_artifacts(logged.parent)] == ["report.md"]


def test_many_processes_on_a_fresh_database_all_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code = (
        "from pathlib import Path; from rotquant import tracking\n"
        "tracking.initialise(Path())\n"
        "client = tracking._client(Path())\n"
        "tracking._experiment(client, Path(), 'quarot')"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    failures = [error for process in started for error in [process.communicate()[1]] if process.returncode]
    assert failures == []


def test_passwords_are_not_printed_and_an_unusable_store_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking.printable("http://me:secret@host:5000") == "http://me:***@host:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/no/such/folder/mlflow.db")
    (tmp_path / "no").write_text("a file where a folder should be")
    with pytest.raises(tracking.TrackingError, match=r"cannot be used .*tracking: false"):
        tracking.initialise(tmp_path)
