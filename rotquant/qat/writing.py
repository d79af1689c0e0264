"""Text that a model writes itself, which methods train on: LLM-QAT's from nothing, BitDistiller's from prompts.

One decoding with a cache serves both. What was written is saved under a digest of all that decides it, so that rows of
a table which differ in their quantizers alone share it.
"""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from rotquant.foundation.environment import SHARED_TEXTS
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import alone, atomic_path, short_hash
from rotquant.foundation.progress import ProgressTask, task
from rotquant.models.architectures import architecture_of, embedding
from rotquant.models.integrity import weights_digest
from rotquant.models.memory import keep, sequences_at_once
from rotquant.tensors.devices import gpu_name

#: Tokens after which a GPU gets back what attention to fewer tokens took: later tokens need larger pieces of memory.
_GIVEN_BACK = 32
#: What this process has written, by what decides it.
_TEXTS: dict[str, Tensor] = {}
#: Bytes that are kept of it, in addition to the last text, which is kept whatever its size.
_TEXT_BYTES = 2**26


def write(
    model: nn.Module,
    prompts: Tensor,
    length: int,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    greedy: Tensor | None = None,
    title: str = "text",
) -> Tensor:
    """Prompts and what the model writes after them, token by token.

    Sequences do not end at an end-of-text token: what the model takes for the next text follows.

    Args:
        model: a causal language model on its device.
        prompts: token ids, int64 [samples, n] with n of at least one.
        length: tokens of a whole sequence; prompts as long or longer are cut to it.
        generator: on the host. It draws the tokens of a model on the host, and seeds the generator of one on a GPU.
        temperature: logits are divided by it before the softmax.
        greedy: int64 [samples, 1]; up to so many tokens of a sequence the likeliest is taken. Default: none.

    Returns:
        Token ids on the host, int64 [samples, length].
    """
    prompts = prompts[:, :length]
    until = torch.zeros(len(prompts), 1, dtype=torch.long) if greedy is None else greedy
    weight = embedding(model).weight
    if weight.device.type != "cpu":  # a CPU core draws from 256 x 49,152 numbers in 0.5 s
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        generator = torch.Generator(weight.device).manual_seed(seed)
    at_once = sequences_at_once(architecture_of(model), length, weight.element_size())
    parts = zip(prompts.split(at_once), until.split(at_once), strict=True)
    total = math.ceil(len(prompts) / at_once) * (length - prompts.shape[1])
    with task(f"{title} text, {min(at_once, len(prompts))} sequences at once", "token", total) as under_way:
        return torch.cat([_continue(model, *part, length, generator, temperature, under_way) for part in parts])


@torch.no_grad()
def _continue(
    model: nn.Module,
    prompts: Tensor,
    greedy: Tensor,
    length: int,
    generator: torch.Generator,
    temperature: float,
    under_way: ProgressTask,
) -> Tensor:
    """Sequences [n, length] from their first tokens; each is greedy up to its own number of tokens [n, 1]."""
    device, cache = embedding(model).weight.device, _cache(model, length)
    tokens, greedy = [prompts.to(device)], greedy.to(device)
    most = int(greedy.max())
    for known in range(prompts.shape[1], length):
        inputs = {"input_ids": tokens[-1], "past_key_values": cache, "use_cache": True}
        logits = model(**inputs, logits_to_keep=1).logits[:, -1].float()  # of a whole prompt they would be gigabytes
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        if known < most:
            drawn = torch.where(known < greedy, logits.argmax(-1, keepdim=True), drawn)
        tokens.append(drawn)
        if device.type == "cuda" and known % _GIVEN_BACK == 0:
            torch.cuda.empty_cache()
        under_way.advance()
    return torch.cat(tokens, dim=1).cpu()


def _cache(model: nn.Module, length: int) -> DynamicCache:
    """An empty cache with room for so many tokens; layers with a window keep transformers' way."""
    cache = DynamicCache(config=cast(Any, model).config)
    cache.layers = [_Room(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _Room(DynamicLayer):
    """Keys and values of a layer, [n, kv heads, tokens, head_dim], in memory for all tokens from the first one on.

    transformers' layer copies all of them for each token into memory of a new size, which a GPU's allocator keeps: 95
    GB for the 12 GB of 256 sequences of SmolLM2-135M.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens; keys and values of all tokens so far."""
        known, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms = [x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in (key_states, value_states)]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, known:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values


def written_once(model: nn.Module, device: torch.device, about: object, make: Callable[[], Tensor]) -> Tensor:
    """The text that `make` has the model write, made once in this process, and once by all that share the folder of
    $ROTQUANT_TEXTS: one writes it, and the others wait for it.

    Args:
        device: where it is written; a GPU draws other tokens than a CPU.
        about: what else than the model's weights and configuration decides the text, as something whose `str` says it.
    """
    key = str((weights_digest(model), device.type, about))
    known = _TEXTS.get(key)
    return keep(_TEXTS, key, _shared(key, device, make), _TEXT_BYTES) if known is None else known


def _shared(key: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    if not (folder := os.environ.get(SHARED_TEXTS)):
        return make()
    path = Path(folder) / f"{short_hash(f'{gpu_name(device)} {key}', 32)}.safetensors"
    with alone(path.with_suffix(".lock")):
        if path.exists():
            return load_file(path)["ids"]
        text = make()
        with suppress(ResultError), atomic_path(path) as temporary:  # a full disk only costs time
            save_file({"ids": text}, temporary)
    return text
