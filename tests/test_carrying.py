"""Recorded times whose digests were carried on: the proof is repeated, and it lets nothing pass that is not named."""

import json
import subprocess
from pathlib import Path

import pytest

from rotquant.foundation.errors import ConfigError
from rotquant.study import carrying, digests
from rotquant.study.carrying import Step, proved, read_steps

ROOT = Path(__file__).parents[1]
STEPS = read_steps()


@pytest.fixture(autouse=True)
def history() -> None:
    """Skip where a commit of a step is not in the history."""
    for commit in {commit for step in STEPS for commit in (step.commit, step.to) if commit}:
        found = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, check=False)
        if found.returncode:
            pytest.skip(f"the history of this clone does not hold {commit[:12]}")


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.commit[:12])
def test_the_proof_of_a_step_gives_the_digests_that_are_committed(step: Step) -> None:
    assert proved(step.model_copy(update={"cells": 0, "digests": {}}), ROOT) == step


def test_records_that_were_not_current_are_not_carried() -> None:
    (first,) = (step for step in STEPS if step.to is None)
    cells = carrying._cells(ROOT)
    carried = [cell for cell in cells if cell.code in first.digests.get(cell.benchmark, {})]
    assert len(carried) == first.cells < len(cells)


def test_a_step_carries_no_benchmark_that_uses_a_change_which_is_not_named() -> None:
    step = next(step for step in STEPS if step.to)
    fewer = step.model_copy(update={"definitions": step.definitions[1:], "digests": {}})
    assert proved(fewer, ROOT).digests != step.digests
    assert not proved(fewer.model_copy(update={"definitions": ()}), ROOT).digests


def test_a_time_is_current_where_its_digest_or_what_it_is_carried_to_is_todays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        {"digests": {"linear": {"old": "new"}}},
        {"digests": {"linear": {"new": "newer"}, "block": {"b": "newer"}}},
    ]
    path = tmp_path / "carried.json"
    path.write_text(json.dumps({"steps": steps}))
    monkeypatch.setattr(digests, "CARRIED", path)
    monkeypatch.setattr(digests, "benchmark_digest", lambda name: "newer")
    digests._carried.cache_clear()
    try:
        assert all(digests.is_current("linear", recorded) for recorded in ("old", "new", "newer"))
        assert not digests.is_current("block", "old")
        assert not digests.is_current("linear", "b")
    finally:
        digests._carried.cache_clear()


def test_a_commit_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="commit 0123456 is not in the history of"):
        proved(Step(commit="0123456"), ROOT)
