"""Every bad input ends in one sentence that says what was wrong, before anything is written: tests/bad_inputs.yaml."""

import shlex
import sys
from pathlib import Path
from string import Template

import pytest
import yaml

from rotquant.cli import app
from tests.places import make_places, snapshot

CASES = yaml.safe_load(Path(__file__).with_suffix(".yaml").with_stem("bad_inputs").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("inputs") / "places")


@pytest.mark.parametrize("case", CASES, ids=[case["run"] for case in CASES])
def test_bad_input_is_one_sentence_and_writes_nothing(case, places, tmp_path, monkeypatch, capsys):
    arguments = [Template(word).substitute(places) for word in shlex.split(case["run"])]
    monkeypatch.setattr(sys, "argv", ["rotquant", *arguments])
    monkeypatch.chdir(tmp_path)
    inputs = Path(places["model"]).parent
    before = snapshot(tmp_path, inputs)
    with pytest.raises(SystemExit) as stop:
        app()
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert Template(case["says"]).substitute(places) in said
    sentence = said.rstrip("\n")
    assert sentence.startswith("rotquant: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert snapshot(tmp_path, inputs) == before
