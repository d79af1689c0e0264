"""Where BOS stands: one setting for every text, one token at most, and a sentence where a model needs it."""

import argparse
import difflib
import gettext
import heapq
import threading
import tokenize
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from reproduction.tasks.scoring import Scorer
from reproduction.tasks.settings import ZeroShot
from rotquant import api
from rotquant.commands.options import corpus_spec, with_options
from rotquant.decoder import conversion
from rotquant.decoder.network import Network
from rotquant.foundation.errors import CorpusError
from rotquant.metrics.bos import bos_gains, bos_note
from rotquant.metrics.divergence import float_states
from rotquant.metrics.perplexity import perplexity
from rotquant.models.checkpoints import load_tokenizer
from rotquant.models.simulation.prefix import BOS_OF_PREFIX, Prefix, after_prefix, compute_prefix, prefix_ids
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, wrap
from rotquant.recipes.corpus import BOS
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import parse_recipe
from rotquant.recipes.schemes import Calibration, Perplexity
from rotquant.text import Tokens, adds_bos, calibration_samples, evaluation_windows, without_bos
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY, tiny_model
from tests.helpers.real import real_model

#: The tiny models' and the tiny tokenizer's.
FIRST = 1
LENGTH = 16


def text(count: int = 400, seed: int = 0) -> Tokens:
    """Random tokens, none of which is special."""
    ids = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return Tokens(ids, FIRST)


def adding_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, which itself begins texts with BOS."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", FIRST)])
    return tokenizer


def wrapped(model: PreTrainedModel, *ids: int) -> Handle:
    return wrap(model, RuntimeQuantization(prefix=compute_prefix(model, ids)))


# Windows


@pytest.mark.parametrize("bos", get_args(BOS))
def test_a_text_that_begins_with_bos_gets_no_second_one(bos: str) -> None:
    """The windows are those of the text without it, but for `none`, which leaves a text as it is."""
    plain = text()
    headed = Tokens(plain.whole, FIRST)
    found = evaluation_windows(headed, LENGTH, bos)
    if bos == "text":
        assert torch.equal(found, evaluation_windows(plain, LENGTH, bos))
    assert (found == FIRST).sum() == (len(found) if bos == "window" else 1)
    assert (found[:, 1:] != FIRST).all()


def test_a_window_that_begins_at_a_documents_bos_has_that_one() -> None:
    ids = text(8 * (LENGTH - 1)).ids.clone()
    ids[3 * (LENGTH - 1)] = FIRST
    ids[-(LENGTH - 1)] = FIRST  # at the end, where no token comes after
    found = evaluation_windows(Tokens(ids, FIRST), LENGTH, "window")
    assert found.shape == (8, LENGTH)
    assert (found[:, 0] == FIRST).all()
    assert found[3].tolist() == ids[3 * (LENGTH - 1) :][:LENGTH].tolist()
    assert (found[:7, 1:] != FIRST).all()


@pytest.mark.parametrize("bos", get_args(BOS))
def test_calibration_samples_have_bos_where_it_is_asked_for(bos: str) -> None:
    settings = Calibration(samples=2, sequence_length=LENGTH, bos=bos)
    tokens = text(LENGTH + 1)
    found = torch.cat([calibration_samples(tokens, settings, seed) for seed in range(32)])
    assert found.shape == (64, LENGTH)
    begins = found[:, 0] == FIRST
    assert (found[:, 1:] != FIRST).all()
    # of a text that is hardly longer than a sample, some of 64 begin at its head
    assert bool(begins.all()) if bos == "window" else bool(begins.any()) == (bos == "text")
    with pytest.raises(CorpusError, match=r"no BOS .*: set bos to text"):
        calibration_samples(Tokens(tokens.ids), Calibration(samples=1, sequence_length=4, bos="window"))


def test_the_papers_place_is_left_out_of_keys() -> None:
    assert "bos" not in Calibration().model_dump(mode="json")
    assert Calibration(bos="window").model_dump(mode="json")["bos"] == "window"


def test_tasks_read_true_and_false_as_before_and_have_them_in_keys() -> None:
    """Each item is a text of its own, so the places are two."""
    for given in (True, "text", "window"):
        assert ZeroShot(corpus="modules", bos=given) == ZeroShot(corpus="modules")
    assert ZeroShot(corpus="modules").model_dump(mode="json")["bos"] is True
    without = ZeroShot(corpus="modules", bos=False)
    assert without == ZeroShot(corpus="modules", bos="none") == ZeroShot.model_validate(without.model_dump())
    assert without.model_dump(mode="json")["bos"] is False


def test_the_option_reaches_every_text_of_a_recipe() -> None:
    found = with_options(preset("prefixquant-tuned"), None, None, None, "window")
    assert {found.calibration.bos, *(one.bos for one in found.own_texts.values())} == {"window"}
    assert found.own_texts
    assert with_options(preset("prefixquant-tuned"), None, None, None) == preset("prefixquant-tuned")


# After a prefix that holds BOS


def test_a_wrapped_model_is_marked_by_its_prefix_until_it_is_unwrapped() -> None:
    model = tiny_model()
    with wrapped(model, 5, FIRST):
        assert prefix_ids(model) == (5, FIRST)
    assert prefix_ids(model) == ()


@pytest.mark.parametrize("bos", ["text", "window"])
def test_perplexity_after_a_prefix_is_that_behind_its_tokens(bos: str) -> None:
    """The prefix's BOS is the text's: float64, so what remains is transformers' float32 norms and rotary tables."""
    model, tokens = tiny_model(dtype=torch.float64), text()
    metric = Perplexity(sequence_length=LENGTH, bos=bos)
    windows = evaluation_windows(tokens, LENGTH, bos)
    losses = []
    for window in windows:
        read = window[1:] if window[0] == FIRST else window
        behind = torch.cat([torch.tensor([5, FIRST]), read])
        logits = model(behind[None]).logits[0, 2:-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, read[1:]).item())
    exact = float_states(model, windows, 8)
    with wrapped(model, 5, FIRST):
        found = perplexity(model, tokens, metric, batch_size=3, exact=exact)
        again = perplexity(model, tokens, metric, batch_size=3, exact=float_states(model, windows, 4, FIRST))
    assert found.by_window == pytest.approx(losses, abs=1e-5)
    assert found.tokens == len(windows) * (LENGTH - 1) - (len(windows) if bos == "window" else 1)
    assert found.note == BOS_OF_PREFIX
    assert min(found.kl) > 0
    assert max(map(abs, again.kl)) < 1e-5  # a prefixed reference lacks the same positions
    assert perplexity(model, tokens, metric, exact=exact).kl == pytest.approx([0.0] * len(windows), abs=1e-5)


def test_a_reference_after_a_prefix_is_compared_where_it_has_predictions() -> None:
    model, tokens = tiny_model(dtype=torch.float64), text()
    metric = Perplexity(sequence_length=LENGTH, bos="window")
    with wrapped(model, 5, FIRST):
        exact = float_states(model, evaluation_windows(tokens, LENGTH, "window"), 8, FIRST)
    found = perplexity(model, tokens, metric, exact=exact)
    assert torch.tensor(found.kl).isfinite().all()
    assert found.nll == perplexity(model, tokens, metric).nll


@pytest.mark.parametrize("ids", [(5, 9), (5, FIRST), (FIRST, 5)], ids=["no-bos", "bos-last", "bos-first"])
def test_items_of_tasks_have_no_second_bos(ids: tuple[int, ...]) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with wrapped(model, *ids):
        scorer = Scorer(model, tokenizer, "text", 1)
        (first, _), (headed, rest), (empty, _) = scorer.encode([("w5 w6", " w7"), ("<s> w5", " w7"), ("", "w7")])
    start = [] if FIRST in ids else [FIRST]
    assert first == [*start, 5, 6]
    assert (headed, rest) == ([*start, 5], [7])
    assert empty == [FIRST]  # a model needs something to predict from


def test_a_template_that_writes_bos_gets_no_second_one() -> None:
    scorer = Scorer(tiny_model(), tiny_tokenizer(), "text", 1)
    assert scorer.encode([("<s> w5", " w7")]) == (([FIRST, 5], [7]),)


def test_a_prompt_loses_its_bos_after_a_prefix_that_holds_one() -> None:
    model, tokens = tiny_model(), text(5)
    assert torch.equal(after_prefix(model, tokens.whole, FIRST), tokens.whole)
    with wrapped(model, 5, FIRST):
        assert torch.equal(after_prefix(model, tokens.whole, FIRST), tokens.ids)


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized folder whose prefix holds BOS, of a model whose tokenizer begins texts and chats with it."""
    root = tmp_path_factory.mktemp("prefixed")
    tokenizer = adding_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
    tiny_model(hidden_size=256, intermediate_size=384, dtype=torch.bfloat16).save_pretrained(root / "plain")
    tokenizer.save_pretrained(root / "plain")
    cache = {"bits": 4, "symmetric": False, "granularity": "head", "clip_ratio": 0.95}
    recipe = {
        "methods": {"prefixed_outliers": {"ids": [5, FIRST]}},
        "weights": {"scheme": {"bits": 4, "granularity": "channel"}},
        "activations": {"bits": 4},
        "keys": cache,
        "values": cache,
        "calibration": {"samples": 2, "sequence_length": LENGTH, "bos": "window"},
    }
    words = corpus_spec(str(save_words(root / "words.txt", 4000)))
    api.quantize(root / "plain", parse_recipe(recipe, "test"), corpus=words).save(root / "quantized")
    return root / "quantized"


def test_the_tokenizer_of_a_prefixed_folder_writes_no_bos(prefixed: Path) -> None:
    """Whoever calls it by its defaults, such as a pipeline or a chat, puts none after the prefix's."""
    before, after = load_tokenizer(prefixed.parent / "plain"), load_tokenizer(prefixed)
    chat = [{"role": "user", "content": "w5"}]
    assert adds_bos(before)
    assert not adds_bos(after)
    assert before.apply_chat_template(chat, tokenize=False) == "<s> w5"
    assert after.apply_chat_template(chat, tokenize=False) == " w5"
    assert after("w5 w6")["input_ids"] == [5, 6]
    assert after.bos_token_id == FIRST
    assert adds_bos(adding_tokenizer())
    assert not adds_bos(without_bos(adding_tokenizer()))


def test_folders_and_decoders_know_the_tokens_of_their_prefix(prefixed: Path) -> None:
    loaded = api.load(prefixed)
    assert prefix_ids(loaded.network) == (5, FIRST)
    network = Network(conversion.convert(prefixed, dtype="float32"))
    assert prefix_ids(network) == (5, FIRST)
    metric = Perplexity(sequence_length=LENGTH, bos="window", max_windows=2)
    first, second = (perplexity(model, text(), metric) for model in (loaded.network, network))
    assert second.note == BOS_OF_PREFIX
    # both multiply the same integers, in the float32 of a network and of a decoder
    assert first.nll == pytest.approx(second.nll, abs=1e-2)


def test_samples_lose_their_bos_once_the_prefix_is_found(prefixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotquant.weights import context as weights_context

    seen = []

    def capture(model, ids, *rest):
        seen.append(ids)
        raise InterruptedError

    monkeypatch.setattr(weights_context, "capture_layer_inputs", capture)
    model, recipe = tiny_model(), preset("gptq")
    samples = calibration_samples(text(), Calibration(samples=2, sequence_length=LENGTH, bos="window"))
    made = weights_context.QuantizationContext(model, recipe, samples, 0, torch.device("cpu"), None)
    for held in (None, (5, 9), (5, FIRST)):
        made.online = RuntimeQuantization(prefix=held and Prefix(torch.empty(0), torch.empty(0), held))
        with pytest.raises(InterruptedError):
            made.capture()
    assert [ids.shape[1] for ids in seen] == [LENGTH, LENGTH, LENGTH - 1]
    assert torch.equal(seen[2], samples[:, 1:])


# A model that needs BOS


class Needing(torch.nn.Module):
    """Predicts a text's next token where its first is BOS, and by `nats` worse where it is not."""

    def __init__(self, nats: float) -> None:
        super().__init__()
        self.nats = torch.nn.Parameter(torch.tensor(nats))
        self.config = tiny_model().config

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        right = torch.nn.functional.one_hot(input_ids.roll(-1, 1), VOCABULARY).float()
        probability = torch.exp(-torch.where(input_ids[:, :1] == FIRST, 1.0, 1.0 + self.nats))[..., None]
        logits = torch.where(right.bool(), probability, (1 - probability) / (VOCABULARY - 1)).log()
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(("nats", "needed"), [(0.0, False), (0.05, False), (0.2, True), (3.0, True)])
def test_a_sentence_is_said_where_a_short_window_loses_clearly(nats: float, needed: bool) -> None:
    model, tokens = Needing(nats), text()
    assert bos_gains(model, tokens).mean().item() == pytest.approx(nats, abs=1e-5)  # float32 logits
    note = bos_note(model, tokens, True, "text")
    assert note.startswith("this model needs BOS") == needed
    assert not needed or (f"{nats:.2f} nats" in note and "--bos window" in note)
    assert bos_note(model, tokens, True, "window") == bos_note(model, tokens, False, "text") == ""


def test_gemma_is_told_from_a_model_that_needs_none(capsys: pytest.CaptureFixture, monkeypatch, tmp_path: Path) -> None:
    """Gemma-3-270M never saw a text without BOS: without, a window of 256 tokens costs about 1.5 nats a token more."""
    folder = real_model("gemma3-270m")
    prose = "\n".join(str(module.__doc__) for module in (argparse, difflib, gettext, heapq, threading, tokenize))
    (tmp_path / "test.txt").write_text(prose)
    asked = ["--corpus", str(tmp_path / "test.txt"), "--sequence-length", "64", "--max-windows", "1"]
    assert rotquant(monkeypatch, "evaluate", str(folder), *asked) == 0
    said = capsys.readouterr().out
    assert "note: this model needs BOS" in said
    assert rotquant(monkeypatch, "evaluate", str(folder), *asked, "--bos", "window") == 0
    assert "needs BOS" not in capsys.readouterr().out
