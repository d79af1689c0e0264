"""A text's numbers depend on the text alone: not on its batch, order, filling, packing, or the cache that it fills."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from reproduction.tasks.scoring import Scorer
from rotquant.foundation.errors import RotquantError
from rotquant.models.architectures import architecture_of
from rotquant.models.simulation.runtime import RuntimeQuantization, scales_by_text, wrap
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import ColumnSplit, QParams, Texts, fake_quantize_split, fake_quantize_texts
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import FURTHER, VOCABULARY, tiny_model

#: transformers computes norms in float32 whatever the model's type; a code that differs moves logits by 1e-2.
CLOSE = {"rtol": 0, "atol": 1e-5}
HEAD = QuantizationScheme(bits=4, symmetric=False, granularity="head")
TENSOR = QuantizationScheme(bits=4, granularity="tensor")
GROUP = QuantizationScheme(bits=4, symmetric=False, granularity="group", group_size=16)
STATIC = {(layer, site): QParams(torch.tensor(0.3)) for layer in (0, 1) for site in ("attention_input", "mlp_input")}
STATIC |= {(layer, site): QParams(torch.tensor(0.1)) for layer in (0, 1) for site in ("attention_output", "mlp_output")}
SPLIT = ColumnSplit(torch.randperm(64, generator=torch.Generator().manual_seed(1)), 8)
#: How inputs of linear layers or the cache are quantized. Not both: a first token's attention is its values, and the
#: numbers of one grid lie on exact ties of another, which the last bit decides.
KINDS = {
    "tensor": RuntimeQuantization(activations=TENSOR),
    "tensor-asymmetric": RuntimeQuantization(activations=TENSOR.model_copy(update={"symmetric": False})),
    "tensor-outliers": RuntimeQuantization(
        activations=TENSOR, outliers={(layer, "attention_input"): SPLIT for layer in (0, 1)}
    ),
    "token": RuntimeQuantization(activations=QuantizationScheme(bits=4)),
    "cache": RuntimeQuantization(keys=HEAD, values=GROUP),
    "group": RuntimeQuantization(activations=GROUP, attention_output=HEAD),
    "static": RuntimeQuantization(activations=TENSOR.model_copy(update={"dynamic": False}), static=STATIC),
}
texts_of_tokens = st.lists(st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=4)


def alone(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Logits of one text by itself, [tokens, vocabulary]."""
    return model(torch.tensor([text]), use_cache=False).logits[0]


def batched(model: PreTrainedModel, texts: list[list[int]], left: bool) -> list[Tensor]:
    """Logits of each text in one batch, filled up on one side with a token that stands out."""
    width = max(map(len, texts))
    ids, mask = torch.full((len(texts), width), 7), torch.zeros(len(texts), width, dtype=torch.long)
    places = [slice(width - len(text), width) if left else slice(len(text)) for text in texts]
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        ids[row, place], mask[row, place] = torch.tensor(text), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return [logits[row, place] for row, place in enumerate(places)]


@contextmanager
def quantized(kind: str, shape: str = "llama") -> Iterator[PreTrainedModel]:
    arguments = {} if shape == "llama" else FURTHER[shape]
    model = tiny_model(**arguments, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] *= 20  # what fills rows up would widen every range
    with wrap(model, KINDS[kind]), torch.no_grad():
        yield model


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(texts=texts_of_tokens, left=st.booleans(), seed=st.integers(0, 3))
def test_neither_batch_nor_order_nor_filling_changes_a_text(
    kind: str, texts: list[list[int]], left: bool, seed: int
) -> None:
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    with quantized(kind) as model:
        found = batched(model, [texts[index] for index in order], left)
        for index, logits in zip(order, found, strict=True):
            torch.testing.assert_close(logits, alone(model, texts[index]), **CLOSE)


@pytest.mark.parametrize("shape", ["mixtral", "qwen3-moe"])
def test_an_experts_scale_is_that_of_the_tokens_that_a_text_sends_it(shape: str) -> None:
    texts = [[5, 9, 30, 31, 32], [40, 41], [50, 51, 52, 53, 54, 55, 56]]
    with quantized("tensor", shape) as model:
        for text, logits in zip(texts, batched(model, texts, left=False), strict=True):
            torch.testing.assert_close(logits, alone(model, text), **CLOSE)
        rows = torch.tensor([[5, 9, 30], [40, 41, 42]])  # whole rows, of which no mask speaks
        for row, logits in zip(rows.tolist(), model(rows, use_cache=False).logits, strict=True):
            torch.testing.assert_close(logits, alone(model, row), **CLOSE)


@pytest.mark.parametrize("kind", ["tensor", "cache"])
def test_texts_that_are_packed_into_a_row_are_apart(kind: str) -> None:
    """As transformers packs texts: positions begin anew, without a mask or a cache."""
    texts = [[5, 9, 30, 31], [40, 41], [50, 51, 52, 53, 54]]
    row = torch.tensor([[token for text in texts for token in text]])
    positions = torch.tensor([[place for text in texts for place in range(len(text))]])
    with quantized(kind) as model:
        logits = model(row, position_ids=positions, use_cache=False).logits[0]
        for text, found in zip(texts, logits.split([len(text) for text in texts]), strict=True):
            torch.testing.assert_close(found, alone(model, text), **CLOSE)


def test_after_the_pass_that_begins_a_text_each_token_has_its_own_scale() -> None:
    """Prompts filled up on the left, then token by token: the second model is quantized by token while it decodes."""
    prompts, later = [[5, 9, 30, 31], [40, 41]], [[60, 61, 62], [63, 64, 65]]
    ids, mask = torch.tensor([[5, 9, 30, 31], [7, 7, 40, 41]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    by_token = RuntimeQuantization(activations=TENSOR.model_copy(update={"granularity": "token"}))
    with quantized("tensor") as model:
        cache = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).past_key_values
        prefilled = [model(torch.tensor([prompt])).past_key_values for prompt in prompts]
        found = []
        for step in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
            ids = torch.tensor(later)[:, step : step + 1]
            found.append(model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, 0])
        with pytest.raises(RotquantError, match="pass a text at once, and after it one token at a time"):
            model(torch.tensor(later), past_key_values=cache)
        with pytest.raises(RotquantError, match="pass attention_mask"):
            model(ids, attention_mask=torch.zeros(2, 1, 1, 1), use_cache=False)
    with wrap(model, by_token), torch.no_grad():
        for row, past in enumerate(prefilled):
            for step in range(3):
                logits = model(torch.tensor([[later[row][step]]]), past_key_values=past).logits[0, 0]
                torch.testing.assert_close(found[step][row], logits, **CLOSE)


@pytest.mark.parametrize("kind", ["tensor", "cache"])
def test_an_answers_score_depends_on_nothing_else_that_is_asked(kind: str) -> None:
    """Answers with one context share a row where no scale is of a text, and rows are filled up."""
    asked = [("w5 w6 w7 w8", " w9"), ("w5 w6 w7 w8", " w10 w11 w12"), ("w5 w6", " w13"), ("w40", " w7 w7 w41")]
    with quantized(kind) as model:
        scorer = Scorer(model, tiny_tokenizer(), "text", 8)
        together = [score for score, _ in scorer.log_likelihoods(asked, ["t"] * 4)]
        by_itself = [scorer.log_likelihoods([one], ["t"])[0][0] for one in asked]
        assert together == pytest.approx(by_itself, abs=1e-5)
        written = scorer.generate(["w5 w6 w7 w8", "w40", "w41 w42"], [((), 6)] * 3, ["t"] * 3)
        assert written == [scorer.generate([one], [((), 6)], ["t"])[0] for one in ("w5 w6 w7 w8", "w40", "w41 w42")]


def test_removing_the_quantizers_leaves_nothing_of_texts() -> None:
    model = tiny_model()
    with wrap(model, KINDS["tensor"]):
        assert scales_by_text(model)
    assert not scales_by_text(model)
    assert architecture_of(model).num_layers == 2
    model(torch.tensor([[5, 6]]), attention_mask=torch.zeros(1, 1, 2, 2))  # a mask of pairs is no matter any more


@pytest.mark.parametrize("scheme", [TENSOR, TENSOR.model_copy(update={"symmetric": False}), GROUP])
def test_texts_of_rows_are_quantized_as_rows(scheme: QuantizationScheme) -> None:
    x = torch.randn(3, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = Texts.of_rows((3, 5), x.device)
    expected = torch.stack([fake_quantize_texts(one[None], scheme)[0] for one in x])
    assert torch.equal(fake_quantize_texts(x, scheme, texts=rows), expected)
    split = torch.stack([fake_quantize_split(one, scheme, SPLIT) for one in x])
    assert torch.equal(fake_quantize_split(x, scheme, SPLIT, texts=rows), split)
