"""Perplexity follows the papers' protocol and does not depend on how windows are batched."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from rotquant.foundation.errors import CorpusError
from rotquant.metrics.perplexity import perplexity
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens

TEN = Perplexity(sequence_length=10)


class Bigram(torch.nn.Module):
    """A language model that is a table of next-token logits, so that its perplexity can be computed by hand."""

    def __init__(self, vocabulary: int = 11, seed: int = 0):
        super().__init__()
        self.lm_head = torch.nn.Identity()  # its states are its logits
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator))
        self.config = SimpleNamespace(vocab_size=vocabulary)

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(last_hidden_state=self.table[input_ids])


@pytest.fixture
def tokens():
    return Tokens(torch.randint(11, (103,), generator=torch.Generator().manual_seed(1)))


def test_perplexity_is_exp_of_the_mean_over_predicted_tokens_of_whole_windows(tokens):
    model = Bigram()
    log_probabilities = model.table.double().log_softmax(-1)
    losses = []
    for start in range(0, 100, 10):  # ten windows; the tail of three tokens is dropped, no pair spans two windows
        window = tokens.ids[start : start + 10].tolist()
        losses += [-log_probabilities[a, b].item() for a, b in itertools.pairwise(window)]
    result = perplexity(model, tokens, TEN)
    assert (result.windows, result.tokens) == (10, 90)
    # float32 log-softmax of eleven values: relative error about 1e-7.
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_batching_does_not_change_the_result(tokens):
    results = [perplexity(Bigram(), tokens, TEN, batch_size=size).nll for size in (1, 3, 100)]
    assert max(results) - min(results) < 1e-7


def test_a_uniform_model_has_the_vocabulary_size_as_perplexity(tokens):
    model = Bigram()
    torch.nn.init.zeros_(model.table)
    assert perplexity(model, tokens, TEN).perplexity == pytest.approx(11, rel=1e-6)


def test_max_windows_are_spread_evenly_over_the_text(tokens):
    every = perplexity(Bigram(), tokens, TEN).by_window
    assert len(every) >= 4
    for asked in (1, 2, 3, len(every)):
        some = perplexity(Bigram(), tokens, TEN.model_copy(update={"max_windows": asked})).by_window
        assert some == tuple(every[place * len(every) // asked] for place in range(asked))
    assert perplexity(Bigram(), tokens, TEN.model_copy(update={"max_windows": len(every) + 1})).by_window == every


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_network_has_a_non_finite_perplexity_and_does_not_crash(tokens, value):
    model = Bigram()
    with torch.no_grad():
        model.table.fill_(value)
    assert not math.isfinite(perplexity(model, tokens, TEN).perplexity)


def test_a_text_shorter_than_one_window_is_refused(tokens):
    with pytest.raises(CorpusError, match="fewer than one window of 200"):
        perplexity(Bigram(), tokens, Perplexity(sequence_length=200))
