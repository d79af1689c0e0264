"""One token through a decoder of Llama's family on a CPU, in 16 bits or with 4-bit weights and 8-bit activations.

SpinQuant Table 6. The precisions differ in the products and the online transforms; norms, rotary embeddings and
attention are the same. It serves one text, token by token, and has no prefill.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from reproduction.benchmarks.cpu_kernels.layout import DotWeight
from reproduction.benchmarks.cpu_kernels.operators import attention, hadamard, linear, linear16
from rotquant.decoder.config import LINEARS, DecoderConfig

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
