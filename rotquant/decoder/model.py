"""A decoder of Llama's family in any `Precision`: QuaRot Sec. 4 and Fig. 3 with real integers, or the 16-bit baseline.

The residual stream is carried as (hidden, update), because every norm first adds the last block's output and both
happen in one pass. Nothing here waits for the GPU, so a step of decoding is one CUDA graph (`generation`).
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, linear, rms_norm

from rotquant.decoder.cache import Cache, CacheInit, Step
from rotquant.decoder.config import LINEARS, DecoderConfig, Precision
from rotquant.decoder.linear import PackedLinear, Quantized, make_linear
from rotquant.foundation.errors import KernelError


class DecoderLayer(nn.Module):
    """Attention and MLP. Norm gains are buffers [hidden], or None where they were fused into the weights.

    query_norm, key_norm: gains [head_dim] of the norms of heads, or of all heads together, or None without.
    attention_post_norm, mlp_post_norm: gains [hidden] of norms before the residual stream, or None without.
    prefix_keys, prefix_values: as in `CacheInit`, buffers, or None without a prefix; key_scale, value_scale: likewise,
        where the cache's scales are static.
    """

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    prefix_keys: Tensor | None
    prefix_values: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None

    def __init__(
        self, config: DecoderConfig, precision: Precision, device: torch.device | str, *, local: bool = False
    ) -> None:
        super().__init__()
        self.config, self.local = config, local
        self.qkv, self.o, self.gate_up, self.down = (make_linear(config, precision, name, device) for name in LINEARS)
        for name in ("attention_norm", "mlp_norm"):
            self.register_buffer(name, _gain(config, precision, device) if config.input_norms else None)
        for name in ("attention_post_norm", "mlp_post_norm"):
            self.register_buffer(name, _gain(config, precision, device) if config.post_norms else None)
        size, dtype = (config.kv_heads, config.prefix, config.head_dim), getattr(torch, precision.dtype)
        for name, heads in (("query_norm", config.heads), ("key_norm", config.kv_heads)):
            width = config.head_dim * (heads if config.head_norms == "all" else 1)
            gain = torch.ones(width, dtype=dtype, device=device) if config.head_norms else None
            self.register_buffer(name, gain)
        for name in ("prefix_keys", "prefix_values"):
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device) if config.prefix else None)
        static = precision.cache is not None and precision.cache.static
        for name in ("key_scale", "value_scale"):
            self.register_buffer(name, torch.ones(config.kv_heads, device=device) if static else None)

    @property
    def cache_init(self) -> CacheInit:
        """Initial content of the layer's cache, before any text."""
        return CacheInit(_pair(self.prefix_keys, self.prefix_values), _pair(self.key_scale, self.value_scale))

    def forward(
        self, hidden: Tensor, update: Tensor | None, cache: Cache, index: int, step: Step
    ) -> tuple[Tensor, Tensor]:
        """hidden, update: [rows, hidden]; returns the same, update being the MLP's output, not yet added."""
        step = step.local if self.local and step.local is not None else step
        hidden, x = self._read(self.qkv, hidden, update, self.attention_norm)
        heads = self._normed(self.qkv.product(x))  # [rows, (heads + 2 kv_heads) * head_dim]
        update = self._written(self.o(cache.layers[index].attend(heads, step)), self.attention_post_norm)
        hidden, x = self._read(self.gate_up, hidden, update, self.mlp_norm)
        gate_up = self.gate_up.product(x)  # [rows, 2 * intermediate]
        if self.config.activation == "silu":
            x = self.down.inputs.after_gate(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            x = self.down.inputs(gelu(gate, approximate="tanh") * up)
        return hidden, self._written(self.down.product(x), self.mlp_post_norm)

    def _read(
        self, linear: PackedLinear, hidden: Tensor, update: Tensor | None, gain: Tensor | None
    ) -> tuple[Tensor, Tensor | Quantized]:
        """The residual stream, and what a linear layer reads of it."""
        if self.config.input_norms:
            return linear.inputs.after_norm(hidden, update, gain, self.config.norm_eps)
        return linear.inputs.after_sum(hidden, update)

    def _written(self, update: Tensor, gain: Tensor | None) -> Tensor:
        """What a block adds to the residual stream, [rows, hidden]."""
        return rms_norm(update, update.shape[-1:], gain, self.config.norm_eps) if self.config.post_norms else update

    def _normed(self, heads: Tensor) -> Tensor:
        """Queries, keys and values [rows, heads * head_dim] after the norms of queries and keys, if there are any."""
        if self.query_norm is None or self.key_norm is None:
            return heads
        shape = self.config
        sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        queries, keys, values = heads.split(sizes, dim=-1)
        normed = [
            rms_norm(x.unflatten(-1, (-1, len(gain))), gain.shape, gain, shape.norm_eps).flatten(-2)
            for x, gain in ((queries, self.query_norm), (keys, self.key_norm))
        ]
        return torch.cat([*normed, values], dim=-1)


class Decoder(nn.Module):
    """Embedding, layers, norm and head. Weights are buffers and empty until filled (`random`, `conversion`, `storage`).

    embedding, head: [vocabulary, hidden]; the head is the embedding where the configuration ties them.
    """

    embedding: Tensor
    head: Tensor | None
    norm: Tensor | None

    def __init__(self, config: DecoderConfig, precision: Precision, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config, self.precision, self.dtype = config, precision, getattr(torch, precision.dtype)
        self.embedding_scale = torch.tensor(
            config.embedding_scale, dtype=self.dtype
        ).item()  # as transformers rounds it
        table = torch.empty(config.vocabulary, config.hidden, dtype=self.dtype, device=device)
        self.register_buffer("embedding", table)
        self.register_buffer("head", None if config.tied else torch.empty_like(table))
        self.register_buffer("norm", _gain(config, precision, device))
        self.layers = nn.ModuleList(
            DecoderLayer(config, precision, device, local=index in config.local_layers)
            for index in range(config.layers)
        )

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens that stand in the cache before every text, as far as they are known."""
        return self.config.prefix_ids

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """A cache for `batch` texts of up to `capacity` tokens: empty, but for the prefix, which takes none of them.

        Raises:
            KernelError: texts of so many tokens reach beyond the window of the model's attention.
        """
        window = self.config.window
        if window is not None and self.config.prefix + capacity > window:
            raise KernelError(
                f"the model's attention has a window of {window} tokens and the decoder's has none: use texts of at "
                f"most {window - self.config.prefix} tokens, of which both see all, not {capacity}."
            )
        cache_init = [cast(DecoderLayer, layer).cache_init for layer in self.layers]
        return Cache(self.config, self.precision, batch, capacity, self.device, cache_init)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [rows, hidden]."""
        rows = embedding(tokens, self.embedding).flatten(0, -2)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    @torch.no_grad()
    def run(self, hidden: Tensor, cache: Cache, step: Step) -> Tensor:
        """All layers: [rows, hidden] -> the residual stream after the last, [rows, hidden]."""
        update = None
        for index, layer in enumerate(self.layers):
            hidden, update = layer(hidden, update, cache, index, step)
        return hidden + update  # pyright: ignore[reportOperatorIssue]  # None before the first layer only

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> logits [..., vocabulary]."""
        normed = rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.norm_eps)
        return linear(normed, self.embedding if self.head is None else self.head)

    def prefill(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append tokens, int64 [batch, tokens], to the cache; returns the logits [batch, vocabulary] after the last.

        Raises:
            KernelError: the cache is for another batch, or too short.
        """
        hidden = self._extend(tokens, cache)
        return self.predict(hidden.view(*tokens.shape, -1)[:, -1])

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token to each text, int64 [batch]; returns the next logits [batch, vocabulary].

        It only enqueues work and reads nothing back, so it can be captured in a CUDA graph.
        """
        cache.check_room(1)
        logits = self.predict(self.run(self.embed(tokens), cache, cache.decode_step()))
        cache.advance(1)
        return logits

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits after every token of complete texts: int64 [batch, tokens] -> [batch, tokens, vocabulary]."""
        return self.predict(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """The residual stream after the last layer, of complete texts: int64 [batch, tokens] -> [batch, tokens,
        hidden]."""
        cache = self.new_cache(*tokens.shape)
        return self._extend(tokens, cache).view(*tokens.shape, -1)

    def _extend(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append tokens [batch, tokens] to the cache; returns the residual stream [rows, hidden]."""
        if tokens.shape[0] != cache.batch:
            raise KernelError(f"the cache is for {cache.batch} texts, and {tokens.shape[0]} were given.")
        hidden = self.run(self.embed(tokens), cache, cache.prefill_step(tokens.shape[1]))
        cache.advance(tokens.shape[1])
        return hidden


def _pair(first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if first is None or second is None else (first, second)


def _gain(config: DecoderConfig, precision: Precision, device: torch.device | str) -> Tensor | None:
    dtype = getattr(torch, precision.dtype)
    return torch.ones(config.hidden, dtype=dtype, device=device) if config.norm_gains else None
