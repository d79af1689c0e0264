"""Time of decoding one token on a CPU: a whole network, its linear layers compared with torch's, and its transforms.

SpinQuant Table 6. Everything runs in torch's threads. Weights are cold: a network reads more than the caches hold, and
copies of a single layer take turns. The decoder is of Llama's family, in 16 bits or with 4-bit weights and 8-bit
activations, which differ in the products and the online transforms alone. It serves one text and has no prefill.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from reproduction.benchmarks.arguments import CpuDecodeArguments, CpuLinearArguments, CpuTransformArguments
from reproduction.benchmarks.cpu_kernels.layout import DotWeight
from reproduction.benchmarks.cpu_kernels.operators import attention, hadamard, linear, linear16, read
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import decoder_config
from reproduction.benchmarks.timing import COLD_BYTES, time_cpu
from rotquant.decoder.config import LINEARS, DecoderConfig
from rotquant.tensors.hadamard import hadamard_transform

Weight = Tensor | DotWeight
"""Floating-point numbers [out, in], or integers."""

#: Rows of a random embedding.
_FEW_TOKENS = 32


@dataclass(frozen=True)
class CpuLayer:
    """A layer's weights as `DecoderConfig.features` has them, but [out, in]; norm gains are fused into them."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, in the order in which they are read."""
        return self.qkv, self.o, self.gate_up, self.down


class CpuCache:
    """Keys and values [layers, kv_heads, capacity, head_dim] and their number of tokens; keys rotated by R3."""

    def __init__(self, shape: DecoderConfig, capacity: int, dtype: torch.dtype, length: int = 0) -> None:
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self.keys, self.values, self.length = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype), length


@dataclass(frozen=True)
class CpuDecoder:
    """Embedding, layers, norm and head. Fewer layers than the shape has take turns.

    embedding: [tokens, hidden], its dtype being that of everything but integers. head: [vocabulary, hidden], a 16-bit
        weight in every precision, as the library leaves it.
    rotates: R3 and R4 act online (SpinQuant-hard); the weight of down_proj has R4's inverse in it.
    product: how a weight of floating-point numbers is multiplied.
    """

    shape: DecoderConfig
    embedding: Tensor
    layers: tuple[CpuLayer, ...]
    head: Tensor
    rotates: bool = False
    product: Callable[[Tensor, Tensor], Tensor] = linear16

    def changed(self, **fields: Any) -> "CpuDecoder":
        """A decoder of the same weights with other `fields`."""
        return replace(self, **fields)

    @functools.cached_property
    def frequencies(self) -> Tensor:
        """The frequencies of the rotary embedding, float32 [head_dim / 2]."""
        return torch.tensor(self.shape.inverse_frequencies, dtype=torch.float32)

    @property
    def weights(self) -> list[Tensor]:
        """The tensors of weights that a token reads, in order, as often as it reads them."""
        read = [weight for index in range(self.shape.layers) for weight in self.layer(index).weights]
        return [weight.codes if isinstance(weight, DotWeight) else weight for weight in (*read, self.head)]

    def layer(self, index: int) -> CpuLayer:
        """The weights of layer `index`."""
        return self.layers[index % len(self.layers)]

    @torch.no_grad()
    def decode(self, token: int, cache: CpuCache) -> Tensor:
        """Append a token to the cache; returns the logits [vocabulary] of the next."""
        hidden = self.embedding[token : token + 1]  # [1, hidden]
        turn = self._turn(cache.length)
        for index in range(self.shape.layers):
            layer = self.layer(index)
            heads = self._linear(self._norm(hidden), layer.qkv)
            hidden = hidden + self._linear(self._attend(heads, turn, cache, index), layer.o)
            gate, up = self._linear(self._norm(hidden), layer.gate_up).chunk(2, dim=1)
            inner = functional.silu(gate) * up
            hidden = hidden + self._linear(hadamard(inner) if self.rotates else inner, layer.down)
        cache.length += 1
        return self.product(self._norm(hidden), self.head)[0]

    def _linear(self, x: Tensor, weight: Weight) -> Tensor:
        return linear(x, weight) if isinstance(weight, DotWeight) else self.product(x, weight)

    def _norm(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=self.shape.norm_eps)

    def _turn(self, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [head_dim] of a position's rotary embedding."""
        angles = (position * self.frequencies).repeat(2)
        return angles.cos().to(self.embedding.dtype), angles.sin().to(self.embedding.dtype)

    def _attend(self, qkv: Tensor, turn: tuple[Tensor, Tensor], cache: CpuCache, index: int) -> Tensor:
        """Attention of one token to the cache and itself: [1, (heads + 2 kv_heads) * head_dim] -> [1, heads * ...]."""
        shape, (cos, sin) = self.shape, turn
        several = qkv.view(-1, shape.head_dim)
        turned = shape.heads + shape.kv_heads  # queries and keys
        x = several[:turned]
        first, second = x.chunk(2, dim=1)
        x = x * cos + torch.cat([-second, first], dim=1) * sin
        if self.rotates:
            x = hadamard(x)
        keys, values = cache.keys[index], cache.values[index]
        keys[:, cache.length] = x[shape.heads :]
        values[:, cache.length] = several[turned:]
        y = attention(x[: shape.heads], keys, values, cache.length + 1)
        return y.view(1, -1)


def random_cpu_decoder(
    shape: DecoderConfig, weights: Literal["bf16", "w4a8"], *, layers: int, seed: int = 0
) -> CpuDecoder:
    """A decoder in bfloat16 of which `layers` layers have weights in memory, and the others take them in turn.

    They are copies of random ones, since caches and memory know places and not values. The embedding holds a few tokens
    only: a step reads one row of it.
    """
    generator = torch.Generator().manual_seed(seed)
    make = random_dot_weight if weights == "w4a8" else _random_weight
    sizes = {name: shape.features(name) for name in LINEARS}
    first = CpuLayer(**{name: make((outputs, inputs), generator) for name, (inputs, outputs) in sizes.items()})
    made = (first, *(copy.deepcopy(first) for _ in range(1, min(layers, shape.layers))))
    embedding = torch.randn(_FEW_TOKENS, shape.hidden, generator=generator).bfloat16()
    return CpuDecoder(shape, embedding, made, _random_weight((shape.vocabulary, shape.hidden), generator))


def random_dot_weight(size: tuple[int, int], generator: torch.Generator) -> DotWeight:
    """Uniform codes [out, in] and a scale that makes them as large as weights are."""
    codes = torch.randint(-8, 8, size, dtype=torch.int8, generator=generator)
    return DotWeight.pack(codes, torch.full((size[0],), 0.005))


def _random_weight(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """bfloat16 [out, in], standard deviation 0.02."""
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)


#: Seconds of each network, and of each reading of weights.
_DECODING_SECONDS = 10.0
#: Calls of a short function that are timed as one.
_CALLS = 200


def cpu_decode(arguments: CpuDecodeArguments) -> dict[str, Measurement]:
    """Seconds of one token in every precision, taking turns, and of reading the same weights with all threads.

    Quantities: bf16_seconds (our product of 16-bit weights), bf16_torch_seconds (`torch.nn.functional.linear`),
    w4a8_seconds, w4a8_hadamard_seconds (with R3 and R4 online); floors: bf16_read_seconds, w4a8_read_seconds; what a
    token reads: bf16_bytes, w4a8_bytes.
    """
    shape, layers = decoder_config(arguments.shape), arguments.layers_in_memory
    wide, narrow = (random_cpu_decoder(shape, weights, layers=layers) for weights in ("bf16", "w4a8"))
    decoders = {
        "bf16": wide,
        "bf16_torch": wide.changed(product=functional.linear),
        "w4a8": narrow,
        "w4a8_hadamard": narrow.changed(rotates=True),
    }
    calls = {name: decoding_step(decoder, arguments.context) for name, decoder in decoders.items()}
    several = {"bf16": wide.weights, "w4a8": narrow.weights}
    calls |= {f"{name}_read": functools.partial(_read, weights) for name, weights in several.items()}
    timings = time_cpu(*calls.values(), seconds=_DECODING_SECONDS)
    seconds = {f"{name}_seconds": timing for name, timing in zip(calls, timings, strict=True)}
    return seconds | {
        f"{name}_bytes": Measurement(sum(weight.nbytes for weight in weights), "B") for name, weights in several.items()
    }


def decoding_step(decoder: CpuDecoder, context: int) -> Callable[[], Tensor]:
    """A repeatable step of decoding that sees `context` tokens, including itself."""
    cache = CpuCache(decoder.shape, context, decoder.embedding.dtype)
    for part in (cache.keys, cache.values):
        part.normal_()

    def step() -> Tensor:
        cache.length = context - 1
        return decoder.decode(0, cache)

    return step


def cpu_linear(arguments: CpuLinearArguments) -> dict[str, Measurement]:
    """Seconds of one linear layer on one token by every implementation, taking turns, and the bytes of its weight.

    Quantities are called as in `_LAYERS`, such as w4a8_seconds and w4a8_bytes; there are none of those that torch does
    not have on this machine.
    """
    a = arguments
    calls: dict[str, list[Callable[[], Tensor]]] = {}
    sizes: dict[str, int] = {}
    for name, make in _LAYERS.items():
        try:
            call, size = make(a.in_features, a.out_features)
            call()
        except (AttributeError, NotImplementedError, RuntimeError):
            continue
        calls[name] = [call, *(make(a.in_features, a.out_features)[0] for _ in range(COLD_BYTES // size))]
        sizes[name] = size
    timings = time_cpu(*(functools.partial(_run, several) for several in calls.values()))
    found: dict[str, Measurement] = {}
    for (name, several), timing in zip(calls.items(), timings, strict=True):
        found[f"{name}_seconds"] = timing.over(len(several))
        found[f"{name}_bytes"] = Measurement(sizes[name], "B")
    return found


def cpu_transform(arguments: CpuTransformArguments) -> dict[str, Measurement]:
    """Seconds of the Hadamard transform of a few rows that lie in the cache, as they do when a network has made them.

    Quantities: ours_seconds, and torch_seconds of the library's transform in plain torch operations.

    Raises:
        HadamardSizeError: no construction for the number of features.
    """
    x = torch.randn(arguments.rows, arguments.features).bfloat16()
    calls = {name: [functools.partial(transform, x)] * _CALLS for name, transform in _TRANSFORMS.items()}
    timings = time_cpu(*(functools.partial(_run, several) for several in calls.values()))
    return {f"{name}_seconds": timing.over(_CALLS) for name, timing in zip(calls, timings, strict=True)}


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"ours": hadamard, "torch": hadamard_transform}


def _run(calls: Iterable[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


def _read(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        read(weight)


Layer = tuple[Callable[[], Tensor], int]
"""A linear layer with random weights on one token, and the bytes of its weight."""


def _bf16(in_features: int, out_features: int, product: Callable[[Tensor, Tensor], Tensor] = linear16) -> Layer:
    x, weight = _token(in_features), _weight(in_features, out_features)
    return lambda: product(x, weight), weight.nbytes


def _w4a8(in_features: int, out_features: int) -> Layer:
    x, weight = _token(in_features), random_dot_weight((out_features, in_features), torch.Generator())
    return lambda: linear(x, weight), weight.nbytes


def _int8_weights(in_features: int, out_features: int) -> Layer:
    x, scale = _token(in_features), torch.full((out_features,), 0.001, dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    return lambda: torch._weight_int8pack_mm(x, weight, scale), weight.nbytes  # pyright: ignore[reportPrivateImportUsage]  # no public name


def _int8_dynamic(in_features: int, out_features: int) -> Layer:
    layer = nn.Sequential(nn.Linear(in_features, out_features, bias=False))
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    x = _token(in_features).float()
    return lambda: quantized(x), in_features * out_features


def _int4_dynamic(in_features: int, out_features: int) -> Layer:
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8)
    weight = torch._dyn_quant_pack_4bit_weight(  # pyright: ignore[reportPrivateImportUsage]  # no public name
        codes, torch.full((out_features, 1), 0.005), None, in_features, in_features, out_features
    )
    x = _token(in_features).float()
    return (
        lambda: torch._dyn_quant_matmul_4bit(  # pyright: ignore[reportPrivateImportUsage]  # no public name
            x, weight, in_features, in_features, out_features
        ),
        codes.nbytes,
    )


#: Ours are bf16 and w4a8. Of torch: `linear`; `_weight_int8pack_mm`, 16-bit activations on 8-bit weights; a dynamically
#: quantized `Linear` and `_dyn_quant_matmul_4bit`, 8-bit activations made of float32, which is all that they take.
_LAYERS: dict[str, Callable[[int, int], Layer]] = {
    "bf16": _bf16,
    "bf16_torch": functools.partial(_bf16, product=functional.linear),
    "int8_weights": _int8_weights,
    "int8_dynamic": _int8_dynamic,
    "int4_dynamic": _int4_dynamic,
    "w4a8": _w4a8,
}


def _token(features: int) -> Tensor:
    return torch.randn(1, features).bfloat16()


def _weight(in_features: int, out_features: int) -> Tensor:
    return torch.empty(out_features, in_features, dtype=torch.bfloat16).normal_(0.0, 0.02)
