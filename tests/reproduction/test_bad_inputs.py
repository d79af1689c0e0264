"""Every bad input ends in one sentence that says what was wrong, before anything is written: tests/bad_inputs.yaml."""

import re
import shlex
from functools import cache
from pathlib import Path
from string import Template

import pytest
import yaml

from reproduction.commands import runs
from reproduction.planning.current import current_plan
from reproduction.sources import load_project
from rotquant.cli import app
from tests.helpers.places import make_places, snapshot

#: A duration in words, however long a busy machine takes.
TIME = r"\d+ (s|min( \d+ s)?|h( \d+ min)?)"


def cases(name: str) -> pytest.MarkDecorator:
    """The lines of a table beside this file, as parameters named by what they run."""
    lines = yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))
    values = [pytest.param(line["run"], line["says"], line.get("in"), id=line["run"]) for line in lines]
    return pytest.mark.parametrize(("run", "says", "place"), values)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("inputs") / "places")


@cache
def plan_of(root, overrides=(), **options):
    """The plan of a project that nobody edits, made once: it takes seconds and is not written here."""
    return current_plan(root, overrides, **options)


@cache
def project_of(root, overrides):
    """The same of its tables: a working folder's project."""
    return load_project(overrides)


@pytest.fixture
def run_line(places, tmp_path, monkeypatch):
    """Runs a line of a table, in an empty folder if not in a place; returns the exit status."""
    monkeypatch.setattr(runs, "load_project", lambda given: project_of(Path.cwd(), tuple(given)))
    monkeypatch.setattr(runs, "current_plan", lambda root, given=(), **more: plan_of(root, tuple(given), **more))

    def run(line: str, place: str | None) -> int:
        arguments = [Template(word).substitute(places) for word in shlex.split(line)]
        monkeypatch.setenv("COLUMNS", "200")  # so that no table is cut
        monkeypatch.chdir(places[place] if place else tmp_path)
        with pytest.raises(SystemExit) as stop:
            app(arguments)
        return stop.value.code

    return run


@cases("bad_inputs.yaml")
def test_bad_input_is_one_sentence_and_writes_nothing(run, says, place, run_line, places, tmp_path, capsys):
    inputs = Path(places["model"]).parent
    before = snapshot(tmp_path, inputs)
    status = run_line(run, place)
    said = capsys.readouterr().err
    assert status == 2, said
    *progress, sentence = said.splitlines()
    assert all(re.search(rf"(, |: done, ){TIME}(, about {TIME} left)?$", line) for line in progress)
    assert sentence.startswith("rotquant: ")
    assert Template(says).substitute(places) in sentence
    assert sentence.endswith(".")
    assert len(sentence) < 500
    assert snapshot(tmp_path, inputs) == before


@cases("good_inputs.yaml")
def test_odd_input_is_no_bad_input(run, says, place, run_line, places, tmp_path, capsys):
    inputs = Path(places["model"]).parent
    before = snapshot(inputs)
    assert run_line(run, place) == 0, capsys.readouterr().err
    assert Template(says).substitute(places) in capsys.readouterr().out
    assert snapshot(inputs) == before
    assert not (tmp_path / "results").exists()  # which is the workflow's
