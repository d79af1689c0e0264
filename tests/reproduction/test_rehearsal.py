"""A rehearsal of config/paper.yaml: every kind of cell is in it, it goes on after a failure and after its end."""

import json
from pathlib import Path

import pytest

from reproduction.planning.current import current_plan
from reproduction.rehearsal.__main__ import main
from reproduction.rehearsal.kinds import kinds_of, made
from reproduction.rehearsal.material import make_folder
from reproduction.run.plan import Plan
from rotquant.recipes.registry import built_in_names
from tests.helpers.project import REPOSITORY

TWO = ["full precision", "gptq, rotated"]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is the project's, and afterwards what it was."""
    monkeypatch.chdir(REPOSITORY)


def rehearsed(folder: Path, *options: str) -> int:
    where = ["--shape", "tiny", "--device", "cpu", "--folder", str(folder), "--keep"]
    return main([*where, *options, "--kinds", *TWO])


def record(folder: Path) -> dict[str, dict]:
    found = json.loads((folder / "rehearsal.json").read_text())
    return {kind["name"]: kind for kind in found["kinds"]}


@pytest.fixture
def plan(tmp_path: Path, inside: None, monkeypatch: pytest.MonkeyPatch) -> Plan:
    files = make_folder(REPOSITORY, tmp_path, "tiny", None, "cpu")
    monkeypatch.chdir(tmp_path)
    return current_plan(tmp_path, files, write=False)


def test_every_method_and_metric_of_the_tables_has_a_kind(plan: Plan) -> None:
    """A method or metric that a table comes to use is rehearsed without a change here."""
    kinds = kinds_of(plan)
    runs = {key: plan.run(key) for key in plan.runs}
    chosen = [runs[kind.run] for kind in kinds]
    assert {made(run) for run in chosen} >= {made(run) for run in runs.values()} - {""}
    assert {run.metric.kind for run in chosen} == {run.metric.kind for run in runs.values()}
    of_chosen = {name for run in chosen for name in run.recipe.methods}
    assert of_chosen == {name for run in runs.values() for name in run.recipe.methods}
    assert of_chosen >= set(built_in_names()) - {"lwc"}  # which no table of config/paper.yaml has
    assert len({kind.name for kind in kinds}) == len(kinds) == len(set(kinds))
    assert len(kinds) < 60


@pytest.mark.long
def test_a_rehearsal_goes_on_after_failures_and_continues(
    tmp_path: Path, inside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(tmp_path, "--longest", "0") == 1
    failed = record(tmp_path)
    assert [kind["state"] for kind in failed.values()] == ["failed", "failed"]
    monkeypatch.chdir(REPOSITORY)
    assert rehearsed(tmp_path, "--jobs", "2") == 0
    done = record(tmp_path)
    assert {name: kind["state"] for name, kind in done.items()} == dict.fromkeys([*TWO, "decoder"], "done")
    (weights, runs) = done["gptq, rotated"]["steps"]
    assert weights["stages"].keys() == {"rotation", "GPTQ"}
    assert runs["host_bytes"] > 2**20
    page = (tmp_path / "rehearsal.md").read_text()
    assert "on random weights of tiny" in page
    assert "3 done, 0 failed, 0 not reached" in page
    capsys.readouterr()
    monkeypatch.chdir(REPOSITORY)
    assert rehearsed(tmp_path) == 0
    assert record(tmp_path) == done  # nothing ran again
    assert "1 of" not in capsys.readouterr().out


def test_after_its_time_no_further_kind_begins(tmp_path: Path, inside: None) -> None:
    assert rehearsed(tmp_path, "--minutes", "0") == 0
    assert {kind["state"] for kind in record(tmp_path).values()} == {"not reached"}


def test_bad_input_is_one_sentence(
    tmp_path: Path, inside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--shape", "llama-2-8b", "--device", "cpu", "--folder", str(tmp_path / "one")]) == 2
    assert "unknown shape 'llama-2-8b'" in capsys.readouterr().err
    assert rehearsed(tmp_path / "none", "--jobs", "0") == 2
    assert capsys.readouterr().err == "rotquant: --jobs is at least 1, not 0.\n"
    assert rehearsed(tmp_path / "two", "--minutes", "0") == 0
    monkeypatch.chdir(REPOSITORY)
    path = tmp_path / "two/rehearsal.json"
    path.write_text(path.read_text().replace('"tiny"', '"llama-2-7b"'))
    assert rehearsed(tmp_path / "two") == 2
    assert "is of another shape (llama-2-7b)" in capsys.readouterr().err


def test_a_folder_of_another_shape_is_not_taken_for_this_one(
    tmp_path: Path, inside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(tmp_path, "--minutes", "0") == 0
    monkeypatch.chdir(REPOSITORY)
    assert main(["--shape", "llama-2-7b", "--device", "cpu", "--folder", str(tmp_path)]) == 2
    assert "is of another shape or number of layers" in capsys.readouterr().err
