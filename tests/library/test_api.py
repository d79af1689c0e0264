"""The library's verbs: every field of a metric decides what is measured, and the text is the one that it names."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from rotquant import api
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.text import NO_BOS, CorpusSpec
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY, tiny_model

CONTEXT = 512
SMALL = {"calibration": {"samples": 2, "sequence_length": 32}}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CorpusSpec]:
    """Two corpora of random words with their three splits."""
    generator, found = random.Random(0), {}
    for name in ("words", "others"):
        folder = tmp_path_factory.mktemp(name)
        for split in ("train", "validation", "test"):
            words = generator.choices([f"w{i}" for i in range(3, VOCABULARY)], k=2500)
            (folder / f"{split}.txt").write_text(" ".join(words))
        found[name] = CorpusSpec(name=name, source="local", path=str(folder))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint whose tokenizer has no BOS, as those of the family are."""
    folder = tmp_path_factory.mktemp("qwen2") / "model"
    letters = {letter: index for index, letter in enumerate("w0123456789Ġ", start=1)}
    tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0, **letters}, merges=[])
    assert tokenizer.bos_token_id is None
    tiny_model("qwen2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> api.Model:
    return api.load(folder)


def test_every_field_of_a_perplexity_decides_what_is_measured(model: api.Model, corpora: dict[str, CorpusSpec]) -> None:
    metric = Perplexity(corpus="words", sequence_length=32)
    others: dict[str, Any] = {
        "corpus": "others",
        "split": "validation",
        "sequence_length": 64,
        "max_windows": 3,
        "bos": "window",
    }
    assert others.keys() == Perplexity.model_fields.keys() - {"kind"}
    measured = api.perplexity(model, corpora["words"], metric)
    assert measured == api.perplexity(model, corpora["words"], metric)
    for name, value in others.items():
        changed = metric.model_copy(update={name: value})
        assert api.perplexity(model, corpora[changed.corpus], changed).nll != measured.nll, name


def test_a_corpus_that_is_not_the_metrics_is_refused(model: api.Model, corpora: dict[str, CorpusSpec]) -> None:
    with pytest.raises(RecipeError, match=r"of corpus 'wikitext2', and the corpus given is 'words'"):
        api.perplexity(model, corpora["words"], Perplexity(sequence_length=32))


def test_a_recipe_that_reads_text_is_refused_without_a_corpus(folder: Path) -> None:
    with pytest.raises(RecipeError, match="reads text: pass a corpus"):
        api.quantize(folder, "quarot")
    assert api.quantize(folder, "rtn").stored is not None


def test_windows_are_of_the_context_by_default_and_never_longer(
    model: api.Model, corpora: dict[str, CorpusSpec]
) -> None:
    result = api.perplexity(model, corpora["words"])
    assert result.tokens == result.windows * (CONTEXT - 1)
    with pytest.raises(RecipeError, match="windows of 513 tokens exceed the model's context of 512 tokens"):
        api.perplexity(model, corpora["words"], Perplexity(corpus="words", sequence_length=CONTEXT + 1))


@pytest.mark.parametrize(
    ("method", "changes", "what"),
    [
        ("gptq", {"calibration": {"sequence_length": 513}}, "calibration samples"),
        ("smoothquant", {"calibration": {"sequence_length": 513}}, "calibration samples"),
        ("llm-qat", {"methods": {"llm_qat": {"sequence_length": 513}}}, "texts that LLM-QAT trains on"),
        (
            "spinquant-easy",
            {**SMALL, "methods": {"spinquant": {"text": {"sequence_length": 513}}}},
            "samples that rotations are learned on",
        ),
    ],
)
def test_what_a_method_reads_is_never_longer_than_the_context(
    folder: Path, corpora: dict[str, CorpusSpec], method: str, changes: dict[str, Any], what: str
) -> None:
    recipe = override(preset(method), changes, "test")
    with pytest.raises(RecipeError, match=f"{what} of 513 tokens exceed the model's context of 512 tokens"):
        api.quantize(folder, recipe, corpus=corpora["words"])


def test_a_method_by_its_name_calibrates_within_the_context(folder: Path, corpora: dict[str, CorpusSpec]) -> None:
    quantized = api.quantize(folder, "smoothquant", corpus=corpora["words"])
    assert quantized.stored.manifest.recipe.calibration.sequence_length == CONTEXT
    assert quantized.stored.manifest.source["corpus"]["name"] == "words"


def test_a_model_without_bos_is_quantized_and_measured_and_the_result_says_so(
    qwen2: Path, corpora: dict[str, CorpusSpec], tmp_path: Path
) -> None:
    quantized = api.quantize(qwen2, override(preset("gptq"), SMALL, "test"), corpus=corpora["words"])
    quantized.save(tmp_path / "quantized")
    loaded = api.load(tmp_path / "quantized")
    metric = Perplexity(corpus="words", sequence_length=32)
    result = api.perplexity(loaded, corpora["words"], metric)
    assert result.note == NO_BOS
    without = api.perplexity(loaded, corpora["words"], metric.model_copy(update={"bos": "none"}))
    assert (without.nll, without.note) == (result.nll, "")


@pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")
def test_every_command_takes_a_model_without_bos(
    qwen2: Path, corpora: dict[str, CorpusSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    text, folder, decoder = (
        ["--corpus", corpora["words"].path, "--sequence-length", "32"],
        tmp_path / "q",
        tmp_path / "d",
    )
    monkeypatch.chdir(tmp_path)
    assert rotquant(monkeypatch, "evaluate", str(qwen2), *text, "-o", "result.json") == 0
    assert NO_BOS in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["note"] == NO_BOS
    assert rotquant(monkeypatch, "diagnose", str(qwen2), *text, "--max-windows", "2") == 0
    assert f"; {NO_BOS}" in capsys.readouterr().out
    assert rotquant(monkeypatch, "quantize", str(qwen2), "-o", str(folder), "--method", "quarot-rtn", *text) == 0
    assert rotquant(monkeypatch, "convert", str(folder), "-o", str(decoder)) == 0
    assert rotquant(monkeypatch, "generate", str(decoder), "--prompt", "w3 w4", "--tokens", "2") == 0
    capsys.readouterr()
    assert rotquant(monkeypatch, "generate", str(decoder), "--prompt", "") == 2
    assert "the prompt is empty, and the tokenizer has no BOS" in capsys.readouterr().err
    assert rotquant(monkeypatch, "generate", str(decoder), "--prompt", "w3", "--tokens", "511") == 2
    assert "the prompt and its continuation of 513 tokens exceed" in capsys.readouterr().err


def test_learning_reads_a_text_without_bos(qwen2: Path, corpora: dict[str, CorpusSpec]) -> None:
    learning = {"steps": 1, "batch_size": 2, "text": {"samples": 2, "sequence_length": 32}}
    recipe = override(preset("spinquant-easy"), {**SMALL, "methods": {"spinquant": learning}}, "test")
    quantized = api.quantize(qwen2, recipe, corpus=corpora["words"])
    assert quantized.stored.manifest.source["rotation"]["last"]["step"] == 0


def test_tokens_beyond_the_embedding_blame_the_tokenizer(tmp_path: Path, corpora: dict[str, CorpusSpec]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w3", "another"])
    text = tmp_path / "mine.txt"
    text.write_text("w3 w4 another w5\n" * 400)
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    corpus = CorpusSpec(name="mine", source="local", path=str(text))
    metric = Perplexity(corpus="mine", sequence_length=32)
    sentence = f"gives token {VOCABULARY}, and the model's embedding ends at {VOCABULARY - 1}"
    with pytest.raises(CheckpointError, match=sentence):
        api.perplexity(api.load(tmp_path / "model"), corpus, metric)
    with pytest.raises(CheckpointError, match=sentence):
        api.quantize(tmp_path / "model", override(preset("gptq"), SMALL, "test"), corpus=corpus)


def test_windows_whose_cache_stays_in_full_precision_are_refused(folder: Path, corpora: dict[str, CorpusSpec]) -> None:
    kept = {"kept_first": 8, "kept_recent": 24}
    recipe = override(preset("oscar"), {"methods": {"oscar": None}, "keys": kept, "values": kept}, "test")
    model = api.quantize(folder, recipe)
    with pytest.raises(RecipeError, match=r"first 8 and last 24 tokens of the KV cache.*use windows of more than 32"):
        api.perplexity(model, corpora["words"], Perplexity(corpus="words", sequence_length=32))
    plain = api.perplexity(api.load(folder), corpora["words"], Perplexity(corpus="words", sequence_length=33))
    assert api.perplexity(model, corpora["words"], Perplexity(corpus="words", sequence_length=33)).nll != plain.nll
