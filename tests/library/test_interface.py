"""A simulation is called as transformers' model is and returns what that returns: caches, beams, masks, pipelines.

With all quantizers off it equals the plain model, and with a prefix the plain model after the prefix's tokens.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache, pipeline

from rotquant.models.simulation.prefix import compute_prefix
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import QuantizationScheme
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model, tiny_tokens
from tests.helpers.prefixes import IDS, behind

#: transformers computes norms and rotary angles in float32 whatever the model's type.
CLOSE = {"rtol": 0, "atol": 1e-5}
CACHE = QuantizationScheme(bits=8, symmetric=False, granularity="head")
PADDED = torch.tensor([[7, 7, 7, 20, 21, 22], [30, 31, 32, 33, 34, 35]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


@contextmanager
def simulated(prefix: bool) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The plain model, and one with all quantizers off: with a prefix, or with a cache of 8 bits that is taken away."""
    plain = tiny_model(dtype=torch.float64, eos_token_id=None)
    model = copy.deepcopy(plain)
    quantization = RuntimeQuantization(prefix=compute_prefix(plain, IDS) if prefix else None)
    with wrap(model, quantization), torch.no_grad():
        yield plain, model


def before(tokens: Tensor, prefix: bool) -> Tensor:
    """Tokens as the plain model reads them."""
    return behind(tokens) if prefix else tokens


both = pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])


@both
def test_a_cache_is_filled_and_returned_as_the_callers_own(prefix: bool) -> None:
    tokens, more = tiny_tokens(2, 6), tiny_tokens(2, 3, seed=1)
    skipped = len(IDS) if prefix else 0
    with simulated(prefix) as (plain, model):
        for ours in (DynamicCache(), DynamicCache(config=model.config)):
            theirs = DynamicCache()
            for piece, whole in ((tokens, before(tokens, prefix)), (more, more)):
                found = model(piece, past_key_values=ours, use_cache=True)
                expected = plain(whole, past_key_values=theirs, use_cache=True)
                assert found.past_key_values is ours
                torch.testing.assert_close(found.logits, expected.logits[:, -piece.shape[1] :], **CLOSE)
                assert ours.get_seq_length() == theirs.get_seq_length() - skipped
            assert isinstance(ours, DynamicCache)
        assert model(tokens, use_cache=False).past_key_values is None
        assert isinstance(model(tokens).past_key_values, DynamicCache)  # the configuration's use_cache is true


@both
def test_texts_that_begin_alike_continue_copies_of_one_cache(prefix: bool) -> None:
    begun, rest = tiny_tokens(1, 6), tiny_tokens(2, 3, seed=1)
    with simulated(prefix) as (plain, model):
        cache = model(begun, use_cache=True).past_key_values
        for row in rest:
            found = model(row[None], past_key_values=copy.deepcopy(cache), use_cache=True).logits[0]
            expected = plain(before(torch.cat([begun, row[None]], 1), prefix)).logits[0, -3:]
            torch.testing.assert_close(found, expected, **CLOSE)
        cache.crop(4)
        found = model(rest[:1], past_key_values=cache).logits[0]
        expected = plain(before(torch.cat([begun[:, :4], rest[:1]], 1), prefix)).logits[0, -3:]
        torch.testing.assert_close(found, expected, **CLOSE)


@both
@pytest.mark.parametrize(
    "arguments",
    [{}, {"use_cache": False}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}],
    ids=["greedy", "uncached", "beams", "uncached-beams"],
)
def test_generation_is_transformers(prefix: bool, arguments: dict[str, Any]) -> None:
    """Prompts of unequal length, filled up on the left."""
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | arguments
    with simulated(prefix) as (plain, model):
        found = model.generate(PADDED, attention_mask=MASK, **arguments)
        # One at a time: in a batch the prefix's tokens would lie before what fills a prompt up.
        expected = [
            plain.generate(before(row[seen.bool()][None], prefix), **arguments)[:, -6:]
            for row, seen in zip(PADDED, MASK, strict=True)
        ]
    assert torch.equal(found, torch.cat([PADDED, torch.cat(expected)], dim=1))


@both
def test_what_a_generation_returns_goes_on(prefix: bool) -> None:
    prompt = tiny_tokens(1, 5)
    with simulated(prefix) as (plain, model):
        first = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        assert first.past_key_values.get_seq_length() == 5 + 3 - 1
        again = model.generate(
            first.sequences, past_key_values=first.past_key_values, max_new_tokens=3, do_sample=False
        )
        expected = plain.generate(before(prompt, prefix), max_new_tokens=6, do_sample=False)
        assert torch.equal(again[0, -6:], expected[0, -6:])
        static = model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation="static")
        assert torch.equal(static[0, -6:], expected[0, -6:])
        twice = model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation="static")
        assert torch.equal(twice, static)
        given = StaticCache(config=model.config, max_cache_len=32)
        assert model(prompt, past_key_values=given, use_cache=True).past_key_values.get_seq_length() == 5


@both
def test_arguments_may_have_no_names_and_texts_may_be_embedded_or_packed(prefix: bool) -> None:
    row, positions = torch.tensor([[20, 21, 22, 30, 31]]), torch.tensor([[0, 1, 2, 0, 1]])
    with simulated(prefix) as (plain, model):
        texts = [plain(before(one, prefix), use_cache=False).logits[0] for one in (row[:, :3], row[:, 3:])]
        expected = torch.cat([text[-count:] for text, count in zip(texts, (3, 2), strict=True)])
        packed = model(row, position_ids=positions, use_cache=False).logits[0]
        torch.testing.assert_close(packed, expected, **CLOSE)
        embedded = model(inputs_embeds=model.get_input_embeddings()(row[:, :3])).logits[0]
        torch.testing.assert_close(embedded, expected[:3], **CLOSE)
        states = model.model(PADDED, MASK, (MASK.cumsum(-1) - 1).clamp(min=0)).last_hidden_state[0, 3:]
        torch.testing.assert_close(
            states, plain.model(before(PADDED[:1, 3:], prefix)).last_hidden_state[0, -3:], **CLOSE
        )


@both
def test_a_pipeline_writes_what_transformers_writes(prefix: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    with simulated(prefix) as (plain, model):
        write = pipeline("text-generation", model=model, tokenizer=tokenizer)
        line = {"max_new_tokens": 4, "do_sample": False, "batch_size": 2, "return_tensors": True}
        found = write(["w20 w21 w22", "w30"], **line)
        for text, ids in zip(found, ([20, 21, 22], [30]), strict=True):
            expected = plain.generate(before(torch.tensor([ids]), prefix), max_new_tokens=4, do_sample=False)[0, -4:]
            assert text[0]["generated_token_ids"][-4:] == expected.tolist()


def test_the_callers_cache_is_filled_with_codes() -> None:
    """A cache that is quantized is the caller's too, and continues the text that it holds."""
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens(2, 8)
    with wrap(model, RuntimeQuantization(keys=CACHE, values=CACHE)), torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        cache = DynamicCache()
        logits = [model(piece, past_key_values=cache).logits for piece in tokens.split([5, 3], dim=1)]
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, **CLOSE)
        assert cache.layers[0].keys.dtype == torch.uint8
