"""A start of the workflow sets right what a killed Snakemake and a clock that was set back have left."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from reproduction.run import starting
from rotquant.foundation.errors import ResultError
from tests.helpers.project import REPOSITORY

HOLDING = "from reproduction.run.starting import begin; held = begin(); print('held', flush=True); input()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_lock_of_a_killed_snakemake_is_dropped_and_that_of_a_living_one_stays(folder: Path) -> None:
    lock = folder / ".snakemake/locks/0.output.lock"
    lock.parent.mkdir(parents=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    one, other = (subprocess.Popen([sys.executable, "-c", HOLDING], env=environment, **pipes) for _ in range(2))
    for process in (one, other):
        assert process.stdout.readline() == b"held\n"
    lock.write_text("reports/quarot_table1.md\n")
    one.kill()
    one.communicate()
    starting.begin().close()
    assert lock.exists()
    other.kill()
    other.communicate()
    starting.begin().close()
    assert not lock.exists()


def test_files_of_the_future_get_the_present_time_in_their_order(folder: Path) -> None:
    day = 86400
    ages = {
        "reports/a.md": 2 * day,
        "results/runs/b.json": -day,
        "results/measured/c.json": -day,
        "reports/d.md": -2 * day,
    }
    before = time.time()
    for name, age in ages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        os.utime(folder / name, (before - age, before - age))
    starting.begin().close()
    past, one, other, last = ((folder / name).stat().st_mtime for name in ages)
    assert past == pytest.approx(before - 2 * day)
    assert before - 1 < one == other < last < time.time() + 1


def test_a_start_without_room_for_snakemakes_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20_000))
    with pytest.raises(ResultError, match=r"\.snakemake has 0\.02 MB left, .*: make room\."):
        starting.begin()
