"""`rotquant compare`: its numbers against both models' logits side by side, for every format that is read."""

import json
import math
from pathlib import Path

import pytest
import torch

from rotquant import api
from rotquant.commands.options import corpus_spec
from rotquant.comparison import ModelComparison, compare
from rotquant.formats.export import export_compressed
from rotquant.foundation.errors import CheckpointError
from rotquant.models import checkpoints
from rotquant.models.limits import metric_windows
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.text import load_text, tokenize
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
    shape = {"hidden_size": 256, "intermediate_size": 384, "tied": True}
    tiny_model(**shape, dtype=torch.bfloat16).save_pretrained(found["plain"])
    tiny_tokenizer().save_pretrained(found["plain"])
    # Weights alone: inputs in 4 bits lie on a border now and then, and other batches on its other side.
    weights_alone = override(preset("quarot-rtn"), {"activations": None, "keys": None, "values": None}, "test")
    api.quantize(found["plain"], weights_alone).save(found["quantized"])
    export_compressed(found["quantized"], found["compressed-tensors"], "transformers", {}, None)
    decoder = conversion.convert(found["quantized"], dtype="float32")
    save_decoder(found["decoder"], decoder, tiny_tokenizer())
    return found


def compared(reference: Path, *models: Path, text: str, timing: bool = False) -> ModelComparison:
    metric = Perplexity(corpus=corpus_spec(text).name, sequence_length=LENGTH)
    return compare(reference, models, corpus_spec(text), metric=metric, timing=timing)


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
    ("a", "others"),
    [("plain", ["quantized", "compressed-tensors"]), ("quantized", ["plain"]), ("decoder", ["quantized"])],
)
def test_the_numbers_are_those_of_all_models_logits(
    a: str, others: list[str], models: dict[str, Path], text: str
) -> None:
    comparison = compared(models[a], *(models[name] for name in others), text=text)
    assert comparison.reference.format == a
    assert [one.format for one in comparison.models] == others
    assert comparison.reference.perplexity.kl == ()
    for name, found in zip(others, comparison.models, strict=True):
        known = expected(models[a], models[name], text)
        # log-softmax in float32 and in float64 differ by some 1e-7 of values of about 5.
        close = {"rel": 1e-4, "abs": 1e-6}
        difference = known["b"] - known["a"]
        ratio = math.exp(difference.mean())
        count = math.sqrt(len(difference))
        assert found.ratio == pytest.approx((ratio, ratio * difference.std().item() / count), **close)
        assert found.kl == pytest.approx((known["kl"].mean().item(), known["kl"].std().item() / count), **close)
        flips = 100 * known["flips"]
        assert found.flips == pytest.approx((flips.mean().item(), flips.std().item() / count), **close)
        assert found.tokens_per_second is None


def test_a_model_loses_nothing_against_itself_and_is_timed_where_asked(models: dict[str, Path], text: str) -> None:
    comparison = compared(models["quantized"], models["quantized"], text=text, timing=True)
    (found,) = comparison.models
    assert found.ratio == (1.0, 0.0)
    assert found.flips == (0.0, 0.0)
    assert found.kl == pytest.approx((0.0, 0.0), abs=1e-9)
    assert all(one.tokens_per_second for one in (comparison.reference, found))


def test_size_and_bits_are_those_of_the_files(models: dict[str, Path], text: str) -> None:
    found = compared(models["plain"], models["compressed-tensors"], models["decoder"], models["quantized"], text=text)
    for side in (found.reference, *found.models):
        assert side.bytes == sum(file.stat().st_size for file in Path(side.model).glob("*.safetensors"))
        # A rotation gives quantized models a head of their own: the files grow by it, the model is the same.
        assert side.parameters == found.reference.parameters
        assert side.bits_per_parameter == 8 * side.bytes / found.reference.parameters
    assert found.reference.bits_per_weight == 16
    assert found.reference.bits_per_parameter == pytest.approx(16, rel=0.01)  # and a header
    packed, *others = found.models
    # Codes of four bits, a float32 scale for every row of 256 or 384 inputs, and the two int64 of a matrix's shape.
    assert 4 + 32 / 384 < packed.bits_per_weight < 4 + 32 / 256 + 128 / 256**2 * 8
    assert all(4 < one.bits_per_weight < 4.5 < one.bits_per_parameter for one in others)


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
        compared(models["plain"], models["quantized"], tmp_path, text=text)


def test_the_command_prints_what_it_writes(
    models: dict[str, Path],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    file = tmp_path / "found.json"
    arguments = ["compare", *(str(models[name]) for name in ("plain", "quantized", "decoder")), "--corpus", text]
    arguments += ["--device", "cpu", "--sequence-length", str(LENGTH), "--max-windows", "2", "-o", str(file)]
    monkeypatch.setenv("COLUMNS", "200")
    assert rotquant(monkeypatch, *arguments) == 0
    shown, data = capsys.readouterr().out, json.loads(file.read_text())
    assert [one["format"] for one in data["models"]] == ["quantized", "decoder"]
    for one in data["models"]:
        assert f"{one['ratio'][0]:.3f} ± {one['ratio'][1]:.3f}" in shown
        assert f"{one['kl'][0]:.4f} ± {one['kl'][1]:.4f}" in shown
        assert f"{one['bits_per_weight']:.2f}" in shown
        assert f"{one['bits_per_parameter']:.2f}" in shown
        assert len(one["perplexity"]["kl"]) == len(data["reference"]["perplexity"]["by_window"]) == 2
    assert "tokens/s" not in shown
    assert f"on 2 windows of {LENGTH} tokens of words test" in shown
