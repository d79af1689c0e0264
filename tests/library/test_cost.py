"""`quantize` ends with what it cost, and what is stored is what was measured."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rotquant import api, comparison
from rotquant.commands.options import corpus_spec
from rotquant.metrics.cost import cost, reference
from rotquant.models.architectures import base_model, lm_head
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import SMALL, rotquant
from tests.helpers.models import tiny_model, tiny_tokens

Checkpoint = Callable[[torch.dtype], str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_words(tmp_path_factory.mktemp("text") / "words.txt", 6000))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    def make(dtype: torch.dtype) -> str:
        folder = tmp_path_factory.mktemp("model")
        tiny_model(dtype=dtype, max_position_embeddings=64, tied=True).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return str(folder)

    return make


def test_quantize_says_what_it_cost_and_compare_agrees(
    checkpoint: Checkpoint,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = checkpoint(torch.bfloat16), str(tmp_path / "out")
    command = ["quantize", model, "-o", out, "--method", "rtn", "--corpus", text, *SMALL]
    assert rotquant(monkeypatch, *command, "--json") == 0
    found = json.loads(capsys.readouterr().out)["check"]
    assert found["metric"]["split"] == "validation"
    metric = Perplexity.model_validate(found["metric"])
    assert (metric.sequence_length, found["tokens"]) == (32, 2 * 31)  # half of the context of 64
    head = corpus_spec(text)
    windows = {"max_characters": 8 * 4 * 2 * 32}  # the head of the split, as `quantize` reads it
    words = api.load_text(head, "validation", **windows)
    monkeypatch.setattr(comparison, "load_text", lambda *_: words)
    compared = comparison.compare(model, [out], head, metric=metric)
    assert found["kl"] == pytest.approx(compared.models[0].kl[0], rel=1e-5)
    assert found["full_precision"] == pytest.approx(compared.reference.perplexity.perplexity, rel=1e-5)
    assert found["quantized"] == pytest.approx(compared.models[0].perplexity.perplexity, rel=1e-5)
    assert rotquant(monkeypatch, *command, "--no-check", "--json") == 0
    assert json.loads(capsys.readouterr().out)["check"] is None


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_kept_of_the_full_precision_model_is_smaller_than_logits_and_stays_when_the_model_changes(
    tied: bool,
) -> None:
    model, ids = tiny_model(tied=tied), tiny_tokens(batch=1, tokens=512)[0]
    metric = Perplexity(corpus="words", sequence_length=32, max_windows=16, bos="none")
    known = reference(model, Tokens(ids, None), metric, "cpu")
    assert known is not None
    with torch.no_grad():
        logits = model(known.exact.windows, use_cache=False).logits
        for parameter in model.parameters():
            parameter.mul_(1.1)
        kept = known.exact.head(known.exact.states)
        changed = model(known.exact.windows, use_cache=False).logits
    assert torch.equal(kept, logits)
    assert known.exact.nbytes < logits.nbytes
    found = cost(model, known, "cpu")
    exact, own = (one[:, :-1].double().log_softmax(-1) for one in (logits, changed))
    assert found.kl == pytest.approx((exact.exp() * (exact - own)).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("changes", [[], ["--set", "activations.bits=2", "--set", "weights.scheme.bits=2"]])
def test_a_cost_out_of_the_ordinary_has_a_sentence_whose_advice_works(
    changes: list[str],
    checkpoint: Checkpoint,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = checkpoint(torch.float32)
    command = ["quantize", model, "-o", str(tmp_path / "out"), "--method", "rtn", "--corpus", text, *SMALL]
    monkeypatch.setattr("rotquant.metrics.cost.EXTRAORDINARY", 0.05 if changes else 1e6)
    assert rotquant(monkeypatch, *command, *changes) == 0
    said = capsys.readouterr().out
    assert "cost: perplexity " in said
    assert ("out of the ordinary" in said) == bool(changes)
    if changes:
        (advice,) = re.findall(r"`(--[^`]+)` costs less", said)
        assert rotquant(monkeypatch, *command, *changes, *advice.split()) == 0


def test_a_text_of_calibration_alone_is_no_text_to_check_on(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(save_words(tmp_path / "train.txt", 2000))
    command = ["quantize", checkpoint(torch.float32), "-o", str(tmp_path / "out"), "--method", "gptq", *SMALL]
    assert rotquant(monkeypatch, *command, "--corpus", text) == 0
    assert "cost" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rtn", "quarot-rtn"])
def test_a_16_bit_checkpoint_stays_in_16_bits_where_it_is_not_quantized(
    name: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Rotated embeddings are rounded as the checkpoint's were, before anything is measured."""
    sizes = {}
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        made = api.quantize(checkpoint(dtype), preset(name))
        made.save(folder)
        with safe_open(folder / "quantized.safetensors", "pt") as file:
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safetensors' own
        sizes[dtype] = stored["model.embed_tokens.weight"].dtype
        loaded, ids = api.load(folder), tiny_tokens()
        for module in (base_model, lm_head):
            ours, theirs = module(made.network), module(loaded.network)
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert one.dtype == other.dtype == torch.float32
                assert torch.equal(one, other)
        with torch.no_grad():
            assert torch.equal(made.network(ids).logits, loaded.network(ids).logits)
    assert sizes == {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}


def test_rotation_alone_is_exact_but_for_the_ends(checkpoint: Checkpoint) -> None:
    """The layers' rotated weights keep their type; ends that are rounded to 8 bits move logits by some 2^-8 of them."""
    rotation = {"weights": None, "activations": None, "keys": None, "values": None}
    made = api.quantize(checkpoint(torch.bfloat16), override(preset("quarot-rtn"), rotation, "rotation alone"))
    plain, ids = api.load(checkpoint(torch.bfloat16)), tiny_tokens()
    with torch.no_grad():
        ours, exact = made.network(ids).logits, plain.network(ids).logits
    assert 0 < (ours - exact).abs().max() < 0.05 * exact.abs().max()
