"""Pages of tables with learned rotations: what they were learned with, how far it came, and where it lies."""

from pathlib import Path

import pytest

from reproduction.run.results import RunResult, read_result, write_result
from reproduction.tables.project import Project
from tests.helpers.learned import LEARNED, learned_record
from tests.helpers.reports import compute, load, page, table

WEIGHTS_KEPT = {"weights": None, "methods": {"gptq": None}}
ROWS = [{"name": "Baseline", "method": "baseline"}, LEARNED, {**LEARNED, "name": "8 bits", "recipe": WEIGHTS_KEPT}]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Two rows on the same learned rotations, with two seeds on two models."""
    project = load(tmp_path, monkeypatch, table("table1", rows=ROWS, published=None, claims=[]))
    compute(project)
    for key, runs in project.rotations.items():
        for run in runs:
            result = read_result(project.results.run(run.key))
            weights = {**result.weights, "rotation": {**learned_record(run), "corpora": {}}}
            write_result(project.results.run(run.key), RunResult(run, result.metrics, result.provenance, weights))
            assert key == run.rotation_key
    return project


def test_the_page_names_every_learned_rotation_once(project: Project) -> None:
    assert len(project.rotations) == 4
    text = page(project)
    for key in project.rotations:
        assert text.count(f"[`{key}`](../results/rotations/{project.names[key]}/history.json)") == 1
    assert "Learned rotations: 4, from the first step to the last" in text
    assert "| Learned; 8 bits | small | 0 | inputs, cache | 3 x 2 x 16 | 5.00 → 3.00 | - | - | 30 |" in text


def test_settings_and_provenance_speak_of_the_learning(project: Project) -> None:
    text = page(project)
    assert "R1 learned from randomized Hadamard" in text
    assert "Cayley SGD, 3 steps of 2 x 16 tokens of 4 samples of wikitext2, learning rate 1.5 linear" in text
    assert "10 runs, 8 stored weights and 4 learned rotations: 151 s" in text  # 10 x 1.5 s, 8 x 2 s and 4 x 30 s
    assert text.count(", digest `0123456789abcdef`\n") == 3  # of runs, weights and rotations


def test_tables_without_learned_rotations_do_not_speak_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = load(tmp_path, monkeypatch, table("table1"))
    compute(project)
    assert "earned rotation" not in page(project)
