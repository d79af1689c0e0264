"""The command line as its user meets it: the same number in another process, and errors that are sentences."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rotquant import api
from rotquant.cli import app
from rotquant.files import file_digest
from rotquant.methods.spinquant import learn_rotations
from tests.models import VOCABULARY, tiny_model
from tests.test_checkpoints import tiny_tokenizer

SMALL = ["--samples", "4", "--sequence-length", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cli") / "model"
    tiny_model(dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=600)
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(words))
    return str(file)


def rotquant(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["rotquant", *arguments])
    monkeypatch.setenv("COLUMNS", "300")  # so that no sentence is wrapped
    with pytest.raises(SystemExit) as stop:
        app()
    return int(stop.value.code or 0)


def printed_perplexity(output: str) -> str:
    return re.search(r"perplexity ([\d.]+)", output).group(1)


def test_a_quantized_folder_has_the_same_perplexity_in_another_process(model, text, tmp_path, monkeypatch, capsys):
    folder = str(tmp_path / "quantized")
    arguments = ["quantize", model, "-o", folder, "--corpus", text, "--set", "rotation.heads=false", *SMALL]
    assert rotquant(monkeypatch, *arguments) == 0
    assert "14 weights quantized" in capsys.readouterr().out
    evaluate = ["evaluate", folder, "--corpus", text, "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, *evaluate) == 0
    here = printed_perplexity(capsys.readouterr().out)
    command = [sys.executable, "-m", "rotquant.cli", *evaluate]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed_perplexity(there) == here
    assert rotquant(monkeypatch, "evaluate", model, *evaluate[2:]) == 0
    assert printed_perplexity(capsys.readouterr().out) != here  # the folder's quantizers are at work


LEARNING = ["steps=4", "batch_size=2", "text.samples=4"]


def test_learned_rotations_are_kept_in_a_file_that_recipes_share_and_the_model_exported(
    model, text, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "rotations.safetensors"
    learning = [option for change in LEARNING for option in ("--set", f"rotation.learning.{change}")]
    common = ["--method", "spinquant-easy", "--corpus", text, "--rotations", str(file), *learning, *SMALL]
    assert rotquant(monkeypatch, "quantize", model, "-o", str(tmp_path / "gptq"), *common) == 0
    assert "(learning " in capsys.readouterr().out
    content = file.read_bytes()
    rtn = ["quantize", model, "-o", str(tmp_path / "rtn"), *common, "--set", "weights.gptq=null"]
    assert rotquant(monkeypatch, *rtn) == 0
    assert "(learning " not in capsys.readouterr().out
    sources = [json.loads((tmp_path / name / "rotquant.json").read_text())["source"] for name in ("gptq", "rtn")]
    assert sources[0]["rotation"]["digest"] == sources[1]["rotation"]["digest"] == file_digest(file)
    assert sources[0]["rotation"]["last"]["step"] == 3
    assert file.read_bytes() == content
    assert not list(tmp_path.glob("*.unfinished"))

    assert rotquant(monkeypatch, "export", str(tmp_path / "rtn"), "-o", str(tmp_path / "plain")) == 0
    capsys.readouterr()
    evaluate = ["--corpus", text, "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, "evaluate", str(tmp_path / "plain"), *evaluate) == 0
    plain = printed_perplexity(capsys.readouterr().out)
    assert rotquant(monkeypatch, "evaluate", str(tmp_path / "rtn"), *evaluate) == 0
    assert printed_perplexity(capsys.readouterr().out) != plain  # quantized activations are at work


def test_rotations_of_a_float16_model_are_learned_in_bfloat16(model, text, tmp_path, monkeypatch):
    given: list[torch.dtype] = []

    def learn(network, *arguments, **options):
        given.append(network.dtype)
        return learn_rotations(network, *arguments, **options)

    monkeypatch.setattr(api, "learn_rotations", learn)
    learning = [option for change in LEARNING for option in ("--set", f"rotation.learning.{change}")]
    arguments = ["--method", "spinquant-hard", "--corpus", text, "--dtype", "float16", *learning, *SMALL]
    assert rotquant(monkeypatch, "quantize", model, "-o", str(tmp_path / "quantized"), *arguments) == 0
    assert given == [torch.bfloat16]
    assert json.loads((tmp_path / "quantized" / "rotquant.json").read_text())["dtype"] == "float16"


def test_diagnosis_fills_the_model_card_between_its_markers(model, text, tmp_path, monkeypatch, capsys):
    card = tmp_path / "MODEL_CARD.md"
    card.write_text("before\n<!-- diagnose:start -->\nold\n<!-- diagnose:end -->\nafter\n")
    arguments = ["diagnose", model, "--corpus", text, "--sequence-length", "32", "--max-windows", "2"]
    assert rotquant(monkeypatch, *arguments, "--card", str(card)) == 0
    written = card.read_text()
    assert written.startswith("before\n<!-- diagnose:start -->")
    assert written.endswith("<!-- diagnose:end -->\nafter\n")
    assert "old" not in written
    assert "| static per tensor, rotated |" in written


def test_corpus_prints_the_hash_of_each_split(text, monkeypatch, capsys):
    assert rotquant(monkeypatch, "corpus", text, "--split", "test") == 0
    assert "words" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "quarrot"], "unknown method 'quarrot'; nearest: quarot"),
        (["--set", "weights.scheme.bits=1"], "weights.scheme.bits: Input should be greater than or equal to 2"),
        (["--set", "weights.scheme.bitz=3"], "bitz: Extra inputs are not permitted"),
        (["--set", "weights"], "write it as field.subfield=value"),
        (["--method", "baseline"], "nothing to write"),
        (["--method", "quarot-128g"], "group size 128 does not divide"),
        (["--method", "quik"], "outliers.features is 256"),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--dtype", "int4"], "unknown dtype 'int4'"),
        (["--samples", "0"], "calibration.samples: Input should be greater than 0"),
        (["--sequence-length", "5000"], "fewer than one sample of 5000"),
        (["--corpus", "/nowhere/text.txt"], "/nowhere/text.txt"),
        (["--rotations", "rotations.safetensors"], "the recipe learns no rotations"),
        (["--method", "spinquant-hard", "--sequence-length", "5000"], "fewer than one sample of 5000"),
        (["--method", "spinquant-hard", "--rotations", "pyproject.toml"], "pyproject.toml"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(model, text, tmp_path, monkeypatch, capsys, arguments, sentence):
    folder = tmp_path / "quantized"
    given = ["quantize", model, "-o", str(folder), "--corpus", text, *SMALL, *arguments]
    assert rotquant(monkeypatch, *given) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert not folder.exists()


def test_a_folder_that_is_not_a_quantized_model_is_not_overwritten(model, text, tmp_path, monkeypatch, capsys):
    (tmp_path / "precious").write_text("mine")
    assert rotquant(monkeypatch, "quantize", model, "-o", str(tmp_path), "--corpus", text, *SMALL) == 2
    assert "is not a quantized model" in capsys.readouterr().err
    assert [file.name for file in Path(tmp_path).iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metric", "bleu"], "unknown metric 'bleu'"),
        (["--split", "dev"], "unknown split 'dev'"),
        (["--sequence-length", "5000"], "fewer than one window of 5000"),
    ],
)
def test_bad_evaluation_is_one_sentence(model, text, monkeypatch, capsys, arguments, sentence):
    assert rotquant(monkeypatch, "evaluate", model, "--corpus", text, "--device", "cpu", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_missing_model_is_named(text, monkeypatch, capsys):
    assert rotquant(monkeypatch, "evaluate", "/no/such/model", "--corpus", text) == 2
    assert "/no/such/model" in capsys.readouterr().err
