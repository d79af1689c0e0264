"""Jobs are in MLflow while they run: what they say reaches it, no job waits for it, and the last gap closes itself."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from reproduction.commands import tracking as commands
from reproduction.planning.current import current_plan
from reproduction.run.plan import Plan
from reproduction.run.stages import jobs
from reproduction.run.tracking import job, line
from reproduction.run.tracking.store import KEY, opened
from reproduction.sources import load_project
from rotquant.foundation.progress import tell
from tests.helpers.project import CONFIG
from tests.helpers.tracked import SHARED, make_project, one, search

URI = "MLFLOW_TRACKING_URI"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Path) -> Iterator[Plan]:
    """Of the computed project, with MLflow switched on; what logs ends with the test."""
    root = make_project(tmp_path, monkeypatch, fresh_database).root
    (root / "config/config.yaml").write_text(yaml.safe_dump({**CONFIG, "tracking": True}))
    load_project(root=root)
    owner = os.fork()
    if owner == 0:
        signal.pause()
    monkeypatch.setenv(line.OWNER, str(owner))
    yield current_plan(root)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)


def soon(what: Callable[[], object], patience: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + patience
    while not what():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.1)


def status(key: str) -> str | None:
    found = search(f"tags.`{KEY}` = '{key}'")
    return found[0].info.status if found else None


def settled() -> str:
    return line.settled(int(os.environ[line.OWNER]))


def test_a_result_is_seen_while_it_is_computed_with_each_step_and_then_with_its_numbers(plan: Plan) -> None:
    key = next(iter(plan.runs))
    with job.logged(plan, key, plan.results()):
        for step in range(3):
            tell("learning", {"step": step, "loss": 3.0 - step})
        soon(lambda: status(key) == "RUNNING" and one(f"tags.`{KEY}` = '{key}'").data.metrics.get("loss") == 1.0)
        assert status("quarot_table1") == "RUNNING"
    assert settled() == ""
    shown = one(f"tags.`{KEY}` = '{key}'")
    assert (shown.info.status, len(search())) == ("FINISHED", 1)
    assert {"loss", "perplexity", "seconds"} <= shown.data.metrics.keys()


def test_a_job_that_fails_says_why_and_one_that_is_killed_is_seen_as_killed_and_then_goes_on(plan: Plan) -> None:
    failed, killed, *_ = plan.runs
    with pytest.raises(ValueError, match="too hot"), job.logged(plan, failed, plan.results()):
        raise ValueError("too hot")
    process = os.fork()
    if process == 0:
        with job.logged(plan, killed, plan.results()):
            tell("learning", {"step": 0, "loss": 3.0})
            signal.pause()
    soon(lambda: status(killed) == "RUNNING")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    soon(lambda: status(killed) == "KILLED")
    assert status(failed) == "FAILED"
    assert one(f"tags.`{KEY}` = '{failed}'").data.tags["error"] == "too hot"
    before = one(f"tags.`{KEY}` = '{killed}'").info.run_id
    with job.logged(plan, killed, plan.results()):
        tell("learning", {"step": 0, "loss": 3.0})  # which it has already
        tell("learning", {"step": 1, "loss": 2.0})
    assert settled() == ""
    after = one(f"tags.`{KEY}` = '{killed}'")
    assert (after.info.run_id, after.info.status) == (before, "FINISHED")
    assert [point.step for point in opened().get_metric_history(before, "loss")] == [0, 1]


@pytest.mark.long
def test_jobs_of_many_processes_at_once_are_all_logged(plan: Plan) -> None:
    processes = []
    for place in range(8):
        processes.append(os.fork())
        if processes[-1] == 0:
            for key in [*plan.runs][place::8] * 2:  # each twice, as after a deleted file
                with job.logged(plan, key, plan.results()):
                    for step in range(20):
                        tell("learning", {"step": step, "loss": 1.0 + step})
            os._exit(0)
    assert not any(os.waitpid(process, 0)[1] for process in processes)
    assert settled() == ""
    assert sorted(run.data.tags[KEY] for run in search()) == sorted(plan.runs)
    assert {run.info.status for run in search()} == {"FINISHED"}
    assert all(len(opened().get_metric_history(run.info.run_id, "loss")) == 20 for run in search()[:3])


def test_a_rendered_page_logs_what_was_not_logged_before(plan: Plan) -> None:
    Path("reports").mkdir()
    Path("reports/quarot_table1.md").write_text("# Table 1")
    job.log_table(plan, "quarot_table1", plan.results())
    assert settled() == ""
    assert len(search()) == SHARED
    assert status("quarot_table1") == "FINISHED"


def test_jobs_end_well_without_mlflow_and_a_later_sync_logs_them(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections and never answers
        monkeypatch.setenv(URI, f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        for key in plan.runs:
            with job.logged(plan, key, plan.results()):
                tell("learning", {"step": 0, "loss": 3.0})
        assert "cannot be used" in settled()
        monkeypatch.delenv(URI)
    assert search() == []
    commands.sync_tracking()
    assert len(search()) == len(plan.runs)
    assert "quarot_table1: " in capsys.readouterr().out


def test_nothing_is_started_where_tracking_is_off(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    off = plan.model_copy(update={"tracking": False})
    monkeypatch.setattr(job, "LogLine", None)
    monkeypatch.setattr(jobs, "measure", lambda *_: "measured")
    assert jobs.make(off, next(iter(plan.runs)), plan.results()) == "measured"
