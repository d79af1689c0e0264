"""MLflow shows what the result files say, each result once, whoever logs it, when, and in what order."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from reproduction.commands import tracking as commands
from reproduction.identity.names import HISTORY_FILE, ROTATION_RECORD
from reproduction.planning.current import current_plan
from reproduction.run.plan import Plan
from reproduction.run.results import read_result, write_result
from reproduction.run.tracking import entries
from reproduction.run.tracking.store import KEY, LOGGER, PARENT, PaperExperiment, TrackingError, opened, printable
from reproduction.sources import load_project
from reproduction.tables.project import Project
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import write_json
from tests.helpers.learned import LEARNED, learned_record
from tests.helpers.project import CONFIG
from tests.helpers.speed import SPEED, record
from tests.helpers.tracked import ROWS, SHARED, TABLES, compute, make_project, one, rows, search

URI = "MLFLOW_TRACKING_URI"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Path) -> Project:
    """The computed project, in its folder as users are, with MLflow switched on."""
    root = make_project(tmp_path, monkeypatch, fresh_database).root
    (root / "config/config.yaml").write_text(yaml.safe_dump({**CONFIG, "tracking": True}))
    return load_project(root=root)


@pytest.fixture
def plan(project: Project) -> Plan:
    return current_plan(project.root)


def key_of(project: Project, row: str, table: str = "quarot_table1") -> str:
    """The key of the last seed's run in the first column."""
    return next(cell for cell in project.cells(table) if cell.row == row).runs[-1].key


def test_a_run_has_its_recipe_as_parameters_its_numbers_as_metrics_and_its_tables_run_as_parent(
    project: Project,
) -> None:
    commands.sync_tracking(["quarot_table1"])
    assert len(search()) == SHARED
    parent = one("tags.`rotquant.key` = 'quarot_table1'")
    shown = one(f"tags.`{KEY}` = '{key_of(project, 'QuaRot')}'")
    assert shown.info.run_name == "QuaRot on Llama-2-7B, seed 1, perplexity"
    assert shown.info.status == "FINISHED"
    assert (
        shown.data.metrics["perplexity"]
        == shown.data.metrics[f"{shown.data.tags['checkpoint']}/perplexity"]
        == pytest.approx(11.1)
    )
    expected = {"weights.scheme.bits": "4", "rotation.residual": "hadamard", "metric.kind": "perplexity", "seed": "1"}
    assert expected.items() <= shown.data.params.items()
    tags = {"row": "QuaRot", "column": "Llama-2-7B", "model": "Llama-2-7B", "mlflow.parentRunId": parent.info.run_id}
    tags |= {"tables": "quarot_table1 quarot_table9", "rotquant.table.quarot_table9": "INT4"}
    assert tags.items() <= shown.data.tags.items()
    assert shown.info.end_time - shown.info.start_time == 1500  # as its file says, whenever it was logged


def test_a_run_of_several_tables_appears_once_and_is_found_by_each(project: Project) -> None:
    commands.sync_tracking()
    first, second = (search(f"tags.`rotquant.table.quarot_table{number}` != ''") for number in (1, 9))
    assert len(first) == SHARED
    assert {run.info.run_id for run in first} < {run.info.run_id for run in second}
    assert len(search()) == len(second)


def test_logging_again_changes_nothing_and_a_new_result_replaces_the_old(project: Project) -> None:
    commands.sync_tracking()
    before = rows()
    commands.sync_tracking()
    assert rows() == before
    key = key_of(project, "QuaRot")
    old = one(f"tags.`{KEY}` = '{key}'")
    path = project.results.run(key)
    result = read_result(path)
    later = result.provenance | {"date": "2099-01-01T00:00:00+00:00"}
    write_result(path, replace(result, metrics={**result.metrics, "perplexity": 12.5}, provenance=later))
    commands.sync_tracking(["quarot_table1"])
    new = one(f"tags.`{KEY}` = '{key}'")
    assert new.info.run_id != old.info.run_id
    assert new.data.metrics["perplexity"] == 12.5
    write_result(path, result)  # as a clone of the project has it, which computed it earlier
    commands.sync_tracking(["quarot_table1"])
    assert one(f"tags.`{KEY}` = '{key}'").info.run_id == new.info.run_id


def test_a_table_that_lacks_a_run_is_scheduled_until_it_is_whole(project: Project) -> None:
    path = project.results.run(key_of(project, "QuaRot"))
    away = path.rename(path.with_suffix(".away"))
    for _ in range(2):
        commands.sync_tracking(["quarot_table1"])
        table = one("tags.`rotquant.key` = 'quarot_table1'")
        assert (table.info.status, table.info.end_time) == ("SCHEDULED", None)
        before = rows()
    commands.sync_tracking(["quarot_table1"])
    assert rows() == before
    away.rename(path)
    commands.sync_tracking(["quarot_table1"])
    whole = one("tags.`rotquant.key` = 'quarot_table1'")
    assert (whole.info.run_id, whole.info.status) == (table.info.run_id, "FINISHED")
    path.unlink()
    commands.sync_tracking(["quarot_table1"])
    assert one("tags.`rotquant.key` = 'quarot_table1'").info.status == "SCHEDULED"


def test_tags_follow_the_tables(project: Project) -> None:
    commands.sync_tracking()
    path = project.root / "workflow/papers/quarot/tables.yaml"
    path.write_text(path.read_text().replace("INT4", "Four bits"))
    commands.sync_tracking()
    assert {run.data.tags["rotquant.table.quarot_table9"] for run in search()} == {"Baseline", "Four bits", "INT8"}
    tables = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**tables, "tables": tables["tables"][:1]}))
    commands.sync_tracking()
    shown = search("tags.`rotquant.table.quarot_table1` != ''")
    assert not any("rotquant.table.quarot_table9" in run.data.tags for run in shown)


def test_a_number_with_samples_has_its_interval_and_one_that_is_not_finite_is_a_tag(
    project: Project, plan: Plan
) -> None:
    key = key_of(project, "QuaRot")
    path = project.results.run(key)
    result = read_result(path)
    windows = {"perplexity": [2.0, 2.2, 2.4, 2.6]}
    metrics = {"perplexity": float(2.718281828459045**2.3), "nll": 2.3, "tokens": 2044, "windows": 4}
    write_result(path, replace(result, metrics=metrics, samples=windows))
    numbers = entries.finished(plan, key, plan.results()).metrics
    # the standard error of the mean of 2.0 ... 2.6 is 0.1291, and the delta method multiplies by the perplexity
    half = 1.96 * 0.12909944 * metrics["perplexity"]
    assert numbers["perplexity high"] - numbers["perplexity"] == pytest.approx(half, rel=1e-4)
    assert numbers["perplexity"] - numbers["perplexity low"] == pytest.approx(half, rel=1e-4)
    write_result(path, replace(result, metrics={**metrics, "perplexity": float("inf"), "nll": float("inf")}))
    entry = entries.finished(plan, key, plan.results())
    assert entry.tags["metric.perplexity"] == "inf"
    assert "perplexity" not in entry.metrics


def test_a_learned_rotation_has_the_curves_of_its_learning(project: Project) -> None:
    path = project.root / "workflow/papers/quarot/tables.yaml"
    path.write_text(yaml.safe_dump({**TABLES, "tables": [TABLES["tables"][0] | {"rows": [ROWS[0], LEARNED]}]}))
    changed = load_project(root=project.root)
    compute(changed)
    history = [{"step": step, "loss": 5.0 - step, "site_snr": {"0": 1.0}} for step in range(3)]
    for key, (run, *_) in changed.rotations.items():
        write_json(changed.results.rotation(key) / HISTORY_FILE, history)
        write_json(changed.results.rotation(key) / ROTATION_RECORD, learned_record(run))
    commands.sync_tracking()
    shown = search("tags.`rotquant.kind` = 'rotation'")
    assert len(shown) == 4  # two seeds on two models
    curve = opened().get_metric_history(shown[0].info.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(0, 5.0), (1, 4.0), (2, 3.0)]
    assert shown[0].data.params["methods.spinquant.steps"] == "3"
    assert "site_snr" not in shown[0].data.metrics


def test_blocks_that_are_trained_one_by_one_have_curves_of_their_own() -> None:
    steps = [{"block": block, "step": step, "loss": 1.0} for block in range(2) for step in range(2)]
    told = [("block 0", steps[0]), ("learning rotations", {"step": 7, "loss": float("nan"), "snr": 2})]
    assert [*entries._curves(steps)][2:] == [("block 1/loss", 1.0, 0), ("block 1/loss", 1.0, 1)]
    assert [one for each in told for one in entries.curve(*each)] == [("block 0/loss", 1.0, 0), ("snr", 2.0, 7)]


def test_a_rendered_table_has_page_numbers_and_figure_as_artifacts(project: Project) -> None:
    for name in ("reports/quarot_table1.md", "results/tables/quarot_table1.csv"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("# Table 1\n\nIt agrees.\n\n![figure](x.svg)\n\n<details>runs</details>")
    commands.sync_tracking(["quarot_table1"])
    parent = one("tags.`rotquant.key` = 'quarot_table1'")
    assert parent.info.status == "FINISHED"
    assert [file.path for file in opened().list_artifacts(parent.info.run_id)] == [
        "quarot_table1.csv",
        "quarot_table1.md",
    ]
    note = parent.data.tags["mlflow.note.content"]
    assert note.endswith("# Table 1\n\nIt agrees.\n\n")
    Path("reports/quarot_table1.md").write_text("# Table 1\n\nIt disagrees.")
    commands.sync_tracking(["quarot_table1"])
    again = one("tags.`rotquant.key` = 'quarot_table1'")
    assert again.info.run_id == parent.info.run_id
    assert "disagrees" in again.data.tags["mlflow.note.content"]


def test_a_speed_table_has_its_cells_as_metrics(project: Project) -> None:
    from reproduction.commands import report

    (project.root / "workflow/papers/quarot/speed.yaml").write_text(yaml.safe_dump(SPEED))
    table = load_project(root=project.root).table("quarot_table14")
    record(project.root / "results/speed/quarot_table14.json", table)
    report.table("quarot_table14", json=False)
    (project.root / "reports").mkdir(exist_ok=True)
    (project.root / "reports/quarot_table14.md").touch()
    commands.sync_tracking(["quarot_table14"])
    shown = one("tags.`rotquant.key` = 'quarot_table14'")
    assert shown.data.metrics["Linear layer/4096x4096 batch 1/INT4"] == pytest.approx(8.192e-5)
    assert shown.data.tags["gpu"]


def test_what_is_not_computed_is_passed_over(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.results.run(key_of(project, "QuaRot")).unlink()
    commands.sync_tracking(["quarot_table1"])
    assert "quarot_table1: 5 of " in capsys.readouterr().out
    assert len(search()) == SHARED - 1
    for file in (project.root / "results/runs").iterdir():
        file.unlink()
    with pytest.raises(ResultError, match="no table is computed yet"):
        commands.sync_tracking()


def test_what_a_dead_process_left_running_is_killed_and_then_gives_way(project: Project, plan: Plan) -> None:
    client, key = opened(), key_of(project, "QuaRot")
    experiment = PaperExperiment(client, True, "quarot")
    run, _ = experiment.begin(entries.begun(plan, key))
    client.set_tag(run, LOGGER, f"{socket.gethostname()} 1 0")  # process 1 was started at another time
    gone = entries.begun(plan, key_of(project, "Baseline"))
    left = experiment.begin(replace(gone, key="of no table", tags={**gone.tags, KEY: "of no table"}))[0]
    client.set_tag(left, LOGGER, f"{socket.gethostname()} 1 0")
    commands.sync_tracking(["quarot_table1"])
    assert client.get_run(left).info.status == "KILLED"
    assert one(f"tags.`{KEY}` = '{key}'").info.run_id == run  # it goes on, and ends
    assert client.get_run(run).info.status == "FINISHED"


def test_of_two_runs_of_a_table_that_were_made_at_once_one_is_left_with_all_results(
    project: Project, plan: Plan
) -> None:
    (project.root / "reports").mkdir()
    (project.root / "reports/quarot_table1.md").write_text("# Table 1")
    *results, table = entries.entries_of(plan, "quarot_table1", plan.results(), set())
    ours = PaperExperiment(opened(), True, "quarot")
    for entry in results:
        ours.record(entry)
    tags = {KEY: table.key, entries.KIND: "table", LOGGER: "another-machine 1 1"}
    opened().create_run(ours.id, 1, tags, table.key)  # begun before ours, and not there yet when ours was made
    ours.record(table)
    (left,) = search(f"tags.`{KEY}` = '{table.key}'")
    assert {run.data.tags[PARENT] for run in search()} == {left.info.run_id}
    assert len(search()) == len(results)


def test_a_run_that_another_process_deletes_meanwhile_is_logged_anew(project: Project, plan: Plan) -> None:
    """As where several make the same runs, and each keeps the first that it sees."""
    first, *others = entries.entries_of(plan, "quarot_table1", plan.results(), set())
    ours = PaperExperiment(opened(), True, "quarot")
    for entry in (first, *others):
        ours.record(entry)
    ours.read_all()
    for run in (one(f"tags.`{KEY}` = '{first.key}'"), one(f"tags.`{KEY}` = 'quarot_table1'")):
        opened().delete_run(run.info.run_id)
    ours.record(replace(first, tags={**first.tags, "row": "renamed"}))
    logged, table = one(f"tags.`{KEY}` = '{first.key}'"), one(f"tags.`{KEY}` = 'quarot_table1'")
    assert (logged.data.tags["row"], logged.data.tags[PARENT]) == ("renamed", table.info.run_id)
    assert logged.data.metrics.items() >= {"perplexity": first.metrics["perplexity"]}.items()


@pytest.mark.long
def test_many_processes_that_log_the_same_to_a_new_database_lose_nothing_and_show_each_once(
    project: Project, plan: Plan
) -> None:
    Path("mlflow.db").unlink()
    processes = []
    for _ in range(4):
        processes.append(os.fork())
        if processes[-1] == 0:
            status = 1
            try:
                commands.sync_tracking()
                status = 0
            finally:
                os._exit(status)
    assert not any(os.waitpid(process, 0)[1] for process in processes)
    assert sorted(run.data.tags[KEY] for run in search()) == sorted(plan.runs)
    assert {run.info.status for run in search("")} == {"FINISHED"}


def test_two_projects_of_one_store_stay_apart(project: Project) -> None:
    commands.sync_tracking(["quarot_table1"])
    (project.root / "config/config.yaml").write_text(yaml.safe_dump({**CONFIG, "tracking": "second"}))
    commands.sync_tracking(["quarot_table1"])
    assert len(search()) == len(search(experiment="second/quarot")) == SHARED


def test_a_project_without_a_name_writes_nothing_to_a_server(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    client = opened()
    monkeypatch.setenv(URI, "https://me:secret@host:5000")
    with pytest.raises(TrackingError, match=r"https://me:\*\*\*@host:5000 is a server.*`tracking: NAME`"):
        PaperExperiment(client, True, "quarot")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:////nowhere/x.db", "names no file in a folder that is there"),
        ("http://127.0.0.1:1", "cannot be used .*Connection refused"),
        ("postgresql://me:secret@127.0.0.1:1/x", r"postgresql://me:\*\*\*@127.0.0.1:1/x cannot be used"),
        ("htp://host:5000", "cannot be used"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_sentence_without_its_password(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(URI, given)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match=said) as error:
        opened()
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_passwords_are_not_printed() -> None:
    assert printable("http://me:secret@host:5000") == "http://me:***@host:5000"
    assert (
        printable("postgresql://host/x?user=me&password=secret&a=b") == "postgresql://host/x?user=me&password=***&a=b"
    )


def test_a_damaged_database_is_to_be_deleted(project: Project) -> None:
    commands.sync_tracking(["quarot_table1"])
    whole = Path("mlflow.db").read_bytes()
    middle = len(whole) // 8192 * 4096
    Path("mlflow.db").write_bytes(whole[:middle] + b"x" * 4096 + whole[middle + 4096 :])
    with pytest.raises(TrackingError, match=r"mlflow.db (is damaged|cannot be used)"):
        commands.sync_tracking()


def test_the_folder_of_a_moved_project_is_not_made_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.sync_tracking(["quarot_table1"])
    new = project.root.with_name("moved")
    project.root.rename(new)
    monkeypatch.chdir(new)
    Path("reports").mkdir(exist_ok=True)
    Path("reports/quarot_table1.md").write_text("# Table 1")
    commands.sync_tracking(["quarot_table1"])
    assert one("tags.`rotquant.key` = 'quarot_table1'").info.status == "FINISHED"
    assert not project.root.exists()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_interface_starts_on_this_machine_alone_and_its_links_are_printed(
    project: Project, taken: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.sync_tracking(["quarot_table1"])
    started: list[list[str]] = []
    for name in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI"):
        monkeypatch.setenv(name, "")  # to be put back
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # the user's own setting
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    with pytest.raises(TrackingError, match=f"port {taken} of 127.0.0.1 cannot be used"):
        commands.ui(taken)
    commands.ui(0)
    link = "quarot: http://127.0.0.1:0/#/experiments/1/runs?workflowType=machine_learning"
    wanted = "&searchFilter=tags.%60rotquant.kind%60%20%3D%20%27run%27"
    wanted += "&orderByKey=tags.%60mlflow.runName%60&orderByAsc=true"
    assert f"{link}&compareRunsMode=CHART{wanted}\n" in capsys.readouterr().out
    client = opened()
    client.create_run("1", tags={entries.KIND: "run"})  # without a metric, so that none is shared
    commands.ui(0)
    assert f"{link}{wanted}\n" in capsys.readouterr().out
    for run in client.search_runs(["1"], f"tags.`{entries.KIND}` = 'run'"):
        client.delete_run(run.info.run_id)
    commands.ui(0)
    assert f"{link}\n" in capsys.readouterr().out
    (command, *_) = started
    given = dict(zip(command[4::2], command[5::2], strict=True))
    assert (given["--host"], given["--uvicorn-opts"]) == ("127.0.0.1", "--log-level warning")
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{project.root}/mlflow.db"
    assert os.environ["PYTHONWARNINGS"] == "error"


def test_an_entry_is_the_same_after_its_way_as_json(project: Project, plan: Plan) -> None:
    for entry in entries.entries_of(plan, "quarot_table1", plan.results()):
        assert entries.Entry.parse(json.loads(entry.text())).digest == entry.digest
