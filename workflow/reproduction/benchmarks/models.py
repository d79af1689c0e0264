"""Time and memory of decoder blocks and whole decoders with random weights, by one code path for every precision.

QuaRot Tables 16 and 17 (one block), PrefixQuant Table 5 (time to the first token), RCP Table 7 (prefill and decoding at
batch 1). Everything that is timed runs from CUDA graphs, the 16-bit baseline too.
"""

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from reproduction.benchmarks.arguments import (
    BlockArguments,
    FirstTokenArguments,
    GenerateArguments,
    WholeDecoderArguments,
)
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import decoder_config
from reproduction.benchmarks.timing import SETTLE, Measurements, elapsed, gpu, time_gpu
from rotquant.decoder.config import KINDS, DecoderConfig, Precision
from rotquant.decoder.generation import Generation
from rotquant.decoder.model import Decoder
from rotquant.decoder.random import random_decoder
from rotquant.kernels.launch.overlap import overlapping_launches

#: Tokens that are decoded while memory is watched (QuaRot Table 17).
_DECODED = 50
#: A block is measured without embedding and head: they shrink to a few tokens.
_FEW_TOKENS = 32
#: PrefixQuant keeps the first token of Llama-3-8B in the cache (Table 1).
_PREFIX = 1
#: The settings of `whole_decoder` by its names.
_ACTIVATIONS = {
    "dynamic": KINDS["quarot"],
    "static": KINDS["prefixquant"],
    "weights-alone": KINDS["w4a16"],
    "none": KINDS["fp16"],
}
_CACHES = {"float16": None, "int4": KINDS["quarot"].cache, "int4-static": KINDS["prefixquant"].cache}
#: Times a text is generated; the median counts.
_TEXTS = 3

#: Precisions of the implementations. PrefixQuant's table leaves the KV cache at 16 bits, and so does its QuaRot.
_PRECISIONS: dict[str, Precision] = {
    "fp16": KINDS["fp16"],
    "bf16": KINDS["bf16"],
    "int4": KINDS["quarot"],
    "quarot": KINDS["quarot"].model_copy(update={"cache": None}),
    "prefixquant": KINDS["prefixquant"].model_copy(update={"cache": None}),
    "w2": KINDS["w2"],
}


def block(arguments: BlockArguments) -> Measurements:
    """Seconds of one block: a prefill, or one token of every sequence with `tokens` in the cache; and peak memory.

    peak_bytes: weights, cache and what is alive at once, during the prefill, or during 50 decoded tokens without the
    prefill before them.
    """
    return (_prefill if arguments.phase == "prefill" else _decode)(arguments, gpu())


def _prefill(a: BlockArguments, device: torch.device) -> Measurements:
    memory = _Memory(device)
    decoder = _block(a, device)
    cache = decoder.new_cache(a.batch, a.tokens)
    hidden = _hidden(decoder, a.batch * a.tokens)

    def run(_: int = 0) -> Tensor:
        cache.reset()
        return decoder.run(hidden, cache, cache.prefill_step(a.tokens))

    run()
    return _measured(run, memory)


def _decode(a: BlockArguments, device: torch.device) -> Measurements:
    memory = _Memory(device)
    decoder = _block(a, device)
    cache = decoder.new_cache(a.batch, a.tokens + _DECODED)
    decoder.run(_hidden(decoder, a.batch * a.tokens), cache, cache.prefill_step(a.tokens))
    cache.advance(a.tokens)
    hidden = _hidden(decoder, a.batch)

    def run(_: int = 0) -> Tensor:
        return decoder.run(hidden, cache, cache.decode_step(fixed=True))

    memory.reset_peak()
    for _ in range(_DECODED):
        # Not with a fixed length: cuDNN would make a plan for each of them.
        decoder.run(hidden, cache, cache.decode_step())
        cache.advance(1)
    peak = memory.peak()
    cache.advance(-_DECODED)
    with overlapping_launches():
        timing = time_gpu(run)
    return {"seconds": timing, "peak_bytes": peak}


def _block(a: BlockArguments, device: torch.device) -> Decoder:
    config = decoder_config(a.shape, vocabulary=_FEW_TOKENS, tied=True)
    return random_decoder(config, _PRECISIONS[a.implementation], layers=1, device=device)


def _hidden(decoder: Decoder, rows: int) -> Tensor:
    return torch.randn(rows, decoder.config.hidden, dtype=decoder.dtype, device=decoder.device)


class _Memory:
    """Bytes that torch allocated since this was made, at the peak."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # what is freed later would be counted against this measurement
        self.device, self.before = device, torch.cuda.memory_allocated(device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> Measurement:
        return Measurement(torch.cuda.max_memory_allocated(self.device) - self.before, "B")


def _measured(
    run: Callable[..., Tensor], memory: _Memory, launching: AbstractContextManager[None] = contextlib.nullcontext()
) -> Measurements:
    """Seconds of what ran once before, launched in a context, and the memory at its peak."""
    memory.reset_peak()
    run()
    peak = memory.peak()
    with launching:
        timing = time_gpu(run, settle=SETTLE)
    return {"seconds": timing, "peak_bytes": peak}


def first_token(arguments: FirstTokenArguments) -> Measurements:
    """Seconds from a batch of prompts to the logits of their first new tokens; bytes of the whole model."""
    a = arguments
    config = decoder_config(a.shape, prefix=_PREFIX if a.implementation == "prefixquant" else 0)
    return _whole(config, _PRECISIONS[a.implementation], a.batch, a.tokens, decoded=0)


def generate(arguments: GenerateArguments) -> Measurements:
    """Seconds per token of a prompt, of the generated tokens, and their sum, as RCP Table 7 counts."""
    a, device = arguments, gpu()
    decoder = random_decoder(decoder_config(a.shape), _PRECISIONS[a.implementation], device=device)
    generation = Generation(decoder, 1, a.prompt + a.tokens)
    prompt = _prompt(decoder, 1, a.prompt)

    def prefill(_: int = 0) -> Tensor:
        return generation.prefill(prompt)

    def decode() -> None:
        for _ in range(a.tokens):
            generation.step()

    prefilled = time_gpu(prefill, settle=SETTLE).over(a.prompt)
    texts = []
    for _ in range(1 + _TEXTS):
        prefill()
        texts.append(elapsed(decode) / a.tokens)
    low, *_, high = decoded = sorted(texts[1:])  # the first captured the graph
    median = decoded[_TEXTS // 2]
    return {
        "prefill_seconds_per_token": prefilled,
        "decode_seconds_per_token": Measurement(median, "s", low, high, _TEXTS, a.tokens),
        "total_seconds_per_token": Measurement(prefilled.value + median, "s"),
    }


def whole_decoder(arguments: WholeDecoderArguments) -> Measurements:
    """Seconds from a batch of prompts to the logits of their first new tokens, or of one more token; bytes of all."""
    a = arguments
    precision = _ACTIVATIONS[a.activations].model_copy(update={"cache": _CACHES[a.cache]})
    return _whole(decoder_config(a.shape, prefix=a.prefix), precision, a.batch, a.tokens, decoded=1, phase=a.phase)


def _whole(
    config: DecoderConfig, precision: Precision, batch: int, tokens: int, decoded: int, phase: str = "prefill"
) -> Measurements:
    """Time and memory of a phase of a whole model, whose cache has room for some decoded tokens too."""
    device = gpu()
    memory = _Memory(device)
    decoder = random_decoder(config, precision, device=device)
    cache = decoder.new_cache(batch, tokens + decoded)
    prompt = _prompt(decoder, batch, tokens)

    def prefill(_: int = 0) -> Tensor:
        cache.reset()
        return decoder.prefill(prompt, cache)

    token = prefill().argmax(-1)

    def decode(_: int = 0) -> Tensor:
        logits = decoder.predict(decoder.run(decoder.embed(token), cache, cache.decode_step(fixed=True)))
        token.copy_(logits.argmax(-1))
        return logits

    if phase == "prefill":
        return _measured(prefill, memory)
    return _measured(decode, memory, overlapping_launches())


def _prompt(decoder: Decoder, batch: int, tokens: int) -> Tensor:
    return torch.randint(decoder.config.vocabulary, (batch, tokens), device=decoder.device)
