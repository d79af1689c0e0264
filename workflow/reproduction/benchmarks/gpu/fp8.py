"""Time of a whole network in float8, with and without the online Hadamard transform: SpinQuant Table 14.

The prompts' prefill and one decoded token after them, of one decoder with random weights
(`benchmarks.gpu.fp8_decoder`). It never says anything about accuracy.
"""

import copy
import functools
import gc
import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from reproduction.benchmarks.gpu import Fp8NetworkArguments
from reproduction.benchmarks.gpu.fp8_decoder import random_fp8_decoder
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import decoder_config
from reproduction.benchmarks.timing.case import Measurements, gpu
from reproduction.benchmarks.timing.gpu import SETTLE, elapsed, time_gpu
from rotquant.decoder.cache import Cache, FloatCache
from rotquant.decoder.model import Decoder

#: Prefills are repeated so often, or for so many seconds: 32 prompts of a 70B shape take 17 s on an H200.
_PREFILLS, _SECONDS = 12, 9.0


def fp8_network(arguments: Fp8NetworkArguments) -> Measurements:
    """Seconds from the prompts of a batch to the logits of its first new tokens, and of one more token of each text.

    Returns:
        first_token_seconds; token_seconds; peak_bytes, of weights, cache and what is alive at once.

    Raises:
        ConfigError: an unknown shape.
        KernelError: there is no GPU, or a kernel refuses.
    """
    a, device = arguments, gpu()
    gc.collect()  # the cache of another batch, which may not fit too
    decoder = _decoder(a.shape, device)
    for layer in decoder.layers:
        cast(Any, layer).down.inputs.rotate = a.hadamard
    cache = decoder.new_cache(a.batch, a.tokens)
    prompt = torch.randint(decoder.config.vocabulary, (a.batch, a.tokens), device=device)
    prefill = _prefill(decoder, cache, prompt, a.together)
    _warm_up(decoder, cache, prompt[: a.together])
    torch.cuda.reset_peak_memory_stats(device)
    first = _repeated(prefill)
    decoded = time_gpu(_decode(decoder, cache, prompt[:, -1].clone()), settle=SETTLE)
    return {
        "first_token_seconds": first,
        "token_seconds": decoded,
        "peak_bytes": Measurement(torch.cuda.max_memory_allocated(device), "B"),
    }


@functools.lru_cache(maxsize=1)
def _decoder(shape: str, device: torch.device) -> Decoder:
    """The decoder, kept for all cells: where weights lie in memory changes the time of a token by up to 4 %."""
    return random_fp8_decoder(decoder_config(shape), rotate=False, device=device)


def _prefill(decoder: Decoder, cache: Cache, prompt: Tensor, together: int) -> Callable[[], Tensor]:
    """The prefill of prompts [batch, tokens], `together` of them at a time; returns logits [batch, vocabulary]."""

    def prefill() -> Tensor:
        cache.reset()
        logits = [
            decoder.prefill(texts, _part(cache, start, len(texts)))
            for start, texts in zip(range(0, len(prompt), together), prompt.split(together), strict=True)
        ]
        cache.advance(prompt.shape[1])
        return torch.cat(logits)

    return prefill


def _part(cache: Cache, start: int, texts: int) -> Cache:
    """A cache for some of the texts of an empty cache: the same memory, counted apart."""
    part = copy.copy(cache)
    part.batch, part.lengths = texts, torch.zeros_like(cache.lengths[:texts])
    part.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cast("list[FloatCache]", part.layers):  # a float8 decoder has no other
        layer.keys, layer.values = (whole[start : start + texts] for whole in (layer.keys, layer.values))
    return part


def _warm_up(decoder: Decoder, cache: Cache, texts: Tensor) -> None:
    """One layer and the head on as many rows as the prefill has: kernels are compiled and chosen, memory is taken."""
    part = _part(cache, 0, len(texts))
    with torch.no_grad():
        decoder.layers[0](decoder.embed(texts), None, part, 0, part.prefill_step(texts.shape[1]))
    decoder.predict(decoder.embed(texts[:, -1]))


def _decode(decoder: Decoder, cache: Cache, token: Tensor) -> Callable[[int], None]:
    """One more token of each text, the last that the cache holds, and the greedy choice of the next."""
    cache.reset()
    cache.advance(cache.capacity - 1)

    def decode(_: int) -> None:
        logits = decoder.predict(decoder.run(decoder.embed(token), cache, cache.decode_step(fixed=True)))
        token.copy_(logits.argmax(-1))

    return decode


def _repeated(prefill: Callable[[], Tensor]) -> Measurement:
    """The median of a few prefills, of one where that takes long; low and high are the extremes.

    The first of several is left out: the clocks of a GPU take a while to settle under such products.
    """
    seconds: list[float] = []
    while len(seconds) < _PREFILLS and sum(seconds) < _SECONDS:
        seconds.append(elapsed(prefill))
    seconds = seconds[1:] or seconds
    return Measurement(statistics.median(seconds), "s", min(seconds), max(seconds), len(seconds), 1)
