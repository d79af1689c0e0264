"""Text that a model writes itself, which methods train on: LLM-QAT's from nothing, BitDistiller's from prompts.

One decoding with a cache serves both. What was written is saved under a digest of all that decides it, so that rows of
a table which differ in their quantizers alone share it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rotquant.foundation.progress import ProgressTask, task
from rotquant.models.architectures import embedding
from rotquant.models.integrity import weights_digest
from rotquant.models.memory import keep

#: Sequences that are written side by side.
_SEQUENCES_AT_ONCE = 256
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
        generator: draws the tokens, on the host.
        temperature: logits are divided by it before the softmax.
        greedy: int64 [samples, 1]; up to so many tokens of a sequence the likeliest is taken. Default: none.

    Returns:
        Token ids on the host, int64 [samples, length].
    """
    prompts = prompts[:, :length]
    until = torch.zeros(len(prompts), 1, dtype=torch.long) if greedy is None else greedy
    parts = zip(prompts.split(_SEQUENCES_AT_ONCE), until.split(_SEQUENCES_AT_ONCE), strict=True)
    total = math.ceil(len(prompts) / _SEQUENCES_AT_ONCE) * (length - prompts.shape[1])
    with task(f"{title} text", "token", total) as under_way:
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
    tokens, cache = [prompts], None
    device = embedding(model).weight.device
    for known in range(prompts.shape[1], length):
        inputs = {"input_ids": tokens[-1].to(device), "past_key_values": cache, "use_cache": True}
        output = model(**inputs, logits_to_keep=1)  # of a whole prompt they would be gigabytes
        cache, logits = output.past_key_values, output.logits[:, -1].float().cpu()
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens.append(torch.where(known < greedy, logits.argmax(-1, keepdim=True), drawn))
        under_way.advance()
    return torch.cat(tokens, dim=1)


def written_once(model: nn.Module, about: object, make: Callable[[], Tensor]) -> Tensor:
    """The text that `make` has the model write, made once in this process.

    Args:
        about: what else than the model's weights and configuration decides the text, as something whose `str` says it.
    """
    key = str((weights_digest(model), about))
    known = _TEXTS.get(key)
    return keep(_TEXTS, key, make(), _TEXT_BYTES) if known is None else known
