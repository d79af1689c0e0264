"""An export has fewer digits; means, numbers and what a run file says of itself stay."""

import itertools
import json
import random
import statistics
from pathlib import Path

import pytest
from reproduction.run.rounding import LONGEST, mean_kept, rounded


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("places", [2, 5])
def test_samples_keep_their_mean_and_move_by_a_step_at_most(count: int, places: int) -> None:
    draws = random.Random(count)
    values = [draws.gauss(0.5, 3) for _ in range(count)]
    found = mean_kept(values, places)
    assert len(found) == count
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)
    assert all(abs(one - other) <= 10**-places + 1e-9 for one, other in zip(found, values, strict=True))
    if count == 1000:
        assert statistics.stdev(found) == pytest.approx(statistics.stdev(values), rel=1e-3)
        assert len(json.dumps(found)) < len(json.dumps(values)) * 0.55


@pytest.mark.parametrize("usual", [1e-7, 0.03, 2.5, 4e3, 0.0])
def test_windows_keep_four_digits_and_the_mean_that_a_run_is_checked_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual: float
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = random.Random(7)
    values = [usual * draws.uniform(0.5, 1.5) for _ in range(200)]
    path = Path("results/runs/0.json")
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"run": {"metric": {"kind": "perplexity"}}, "provenance": {}, "samples": {"kl": values}})
    )
    found = json.loads(rounded(path))["samples"]["kl"]
    assert statistics.fmean(found) == pytest.approx(statistics.fmean(values), rel=1e-9)
    assert found == pytest.approx(values, abs=2e-3 * usual)
    assert not usual or len(json.dumps(found)) < len(json.dumps(values)) * 0.6


def test_a_run_keeps_its_numbers_answers_and_other_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("results/runs/0.json")
    path.parent.mkdir(parents=True)
    run = {
        "run": {"metric": {"kind": "zero_shot"}},
        "provenance": {},
        "metrics": {"a": 0.123456789012},
        "arrays": {"curve": [0.123456789]},
        "samples": {"a": "0110", "a_log_odds": [0.123456, -2.0], "a_choice": "0120"},
    }
    path.write_text(json.dumps(run))
    assert json.loads(rounded(path)) == run | {
        "samples": {**run["samples"], "a_log_odds": [0.1, pytest.approx(-1.976544)]}
    }
    run |= {"run": {"metric": {"kind": "magnitudes"}}, "samples": {}}
    path.write_text(json.dumps(run))
    assert json.loads(rounded(path)) == run | {"arrays": {"curve": [0.123]}}
    run |= {"run": {"metric": {"kind": "perplexity"}}, "samples": {"perplexity": [2.123456789, 3.0]}}
    path.write_text(json.dumps(run))
    assert json.loads(rounded(path)) == run | {"samples": {"perplexity": [2.123, pytest.approx(3.000456789)]}}


def test_other_files_but_histories_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text('{"seconds": 1.23456789}')
    assert rounded(tmp_path / "weights.json") == b'{"seconds": 1.23456789}'
    (tmp_path / "history.json").write_text('[{"step": 123456, "loss": 1.23456789}]')
    assert rounded(tmp_path / "history.json") == b'[{"step":123456,"loss":1.2346}]'


@pytest.mark.parametrize("count", [0, 1, LONGEST, LONGEST + 1, 15_360])
def test_a_history_of_weights_keeps_its_last_step_and_evenly_spaced_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [{"step": step, "loss": 1.0} for step in range(count)]
    for kind in ("rotations", "weights"):
        path = Path(f"results/{kind}/0/history.json")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(steps))
        kept = [one["step"] for one in json.loads(rounded(path))]
        if kind == "rotations" or count <= LONGEST:
            assert kept == [*range(count)]
        else:
            assert LONGEST / 2 < len(kept) <= LONGEST
            assert kept[-1] == count - 1
            assert len({after - before for before, after in itertools.pairwise(kept)}) == 1


@pytest.mark.parametrize(
    ("told", "left"),
    [("/home/a/x/results/tasks/s-1/a.jsonl", "results/tasks/s-1/a.jsonl"), ("/data/a.jsonl", "a.jsonl")],
)
def test_no_place_of_a_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, left: str) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = {"suite": "shipped", "tasks": {"a": {"file": told, "sha256": "0"}}}
    there = {"suite": "shipped", "tasks": {"a": {"file": left, "sha256": "0"}}}
    run = {"run": {"metric": {"kind": "zero_shot"}}, "provenance": {"tasks": tasks}}
    for folder, data, found in (("runs", run, run | {"provenance": {"tasks": there}}), ("tasks", tasks, there)):
        path = Path("results") / folder / "0.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(data))
        assert json.loads(rounded(path)) == found
