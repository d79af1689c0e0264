"""`rotquant compare`: its numbers against both models' logits side by side, for every format that is read."""

import json
import math
from pathlib import Path

import pytest
import torch

from rotquant import api
from rotquant.commands.options import corpus_spec
from rotquant.comparison import ModelComparison, compare
from rotquant.foundation.errors import CheckpointError
from rotquant.models import checkpoints
from rotquant.models.limits import metric_windows
from rotquant.recipes.schemes import Perplexity
from rotquant.text import load_text, tokenize
from rotquant.weights.export import export_compressed
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY, tiny_model

LENGTH = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_words(tmp_path_factory.mktemp("text") / "words.txt", 1500))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in each format."""
    from rotquant.decoder import conversion, save_decoder

    root = tmp_path_factory.mktemp("models")
    found = {name: root / name for name in ("plain", "quantized", "compressed-tensors", "decoder")}
    tiny_model(hidden_size=256, intermediate_size=384, dtype=torch.bfloat16).save_pretrained(found["plain"])
    tiny_tokenizer().save_pretrained(found["plain"])
    api.quantize(found["plain"], "quarot-rtn").save(found["quantized"])
    export_compressed(found["quantized"], found["compressed-tensors"], "transformers", {}, None)
    decoder = conversion.convert(found["quantized"], dtype="float32")
    save_decoder(found["decoder"], decoder, tiny_tokenizer())
    return found


def compared(a: Path, b: Path, text: str) -> ModelComparison:
    metric = Perplexity(corpus=corpus_spec(text).name, sequence_length=LENGTH)
    return compare(a, b, corpus_spec(text), metric=metric)


def expected(a: Path, b: Path, text: str) -> dict[str, torch.Tensor]:
    """Losses of both, KL and flips by window, from the logits of both models at once."""
    metric = Perplexity(corpus=corpus_spec(text).name, sequence_length=LENGTH)
    first, second = api.load(a), api.load(b)
    tokens = tokenize(load_text(corpus_spec(text), "test"), first.tokenizer)
    windows = metric_windows(first.network, tokens, metric)
    with torch.no_grad():
        p, q = (model.network(input_ids=windows).logits[:, :-1].double().log_softmax(-1) for model in (first, second))
    losses = [-one.gather(2, windows[:, 1:, None])[..., 0].mean(1) for one in (p, q)]
    kl = (p.exp() * (p - q)).sum(-1).mean(1)
    return {"a": losses[0], "b": losses[1], "kl": kl, "flips": (p.argmax(-1) != q.argmax(-1)).double().mean(1)}


@pytest.mark.parametrize(
    ("a", "b"),
    [("plain", "quantized"), ("plain", "compressed-tensors"), ("quantized", "plain"), ("decoder", "quantized")],
)
def test_the_numbers_are_those_of_both_models_logits(a: str, b: str, models: dict[str, Path], text: str) -> None:
    found, known = compared(models[a], models[b], text), expected(models[a], models[b], text)
    assert (found.a.format, found.b.format) == (a, b)
    # log-softmax in float32 and in float64 differ by some 1e-7 of values of about 5.
    close = {"rel": 1e-4, "abs": 1e-6}
    difference = known["b"] - known["a"]
    ratio = math.exp(difference.mean())
    count = math.sqrt(len(difference))
    assert found.ratio == pytest.approx((ratio, ratio * difference.std().item() / count), **close)
    assert found.kl == pytest.approx((known["kl"].mean().item(), known["kl"].std().item() / count), **close)
    flips = 100 * known["flips"]
    assert found.flips == pytest.approx((flips.mean().item(), flips.std().item() / count), **close)
    assert found.a.tokens_per_second > 0


def test_a_model_loses_nothing_against_itself(models: dict[str, Path], text: str) -> None:
    found = compared(models["quantized"], models["quantized"], text)
    assert found.ratio == (1.0, 0.0)
    assert found.flips == (0.0, 0.0)
    assert found.kl == pytest.approx((0.0, 0.0), abs=1e-9)


def test_size_and_bits_are_those_of_the_files(models: dict[str, Path], text: str) -> None:
    found = compared(models["plain"], models["compressed-tensors"], text)
    for side in (found.a, found.b):
        assert side.bytes == sum(file.stat().st_size for file in Path(side.model).glob("*.safetensors"))
    assert found.a.bits_per_weight == 16
    # Codes of four bits, a float32 scale for every row of 256 or 384 inputs, and the two int64 of a matrix's shape.
    assert 4 + 32 / 384 < found.b.bits_per_weight < 4 + 32 / 256 + 128 / 256**2 * 8
    decoder = compared(models["decoder"], models["quantized"], text)
    assert 4 < decoder.a.bits_per_weight < 4.5
    assert 4 < decoder.b.bits_per_weight < 4.5


@pytest.mark.parametrize(("kind", "size"), [("tokenizers", VOCABULARY), ("vocabularies", VOCABULARY + 3)])
def test_models_of_different_tokens_are_refused_before_weights_are_read(
    kind: str, size: int, models: dict[str, Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    tokenizer = tiny_tokenizer()
    if kind == "tokenizers":
        tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(checkpoints, "_load", None)
    with pytest.raises(CheckpointError, match=f"have different {kind}, so their distributions"):
        compared(models["plain"], tmp_path, text)


def test_the_command_prints_what_it_writes(
    models: dict[str, Path],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    file = tmp_path / "found.json"
    arguments = ["compare", str(models["plain"]), str(models["quantized"]), "--corpus", text, "--device", "cpu"]
    arguments += ["--sequence-length", str(LENGTH), "--max-windows", "2", "-o", str(file)]
    assert rotquant(monkeypatch, *arguments) == 0
    shown, data = capsys.readouterr().out, json.loads(file.read_text())
    ratio = f"{data['ratio'][0]:.4f} ± {data['ratio'][1]:.4f}"
    assert f"perplexity: times {ratio}" in shown
    assert f"on 2 windows of {LENGTH} tokens of words test" in shown
    assert len(data["b"]["perplexity"]["kl"]) == len(data["a"]["perplexity"]["by_window"]) == 2
