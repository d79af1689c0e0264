"""The shipped models' README shows what their cards say, and a card as the diagnosis writes it is read whole."""

import json
from pathlib import Path

import pytest

from reproduction.commands.card import CARD_END, CARD_START, _write_card
from reproduction.shipped.phenomena import phenomena
from rotquant.commands.diagnosis import tables
from rotquant.metrics.diagnostics import Costs, find_sinks
from tests import cards
from tests.helpers.models import VOCABULARY
from tests.helpers.sinks import BOS, COSTS, SINK, planted, result

ON = "3 windows of 32 tokens spread over the validation split of words, rotation of seed 0"
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
RECIPE = {"stands_for": "Llama-2-7B", "model": MODEL, "steps": 40_000, "learning_rate": 0.0035}


def test_the_readme_shows_the_cards():
    assert (cards.MODELS / "README.md").read_text(encoding="utf-8") == cards.readme(), "python -m tests.cards"


def test_every_shipped_model_with_weights_of_its_own_has_figures():
    assert {card.name for card in cards.cards()} == {file.parent.name for file in cards.MODELS.glob("*/config.json")}


@pytest.fixture(scope="module")
def sinks():
    """Of a model whose prefix is a token that stands out and BOS."""
    import torch

    windows = torch.randint(10, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
    windows[:, 0] = windows[0, 5] = windows[0, 20] = windows[1, 31] = SINK
    return find_sinks(planted(), windows, BOS, threshold=8.0)


def write(models: Path, name: str, sinks, costs: Costs = COSTS, on: str = ON) -> None:
    """A model's folder as training and diagnosis leave it."""
    folder = models / name
    folder.mkdir()
    card = folder / "MODEL_CARD.md"
    card.write_text(f"# {name}\n\n{CARD_START}\n{CARD_END}\n")
    shown = [phenomena(costs, sinks, word), *tables(costs, sinks, word)]
    _write_card(card, f"Printed by `rotquant card {name} --split validation`, on {on}.", shown)
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    (folder / "curve.json").write_text(json.dumps({"parameters": 18_400_000}))


def word(token: int) -> str:
    return " |" if token == SINK else f"w{token}"


def test_a_row_has_what_the_cards_say_and_what_falls_short_is_bold(tmp_path, sinks):
    write(tmp_path, "rq-13b", sinks)
    write(tmp_path, "rq-7b", sinks, Costs(COSTS.perplexity | {"w4a4": result(1.2, 2.2, 3.2)}, COSTS.answers))
    (tmp_path / "rq-7b-math").mkdir()
    (tmp_path / "rq-7b-math/MODEL_CARD.md").write_text(f"{CARD_START}\n{CARD_END}\n")
    head, _, text = cards.table(cards.cards(tmp_path)).partition("\n\n")
    assert head == f"The figures are of `rotquant card`, on {ON}. What falls short is bold."
    rows = text.splitlines()
    assert rows[:2] == ["| | asked | rq-7b | rq-13b |", "| --- | --- | --- | --- |"]
    for row in (
        "| width x layers | | 64 x 2 | 64 x 2 |",
        "| heads (key-value heads) x size | | 4 (2) x 16 | 4 (2) x 16 |",
        "| million parameters | | 18.4 | 18.4 |",
        "| steps; peak rate | | 40,000; 0.0035 | 40,000; 0.0035 |",
        "| plain W4A4 over unquantized | at least 2 | **1.22** | 2.01 |",
        "| plain W4A4, points lost | at least 8 | 50.0 | 50.0 |",
        "| taken back by R1 R2 R4 | at least 75% | **52%, 0.10 nats left** | 90%, 0.10 nats left |",
        "| 3-bit KV cache, rotated | at most 4% | +3.0% | +3.0% |",
        "| above 8 behind the prefix | at most 1 in 10,000, on 3 models | **7 of 128** | **7 of 128** |",
        "| static inputs over dynamic, rotated | at least 2.5, on 1 model | **1.00** | **1.00** |",
        r"| the prefix | | `␣\|` `w1` | `␣\|` `w1` |",
        "| unquantized, perplexity | | 7.39 | 7.39 |",
    ):
        assert row in rows


def test_what_is_asked_of_some_models_is_bold_where_too_few_have_it():
    def row(met):
        return str(cards.Line("ratio", ["1", "5", "6"], "at least 5", met, least=2))

    assert row([False, True, True]) == "| ratio | at least 5, on 2 models | 1 | 5 | 6 |"
    assert row([False, False, True]) == "| ratio | at least 5, on 2 models | **1** | **5** | 6 |"


def test_a_figure_that_a_card_lacks_falls_short(tmp_path, sinks):
    write(tmp_path, "rq-7b", sinks)
    write(tmp_path, "rq-13b", sinks, Costs(COSTS.perplexity))
    assert "| plain W4A4, points lost | at least 8 | 50.0 | **-** |" in cards.table(cards.cards(tmp_path)).splitlines()


def test_a_note_on_one_model_is_left_to_its_card(tmp_path, sinks):
    write(tmp_path, "rq-7b", sinks)
    write(tmp_path, "rq-phi3", sinks, on=f"{ON}; size 72 has no rotation. Given: --set rotation.heads=false")
    assert [card.on for card in cards.cards(tmp_path)] == [ON, ON]


def test_figures_of_different_texts_make_no_table(tmp_path, sinks):
    write(tmp_path, "rq-7b", sinks)
    write(tmp_path, "rq-13b", sinks, on=ON.replace("validation", "test"))
    with pytest.raises(ValueError, match="the figures are of different texts: 3 windows"):
        cards.table(cards.cards(tmp_path))
