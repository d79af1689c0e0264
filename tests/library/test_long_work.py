"""The library's long work and the commands say how far they are, and nothing where that is not wanted."""

import random
from pathlib import Path

import pytest
import torch

from rotquant.methods.spinquant.cayley_training import learn_rotations
from rotquant.metrics.perplexity import perplexity
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens
from rotquant.weights.build import build_weights
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY, tiny_model, tiny_tokens
from tests.helpers.watching import long_work

CALIBRATION = {"calibration": {"samples": 4, "sequence_length": 24}}
CHANNELS = {"weights": {"scheme": {"granularity": "channel", "group_size": None}}}
GENERATION = {"methods": {"llm_qat": {"samples": 4, "sequence_length": 8, "steps": 2, "batch_size": 2}}}
PREFIX = {"methods": {"cushioncache": {"start": "bos", "threshold": 1.0, "max_tokens": 3, "steps": 2, "batch_size": 2}}}
TRAINING = {"methods": {"omniquant": {"steps": 3, "batch_size": 2}}}
WEIGHTS: dict[str, tuple[dict, set[str]]] = {
    "gptq": ({}, {"GPTQ: layer"}),
    "quip-sharp": ({}, {"QuIP#: layer"}),
    "quarot-rtn": ({}, {"rotating: layer", "rounding to nearest: layer"}),
    "smoothquant": ({}, {"measuring inputs: layer", "rounding to nearest: layer"}),
    "awq": (CHANNELS, {"AWQ: layer"}),
    "omniquant": (TRAINING, {"OmniQuant: layer", "block 1: step"}),
    "cushioncache": (CHANNELS | PREFIX, {"prefix search: step", "prefix tuning: step 2 of 2, loss", "static scales"}),
    "qfep": ({"methods": {"qfep": {"contexts": 4}}}, {"activation spikes: layer", "the prefix: layer"}),
    "llm-qat": (GENERATION, {"LLM-QAT text, 4 sequences at once: token", "LLM-QAT training: step 2 of 2, loss"}),
}


@pytest.mark.parametrize("method", WEIGHTS)
def test_making_weights_says_how_far_it_is(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = WEIGHTS[method]
    recipe = preset(method)
    recipe = override(recipe, changes | (CALIBRATION if recipe.calibration else {}), "test")
    samples = tiny_tokens(batch=4) if recipe.needs_calibration else None
    shape = {"head_dim": 16, "intermediate_size": 128}
    with long_work(monkeypatch):
        build_weights(tiny_model(**shape), None, recipe, 0, samples)
        said = capsys.readouterr()
        build_weights(tiny_model(**shape), None, recipe, 0, samples, progress=False)
    assert {words for words in expected if words not in said.err} == set()
    assert said.out == capsys.readouterr().err == ""


def test_learning_and_measuring_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = override(preset("spinquant-hard"), {"methods": {"spinquant": {"steps": 3, "batch_size": 2}}}, "test")
    model, samples = tiny_model(), tiny_tokens(batch=4)
    with long_work(monkeypatch):
        learn_rotations(model, recipe, 0, samples)
        perplexity(model, Tokens(samples.flatten()), Perplexity(sequence_length=24), batch_size=1)
    said = capsys.readouterr().err
    expected = {"learning rotations: step 2 of 3, loss", "perplexity: window 2 of 4"}
    assert {words for words in expected if words not in said} == set()
    with long_work(monkeypatch):
        learn_rotations(model, recipe, 0, samples, progress=False)
    assert capsys.readouterr().err == ""


def test_the_commands_say_what_they_do_and_print_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=2000)
    (tmp_path / "words.txt").write_text(" ".join(words).replace("w9 ", "w9\n"))
    text = ["--corpus", str(tmp_path / "words.txt"), "--sequence-length", "24", "--device", "cpu"]
    quantized = str(tmp_path / "quantized")
    with long_work(monkeypatch):
        assert rotquant(monkeypatch, "quantize", str(tmp_path / "model"), "-o", quantized, "--samples", "4", *text) == 0
        making = capsys.readouterr()
        assert rotquant(monkeypatch, "evaluate", quantized, *text) == 0
        measuring = capsys.readouterr()
    steps = {
        "starting",
        "loading the model",
        "reading words (train)",
        "tokenizing",
        "rotating",
        "GPTQ",
        "saving the model",
    }
    assert {words for words in steps if words not in making.err} == set()
    steps = {"starting", "loading the model", "reading words (test)", "tokenizing", "perplexity: window"}
    assert {words for words in steps if words not in measuring.err} == set()
    made, cost = making.out.splitlines()
    assert "weights quantized" in made
    assert cost.startswith("cost: perplexity")
    assert len(measuring.out.splitlines()) == 1
