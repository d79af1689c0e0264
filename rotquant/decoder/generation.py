"""Generating text with a decoder: a prefill, then one CUDA graph replayed for every token.

A graph holds one batch's whole step: embedding, layers, head and the choice of the next token, which it writes where
the next replay reads it. The host launches and counts, and waits for nothing. Without a GPU each step runs as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rotquant.decoder.model import Decoder
from rotquant.kernels.launch.overlap import overlapping_launches

#: Tokens after which it is asked whether all texts have ended.
_ASKED_EVERY = 8
#: Runs before a capture, in which kernels are compiled and libraries make their workspaces.
_WARM_UP = 2


class Generation:
    """Greedy decoding of `batch` texts of at most `capacity` tokens (prompt and continuation together).

    token: int64 [batch], the next token of each text, on the device; every step replaces it.
    """

    def __init__(self, decoder: Decoder, batch: int, capacity: int) -> None:
        self.decoder = decoder
        self.cache = decoder.new_cache(batch, capacity)
        self.token = torch.zeros(batch, dtype=torch.long, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def prefill(self, tokens: Tensor) -> Tensor:
        """Start anew with tokens, int64 [batch, tokens]; returns the logits after the last, [batch, vocabulary].

        Raises:
            KernelError: they do not fit, or are for another batch.
        """
        self.cache.reset()
        logits = self.decoder.prefill(tokens.to(self.decoder.device), self.cache)
        self.token.copy_(logits.argmax(-1))
        return logits

    def step(self) -> None:
        """Append `token` to each text and replace it by the next; on a GPU one graph launch.

        Raises:
            KernelError: the cache is full.
        """
        self.cache.check_room(1)
        if self.decoder.device.type != "cuda":
            self._step()
            return
        if self._graph is None:
            self.capture()
        self._graph.replay()  # pyright: ignore[reportOptionalMemberAccess]  # captured above
        self.cache.length += 1

    def generate(self, prompt: Tensor, count: int, ends: Sequence[int] = ()) -> Tensor:
        """Continue a prompt, int64 [batch, tokens], by at most `count` tokens: int64 [batch, at most count].

        Args:
            ends: tokens at which a text ends, which it has as its last; texts that end earlier than others are filled
                up with the first of them. Without any every text gets `count` tokens.
        """
        self.prefill(prompt)
        chosen = torch.empty(len(prompt), count, dtype=torch.long, device=self.decoder.device)
        last = torch.tensor(ends, dtype=torch.long, device=self.decoder.device)
        written = 0
        while written < count:
            chosen[:, written] = self.token
            written += 1
            # Asking waits for the GPU, so it is asked now and then, and what was written too much is cut off below.
            if ends and written % _ASKED_EVERY == 0 and torch.isin(chosen[:, :written], last).any(1).all():
                break
            if written < count:
                self.step()
        return _ended(chosen[:, :written], last)

    def capture(self) -> None:
        """Capture the graph of a step; the cache's content and `token` stay as they are.

        No launch of a step writes a weight, so products of few rows may fetch theirs early.
        """
        length, lengths, token = self.cache.length, self.cache.lengths.clone(), self.token.clone()

        def restore() -> None:
            self.cache.length = length
            self.cache.lengths.copy_(lengths)
            self.token.copy_(token)

        with torch.cuda.device(self.decoder.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._step()
                    restore()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with overlapping_launches(), torch.cuda.graph(self._graph, stream=stream):
                self._step()
        restore()

    def _step(self) -> None:
        logits = self.decoder.decode(self.token, self.cache)
        self.token.copy_(logits.argmax(-1))


def _ended(tokens: Tensor, ends: Tensor) -> Tensor:
    """Tokens of texts [batch, count], each to its first end, the shorter ones filled up with ends[0]."""
    if not len(ends):
        return tokens
    after = torch.isin(tokens, ends).int().cumsum(1) - torch.isin(tokens, ends).int() > 0
    longest = int((~after).sum(1).max())
    return tokens.masked_fill(after, int(ends[0]))[:, :longest]
