"""Texts become token ids once per text and tokenizer; the kept ids are the ones that tokenizing gives."""

from pathlib import Path

import pytest
import torch

from reproduction.corpora import Corpus
from reproduction.run.stages import text
from rotquant.text import load_text, tokenize
from tests.helpers.checkpoints import tiny_tokenizer


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(text, "TOKENS", tmp_path / "tokens")
    (tmp_path / "test.txt").write_text("w3 w4\nw5\n\nw6 unknown w95")
    return Corpus(name="words", source="local", path=str(tmp_path / "test.txt"))


def test_kept_tokens_are_those_of_the_text_also_after_damage(spec: Corpus, tmp_path: Path) -> None:
    expected = tokenize(load_text(spec, "test"), tiny_tokenizer())
    first, identity = text.token_ids(spec, "test", tiny_tokenizer())
    (kept,) = tmp_path.glob("tokens/*.npy")
    second, _ = text.token_ids(spec, "test", tiny_tokenizer())
    kept.write_bytes(kept.read_bytes()[:40])
    third, _ = text.token_ids(spec, "test", tiny_tokenizer())
    for tokens in (first, second, third):
        assert tokens.ids.dtype == torch.int64
        assert torch.equal(tokens.whole, expected.whole)
    assert identity["splits"]["test"]["characters"] == len(load_text(spec, "test"))


def test_another_text_or_tokenizer_has_other_tokens(spec: Corpus, tmp_path: Path) -> None:
    first, _ = text.token_ids(spec, "test", tiny_tokenizer())
    other = tiny_tokenizer()
    other.backend_tokenizer.add_tokens(["unknown"])
    second, _ = text.token_ids(spec, "test", other)
    assert not torch.equal(first.ids, second.ids)
    (tmp_path / "test.txt").write_text("w3 w4")
    third, _ = text.token_ids(spec, "test", tiny_tokenizer())
    assert third.whole.tolist() == [1, 3, 4]
    assert len(list(tmp_path.glob("tokens/*.npy"))) == 3
