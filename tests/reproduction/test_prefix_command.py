"""`rotquant prefix`: it finds what was planted, says what it found and chose, and writes what was asked for."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.corpora import Corpus
from rotquant import api
from rotquant.models.outlier_tokens import detect_prefix, token_maxima
from rotquant.recipes.recipe import parse_recipe
from rotquant.recipes.schemes import Calibration
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY
from tests.helpers.sinks import BOS, HEIGHT, SINK, planted

SMALL = ("--sequence-length", "32", "--samples", "6", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("planted") / "model"
    planted().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def write_text(path: Path, sinks: bool) -> str:
    """A text of which every twentieth word is the sink, or none."""
    words = [f"w{8 + i * i % (VOCABULARY - 8)}" if i % 20 or not sinks else f"w{SINK}" for i in range(4000)]
    path.write_text("\n".join(words))
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt", sinks=True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; returns its status, what it printed as one line, and what it said on standard error."""

    def prefix(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "80")
        status = rotquant(monkeypatch, "prefix", *arguments)
        said = capsys.readouterr()
        return status, " ".join(said.out.split()), said.err

    return prefix


def test_it_finds_the_planted_token_and_says_the_prefix(folder: Path, text: str, run: Any) -> None:
    status, printed, _ = run(str(folder), "--corpus", text, *SMALL, "--threshold", "8")
    assert status == 0
    assert f"prefix of 2 tokens: `w{SINK}` `<s>` (--set methods.prefixed_outliers.ids=[{SINK},{BOS}])" in printed
    assert "on 6 windows of 32 tokens from the train split of words, seed 0" in printed
    assert f"`w{SINK}`" in printed
    assert "outlier tokens by layer" in printed
    assert "…" not in printed  # nothing is cut in 80 columns


def test_its_record_is_what_the_library_finds(folder: Path, text: str, run: Any, tmp_path: Path) -> None:
    record, figure = tmp_path / "found.json", tmp_path / "found.svg"
    asked = [str(folder), "--corpus", text, *SMALL, "--threshold", "8", "--seed", "3"]
    assert run(*asked, "-o", str(record), "--figure", str(figure))[0] == 0
    found = json.loads(record.read_text())
    spec = Corpus(name="words", source="local", path=text)
    calibration = Calibration(samples=6, sequence_length=32)
    windows = api.calibration_tokens(spec, calibration, tiny_tokenizer(), 3)
    ratios = token_maxima(planted(), windows).ratios
    chosen = detect_prefix(ratios, windows, BOS, 8.0)
    assert tuple(found["prefix"]["ids"]) == chosen
    assert found["prefix"]["content"] == [f"w{SINK}", "<s>"]
    before = found["found"]["no prefix"]
    assert before["ratios"] == pytest.approx(ratios.amax(dim=(1, 2)).tolist(), rel=1e-5)
    assert before["first"] + before["others"] == int((windows == SINK).sum()) > 0
    assert {tuple(one) for one in before["positions"]} == {
        (place, int(count)) for place, count in enumerate((windows == SINK).sum(0)) if count
    }
    assert found["settings"]["threshold"] == 8
    residual = token_maxima(planted(), windows).residual_ratios
    assert found["residual"]["the first token"] == pytest.approx(residual[..., 0].amax(dim=1).tolist())
    assert found["residual"]["after the first token"] == pytest.approx(residual[..., 1:].amax(dim=(1, 2)).tolist())
    assert found["residual"]["the prefix"] == pytest.approx([HEIGHT] * 2)  # SINK is in it
    assert found["text"]["splits"]
    assert ElementTree.fromstring(figure.read_text()).tag.endswith("svg")


def test_a_recipe_with_the_same_text_finds_the_same_prefix(folder: Path, text: str, run: Any, tmp_path: Path) -> None:
    record = tmp_path / "found.json"
    assert run(str(folder), "--corpus", text, *SMALL, "--threshold", "8", "--seed", "1", "-o", str(record))[0] == 0
    data = {"methods": {"prefixed_outliers": {"threshold": 8.0}}, "calibration": {"samples": 6, "sequence_length": 32}}
    recipe = parse_recipe(data, "the test's recipe")
    made = api.quantize(folder, recipe, corpus=Corpus(name="words", source="local", path=text), seed=1)
    ids = made.stored.state.tensors["prefixed_outliers"]["ids"].tolist()
    assert json.loads(record.read_text())["prefix"]["ids"] == ids


def test_no_outlier_token_is_a_result(folder: Path, run: Any, tmp_path: Path) -> None:
    quiet = write_text(tmp_path / "quiet.txt", sinks=False)
    status, printed, _ = run(str(folder), "--corpus", quiet, *SMALL, "--figure", str(tmp_path / "none.svg"))
    assert status == 0
    assert "no outlier token found at the input of down_proj, prefix of 1 token: `<s>` (" in printed
    assert "times the median: the first token 1 (layer 1)" in printed  # all of a planted model's tokens but the sink
    assert "none elsewhere" in (tmp_path / "none.svg").read_text()


def test_outliers_of_the_residual_stream_alone_are_shown_with_what_takes_them_away(
    text: str, run: Any, tmp_path: Path
) -> None:
    """Gemma's BOS is thousands of times the median there; a norm's gain of zero keeps it from down_proj here."""
    model = planted()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[0] = 0  # the channel of the sink
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    record = tmp_path / "found.json"
    status, printed, _ = run(str(tmp_path / "model"), "--corpus", text, *SMALL, "--threshold", "8", "-o", str(record))
    assert status == 0
    assert "no outlier token found at the input of down_proj" in printed
    assert f"after the first token {HEIGHT:.0f} (layer 1)" in printed
    assert "outlier tokens there and none at the input of down_proj: norms divide by them" in printed
    assert max(json.loads(record.read_text())["found"]["no prefix"]["ratios"]) < 8


def test_a_tokenizer_without_bos_is_said(folder: Path, text: str, run: Any, tmp_path: Path) -> None:
    model = planted()
    model.config.bos_token_id = None
    model.generation_config.bos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    status, printed, _ = run(str(tmp_path / "model"), "--corpus", text, *SMALL, "--threshold", "8")
    assert status == 0
    assert "; no BOS: the tokenizer has none; on 6 windows" in printed
    assert f"token: `w{SINK}` " in printed or f"tokens: `w{SINK}` " in printed
    assert "`<s>`" not in printed
    quiet = write_text(tmp_path / "quiet.txt", sinks=False)
    assert (
        "no outlier token found at the input of down_proj, and no prefix; no BOS"
        in run(str(tmp_path / "model"), "--corpus", quiet, *SMALL, "--threshold", "8")[1]
    )


@torch.no_grad()
def test_a_shipped_model_has_its_outlier_at_the_first_position(run: Any, tmp_path: Path) -> None:
    record = tmp_path / "found.json"
    asked = ["workflow/resources/models/rq-13b", "--samples", "2", "--sequence-length", "64", "--device", "cpu"]
    status, printed, _ = run(*asked, "-o", str(record))
    assert status == 0
    found = json.loads(record.read_text())["found"]
    assert found["no prefix"]["first"] == 2  # of two windows
    assert max(found["behind the prefix"]["ratios"]) < max(found["no prefix"]["ratios"]) / 2
    assert "`<s>` (--set methods.prefixed_outliers.ids=[0])" in printed
