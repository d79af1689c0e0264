"""`rotquant card`: what is asked of a model that stands for the papers', on numbers of which the answer is known."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch

from reproduction.commands.card import card
from reproduction.shipped.phenomena import accuracies, asked, phenomena, points_lost, recovered
from reproduction.tasks import Scores, prepare
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import choices_of, log_odds_of
from rotquant.metrics.diagnostics import ASKED, Costs, find_sinks, variants
from rotquant.recipes.schemes import Calibration
from tests.helpers.checkpoints import save_tiny
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY
from tests.helpers.sinks import BOS, COSTS, expected_ratio, planted, result, windows_with_sinks


@pytest.fixture
def windows() -> torch.Tensor:
    return windows_with_sinks()


def test_points_have_the_errors_of_paired_items():
    lost, error = points_lost(COSTS, "w4a4")
    assert (lost, error) == pytest.approx((50.0, 100 * math.sqrt(1 / 3) / 2))  # 0, 1, 1, 0
    assert points_lost(COSTS, "r124")[0] == 0
    assert recovered(COSTS) == pytest.approx((math.exp(0.7) - math.exp(0.1)) / (math.exp(0.7) - 1))


def test_points_lost_are_of_accuracies_whatever_else_tasks_find():
    """Log-odds of the right choice and the choices taken are kept next to the items' scores."""

    def more(scores: Scores, odds: float) -> Scores:
        others = {log_odds_of("parameter"): (odds,) * 4, choices_of("parameter"): (odds,) * 4}
        return Scores(scores.metrics | {log_odds_of("parameter"): odds}, scores.items | others)

    found = {name: more(scores, odds) for (name, scores), odds in zip(COSTS.answers.items(), (3, 1, 2), strict=True)}
    assert points_lost(Costs({}, found), "w4a4") == points_lost(COSTS, "w4a4")


def test_each_figure_stands_beside_what_is_asked_of_it(windows):
    sinks = find_sinks(planted(), windows, BOS, threshold=8.0)
    found = {one.figure: (one.here, one.met) for one in asked(COSTS, sinks, lambda token: f" {token}")}
    assert found == {
        "plain W4A4 over unquantized": ("2.01 ± 0.23", True),
        "plain W4A4, points lost": ("50.0 ± 28.9", True),
        "taken back by R1 R2 R4": ("90%, 0.10 nats left", True),
        "R1 R2 over R1 R2 R4": ("1.11 ± 0.00", False),
        "3-bit KV cache, rotated": ("+3.0 ± 0.0%", True),
        "first token, down_proj input": (f"{expected_ratio():.1f} (0)", True),
        "first token, residual stream": ("50.0 (0)", False),
        "above 8 behind `␣7` `␣1`": ("7 of 128", False),
    }


def test_a_cache_that_breaks_down_is_told_in_times(windows):
    sinks = find_sinks(planted(), windows, None, threshold=8.0)
    broken = Costs(COSTS.perplexity | {"kv3": result(6.0, 7.0, 8.0)})
    here = {one.figure: (one.here, one.met) for one in asked(broken, sinks, str)}
    assert here["3-bit KV cache, rotated"] == ("148.41 ± 0.00 times", False)


def test_a_share_of_perplexity_may_be_large_where_nats_are_left():
    ruined = Costs(COSTS.perplexity | {"w4a4": result(8.3, 9.3, 10.3), "r124": result(6.3, 7.3, 8.3)})
    assert recovered(ruined) > 0.83  # though it is 200 times the unquantized model's perplexity


def test_tasks_that_were_not_asked_are_left_out(windows):
    sinks = find_sinks(planted(), windows, BOS, threshold=8.0)
    assert not any("points" in row[0] for row in phenomena(Costs(COSTS.perplexity), sinks, str).rows)
    rows = accuracies(COSTS).rows
    assert rows[0] == ("Parameter", "50", "75.0", "25.0", "75.0")
    assert rows[-1] == ("points lost", "", "", "50.0 ± 28.9", "0.0 ± 40.8")


TEXT_HEAD = ["--sequence-length", "32", "--device", "cpu", "--tasks-limit"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("diagnosed") / "model")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("words") / "words.txt"
    file.write_text("".join(f"w{3 + i * i % (VOCABULARY - 3)}\n" for i in range(4000)))
    return str(file)


@pytest.fixture(scope="module")
def diagnosed(folder, words, tmp_path_factory):
    """A card that the command has filled, and its record."""
    place = tmp_path_factory.mktemp("diagnosed")
    card, record = place / "MODEL_CARD.md", place / "diagnosis.json"
    card.write_text("before\n<!-- diagnose:start -->\nold\n<!-- diagnose:end -->\nafter\n")
    arguments = ["card", str(folder), "--corpus", words, *TEXT_HEAD, "2", "--max-windows", "3"]
    with pytest.MonkeyPatch.context() as patch:
        assert rotquant(patch, *arguments, "--card", str(card), "-o", str(record)) == 0
    return card, json.loads(record.read_text())


def test_the_command_fills_a_card_and_its_record_says_of_what(folder, words, diagnosed):
    file, result = diagnosed
    written = file.read_text()
    assert written.startswith("before\n<!-- diagnose:start -->\nPrinted by `rotquant card")
    assert written.endswith("<!-- diagnose:end -->\nafter\n")
    assert "old" not in written
    options = f"--corpus {words} --sequence-length 32 --max-windows 3 --tasks-limit 2"
    assert f"Printed by `rotquant card {folder} {options}`, on" in written
    assert "on 3 windows of 32 tokens spread over the test split of words, rotation of seed 0, tasks made" in written
    assert result["settings"]["max_windows"] == 3
    assert (result["settings"]["seed"], result["settings"]["dtype"]) == (0, "float32")
    assert result["text"]["splits"]["test"]["sha256"]
    assert len(result["tasks"]["tasks"]) == 8
    assert result["perplexity"].keys() == variants(Calibration()).keys()
    assert len(result["perplexity"]["w4a4"]["by_window"]) == 3
    assert result["accuracy"].keys() == set(ASKED)
    for figure in result["asked"]:
        assert f"| {figure['figure']} | {figure['here']} | {figure['asked']} |" in written


def test_models_are_chosen_on_validation_text_and_items_of_validation_modules_and_a_card_is_filled_anew(
    folder, words, diagnosed, tmp_path, monkeypatch, capsys
):
    card, record = tmp_path / "MODEL_CARD.md", tmp_path / "diagnosis.json"
    earlier = diagnosed[0].read_text()
    card.write_text(earlier)
    arguments = ["card", str(folder), "--corpus", words, *TEXT_HEAD, "2", "--max-windows", "2", "-o", str(record)]
    assert rotquant(monkeypatch, *arguments, "--split", "validation", "--card", str(card)) == 0
    places = [re.split("<!-- diagnose:(?:start|end) -->", text) for text in (earlier, card.read_text())]
    assert [(before, after) for before, _, after in places] == [("before\n", "\nafter\n")] * 2
    assert "validation split" in places[1][1]
    assert "validation split of words, rotation of seed 0, tasks made from validation modules" in " ".join(
        capsys.readouterr().out.split()
    )
    result = json.loads(record.read_text())
    assert result["settings"]["split"] == "validation"
    assert result["text"]["splits"].keys() == {"validation"}
    chosen_by = prepare(ZeroShot(corpus="modules"), split="validation")
    assert len(result["tasks"]["tasks"]) == 8
    assert all(Path(task["file"]).parent == chosen_by for task in result["tasks"]["tasks"].values())
    assert result["accuracy"]["unquantized"]["parameter.items"] == 2


def test_as_many_items_are_asked_of_either_split():
    assert inspect.signature(card).parameters["tasks_limit"].default == 100
