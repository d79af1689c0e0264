"""The reproduction's commands answer in JSON, and a shell completes tables' ids."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproduction.commands.runs import table_names
from reproduction.sources import load_tables
from rotquant.commands.root import cli
from tests.helpers.commands import rotquant
from tests.helpers.project import REPOSITORY, Copy, checkpoints_by_name


def test_runs_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoints_by_name(monkeypatch)
    monkeypatch.chdir(Copy(tmp_path).root)
    assert rotquant(monkeypatch, "runs", "list", "quarot_table1", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["table"] for run in runs} == {"quarot_table1"}
    assert len({run["key"] for run in runs}) == len(runs)
    assert all(run["metric"] == "perplexity" and len(run["key"]) == 16 for run in runs)


def test_tables_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert set(table_names()) == set(load_tables(REPOSITORY))
    words = "rotquant report page rcp_figure"
    environment = {"_ROTQUANT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    found = CliRunner().invoke(cli, prog_name="rotquant", env=environment).stdout.split()
    assert "rcp_figure6" in found
    assert all(name.startswith("rcp_figure") for name in found)
    monkeypatch.chdir(tmp_path)
    assert table_names() == []
