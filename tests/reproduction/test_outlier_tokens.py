"""Content and position of outlier tokens: counted by hand on planted ones, and of the text alone behind a prefix."""

import math

import pytest
import torch
from pydantic import ValidationError

from reproduction.metrics.outlier_tokens import CONTENTS, describe, is_low_in_meaning, look, outlier_tokens
from reproduction.metrics.settings import OutlierTokens
from reproduction.tables.quantities import OUTLIER_TOKENS
from rotquant.foundation.errors import CorpusError
from rotquant.models.simulation.prefix import compute_prefix
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.text import Tokens
from tests.helpers.models import VOCABULARY
from tests.helpers.sinks import SINK, expected_ratio, planted, text

WORDS = {SINK: ".", 20: " self", 21: "\n"}
METRIC = OutlierTokens(threshold=8.0, sequence_length=16)


def decode(token: int) -> str:
    return WORDS.get(token, f"w{token}")


def test_planted_tokens_are_counted_where_they_stand() -> None:
    assert expected_ratio() > METRIC.threshold
    metrics, arrays = outlier_tokens(planted(), Tokens(text().flatten()), METRIC, decode)
    assert arrays["by_layer"] == [1.5, 1.5]  # six in four windows, in either layer
    assert arrays["ratios"] == pytest.approx([expected_ratio()] * 2, rel=1e-3)
    assert metrics == {"number": 1.5, "elsewhere": 50.0, "meaningful": 0.0, "repeated": pytest.approx(100 / 3)}
    assert (arrays["first"], arrays["others"], arrays["others_of_meaning"]) == (3, 3, 0)
    assert arrays["contents"] == [(".", 3, True)]
    assert arrays["positions"] == [(0, 3), (5, 2), (9, 1)]
    assert (arrays["windows"], arrays["tokens"]) == (4, 16)
    assert metrics.keys() == {quantity.name for quantity in OUTLIER_TOKENS}


def test_no_outlier_token_is_a_result() -> None:
    ids = torch.randint(22, VOCABULARY, (64,), generator=torch.Generator().manual_seed(0))
    metrics, arrays = outlier_tokens(planted(), Tokens(ids), METRIC, decode)
    assert set(metrics.values()) == {0.0}
    assert arrays["contents"] == arrays["positions"] == []


def test_the_tokens_of_a_prefix_are_not_counted() -> None:
    model = planted()
    ids = text()
    ids[ids == SINK] = 30
    with wrap(model, RuntimeQuantization(prefix=compute_prefix(model, (SINK, SINK, 1)))):
        metrics, arrays = outlier_tokens(model, Tokens(ids.flatten()), METRIC, decode)
    assert metrics["number"] == 0
    assert arrays["tokens"] == 16


@torch.no_grad()
def test_the_number_is_of_the_layer_that_has_most() -> None:
    ratios = torch.ones(2, 4, 16)
    ratios[0, 0, 3], ratios[1, 0, 3], ratios[1, 1, 4], ratios[1, 2, 0] = 70.0, 80.0, 90.0, 65.0
    found = look(ratios, text(), decode, 64.0)
    assert found["by_layer"] == [0.25, 0.75]
    assert found["ratios"] == [70.0, 90.0]
    assert (found["first"], found["others"]) == (1, 2)  # each token once, though two layers have the first
    assert look(ratios, text(), decode, 64.0)["by_layer"] != look(ratios, text(), decode, 75.0)["by_layer"]


def test_contents_are_named_by_how_often_they_occur_and_those_of_meaning_are_told_apart() -> None:
    windows = torch.full((2, 12), 20)
    windows[0, 3:6], windows[1, 4] = 21, SINK
    outliers = torch.zeros(2, 12, dtype=torch.bool)
    outliers[:, 0] = outliers[0, 3:8] = outliers[1, 4] = True
    found = describe(outliers, windows, decode)
    assert found["contents"] == [("\n", 3, True), (" self", 2, False), (".", 1, True)]
    assert found["others_of_meaning"] == 2
    many = torch.arange(2 * 40).view(2, 40)
    assert len(describe(torch.ones(2, 40, dtype=torch.bool), many, decode)["contents"]) == CONTENTS


@pytest.mark.parametrize("token", ["\n", ".", "the", " The", "▁the", '"', "  ", "", ",", "\n\n    ", "to", "of", "a"])
def test_tokens_of_low_meaning(token: str) -> None:
    assert is_low_in_meaning(token)


@pytest.mark.parametrize("token", ["self", " theory", "7", "é", "return", "▁cat"])
def test_tokens_of_meaning(token: str) -> None:
    assert not is_low_in_meaning(token)


def test_bad_requests_are_one_sentence() -> None:
    for threshold in (1.0, 0.0, -3.0, math.nan, math.inf):
        with pytest.raises(ValidationError, match=r"greater than 1|a finite number"):
            OutlierTokens(threshold=threshold)
    with pytest.raises(CorpusError, match="8 tokens, fewer than one window of 16"):
        outlier_tokens(planted(), Tokens(text()[0, :8]), METRIC, decode)
