"""Whether a model needs BOS: a loss on a short window of text with BOS at its head and without.

The papers' windows have BOS at the head of the whole text alone, which costs Llama-2 nothing. Gemma, which never saw a
text without one, loses 1.5 nats a token on 256 tokens, and .9 on 2,048.
"""

from typing import cast

import torch
from torch import Tensor, nn

from rotquant.metrics.perplexity import standard_error
from rotquant.models.architectures import config_of
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.prefix import prefix_holds
from rotquant.recipes.corpus import BOS
from rotquant.text import Tokens

#: Tokens of the window. Without BOS, Gemma-3-270M loses 2.9 nats a token on 64 tokens, 2.1 on 128 and 1.5 on 256.
TOKENS = 256
#: Nats a token above which a model needs BOS: four standard deviations over windows of SmolLM2-135M, which does not.
NEEDED = 0.1


@torch.no_grad()
def bos_gains(model: nn.Module, tokens: Tokens) -> Tensor:
    """How much lower the loss of each token is after BOS, nats, float64 [tokens], on a window amid a text.

    Args:
        model: causal language model whose forward returns `.logits` [batch, tokens, vocabulary].
        tokens: of a text of at least three tokens, of a tokenizer with BOS.
    """
    length = min(TOKENS, ModelLimits.of(config_of(model)).context or TOKENS, len(tokens.ids) + 1)
    start = (len(tokens.ids) - length + 1) // 2
    without = tokens.ids[start : start + length - 1].to(next(model.parameters()).device)
    headed = torch.cat([without.new_tensor([cast(int, tokens.bos)]), without])
    return _losses(model, without) - _losses(model, headed)[1:]


def _losses(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of every token but the first of one text, int64 [tokens], nats, float64 [tokens - 1]."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, ids[1:], reduction="none").double()


def bos_note(model: nn.Module, tokens: Tokens, adds_bos: bool, bos: BOS) -> str:
    """A sentence where windows are read without BOS by a model that needs it, else nothing.

    Args:
        tokens: the text, or a part of it.
        adds_bos: whether the tokenizer itself begins texts with BOS: only then the losses are computed.
        bos: where the windows have BOS.
    """
    if bos == "window" or not adds_bos or prefix_holds(model, tokens.bos) or len(tokens.ids) < 3:
        return ""
    gains = bos_gains(model, tokens)
    if not gains.mean() > max(NEEDED, 3 * standard_error(gains)):
        return ""
    return (
        f"this model needs BOS: without it a short window of the text costs {gains.mean():.2f} nats a token more; "
        "--bos window puts one at the head of each window."
    )
