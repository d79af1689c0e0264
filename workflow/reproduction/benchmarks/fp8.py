"""Time of a whole network in float8, with and without the online Hadamard transform: SpinQuant App. A.6 and Table 14.

The prompts' prefill and one decoded token after them. The decoder is the 16-bit one with other linear layers: weights
have a scale for each output feature, inputs one for each token, found while they are made. Embedding, head, attention
and KV cache stay in 16 bits. Weights are random: time does not depend on them, and nothing is said about accuracy.
"""

import copy
import functools
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from reproduction.benchmarks.arguments import Fp8NetworkArguments
from reproduction.benchmarks.fp8_operators import fp8_linear, quantize_fp8, rms_norm_quantize_fp8
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import decoder_config
from reproduction.benchmarks.timing import SETTLE, Measurements, elapsed, gpu, time_gpu
from rotquant.decoder.cache import Cache, FloatCache
from rotquant.decoder.config import LINEARS, DecoderConfig, Precision
from rotquant.decoder.model import Decoder
from rotquant.kernels.hadamard.operator import hadamard
from rotquant.kernels.rows.elementwise import swiglu

#: Prefills are repeated so often, or for so many seconds: 32 prompts of a 70B shape take 17 s on an H200.
_PREFILLS, _SECONDS = 12, 9.0


def fp8_network(arguments: Fp8NetworkArguments) -> Measurements:
    """Seconds from the prompts of a batch to the logits of its first new tokens, and of one more token of each text.

    Returns:
        first_token_seconds; token_seconds; peak_bytes, of weights, cache and what is alive at once.
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


#: Standard deviation of the weights, as models are initialised.
_SPREAD = 0.02


@dataclass(frozen=True)
class Fp8Rows:
    """codes: float8_e4m3fn [rows, features]; scale: float32 [rows]."""

    codes: Tensor
    scale: Tensor


class Fp8Inputs(nn.Module):
    """Inputs that become float8, after an online Hadamard transform of the whole row with `rotate` (R4)."""

    def __init__(self, rotate: bool = False) -> None:
        super().__init__()
        self.rotate = rotate

    def forward(self, x: Tensor) -> Fp8Rows:
        """x [rows, features], transformed and quantized."""
        return Fp8Rows(*quantize_fp8(hadamard(x, 0, False, False) if self.rotate else x, False))

    def after_norm(self, hidden: Tensor, update: Tensor | None, gain: None, eps: float) -> tuple[Tensor, Fp8Rows]:
        """hidden + update [rows, hidden], and its RMS norm, quantized; gains are in the weights, as R1 needs."""
        codes, scale, total = rms_norm_quantize_fp8(hidden, update, eps)
        return hidden if update is None else total, Fp8Rows(codes, scale)

    def after_gate(self, gate_up: Tensor) -> Fp8Rows:
        """silu(gate) * up of [rows, 2 * features], transformed and quantized."""
        return self(swiglu(gate_up)) if self.rotate else Fp8Rows(*quantize_fp8(gate_up, True))


class Fp8Linear(nn.Module):
    """A linear layer of float8 weights and float8 inputs.

    Buffers: codes float8_e4m3fn [out, in], scale float32 [out]. dtype: of its results.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, inputs: Fp8Inputs, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.dtype = inputs, dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def product(self, x: Fp8Rows) -> Tensor:
        """Float8 [rows, in] -> [rows, out] of `dtype`."""
        return fp8_linear(x.codes, x.scale, self.codes, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`product` of the transformed and quantized input [rows, in]."""
        return self.product(self.inputs(x))


def random_fp8_decoder(
    config: DecoderConfig, *, rotate: bool, dtype: str = "bfloat16", device: torch.device | str = "cuda", seed: int = 0
) -> Decoder:
    """A decoder whose weights are drawn on its device, layer by layer, all of them different.

    Args:
        config: its norm gains are taken to be in the weights.
        rotate: R4, the online Hadamard transform before the down projection.
        dtype: of everything that is not float8; a GPU has products for bfloat16 alone.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    decoder = Decoder(
        config.model_copy(update={"norm_gains": False}),
        Precision(dtype=dtype),  # pyright: ignore[reportArgumentType]  # checked at run time
        "meta",
    )
    decoder.embedding = _normal(decoder.embedding.shape, 1.0, decoder.dtype, generator)
    if decoder.head is not None:
        decoder.head = _normal(decoder.head.shape, _SPREAD, decoder.dtype, generator)
    for layer in decoder.layers:
        for name in LINEARS:
            in_features, out_features = config.features(name)
            weight = _normal((out_features, in_features), _SPREAD, decoder.dtype, generator)
            inputs = Fp8Inputs(rotate and name == "down")
            setattr(
                layer,
                name,
                Fp8Linear(*quantize_fp8(weight, False), inputs, decoder.dtype),  # pyright: ignore[reportCallIssue]  # two
            )
    return decoder.eval()


def _normal(shape: tuple[int, ...], spread: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    return values.normal_(0.0, spread, generator=generator)
