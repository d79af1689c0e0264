"""Whether a KV cache of few bits holds what keys say, where k_proj has a bias.

Keys of Qwen2 and Qwen2.5 are W x + b with a b that is up to hundreds of times as large as W x in some layers. The bias
sets the scale of every token, and the rounding error then covers what differs between tokens. R3 spreads the bias over
the head's features and cannot remove it. Values have no such bias.
"""

import math

import torch
from torch import Tensor, nn

from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.recipes.recipe import Recipe

#: Range of a head's features over their root mean square: that of 64 to 128 normal values is 4.7 to 5.3.
_RANGE = 5.0


@torch.no_grad()
def key_signals(model: nn.Module, bits: int) -> Tensor:
    """What varies in keys over the error of rounding them to `bits` after R3, decibels, float64 [layers, kv heads].

    From the weights alone: normed inputs count as independent, of variance 1 before the norm's gain. Infinite where
    k_proj has no bias, or a norm acts between it and RoPE.

    Args:
        model: causal language model of a known family, with its norms' gains as in the checkpoint.
    """
    architecture = architecture_of(model)
    found = torch.full((architecture.num_layers, architecture.num_kv_heads), math.inf, dtype=torch.float64)
    rows = slice(*(architecture.key.rows or (None,)))
    norm = architecture.site("attention_input").norm
    for layer, signals in zip(decoder_layers(model), found, strict=True):
        linear = linear_of(layer, architecture.key.name)
        if linear.bias is None or architecture.head_norms:
            continue
        gain = 1.0 if norm is None else layer.get_parameter(f"{norm}.weight").double() + architecture.norm_offset
        per_head = (architecture.num_kv_heads, -1)
        varies = (linear.weight[rows].double() * gain).square().sum(1).reshape(per_head).mean(1)
        fixed = linear.bias[rows].double().square().reshape(per_head).mean(1)
        step = _RANGE * (varies + fixed).sqrt() / (2**bits - 1)
        signals.copy_(10 * torch.log10(varies / (step.square() / 12)))
    return found


def key_bias_note(model: nn.Module, recipe: Recipe) -> str:
    """A sentence where rounding a recipe's keys makes a larger error than the keys vary, else nothing."""
    if recipe.keys is None or recipe.keys.bits >= 8:
        return ""
    signals = key_signals(model, recipe.keys.bits).amin(1)
    lost = (signals < 0).nonzero()[:, 0].tolist()
    if not lost:
        return ""
    return (
        f"the bias of k_proj is so large in layers {', '.join(map(str, lost))} (counted from 0) that keys in "
        f"{recipe.keys.bits} bits lose what tells tokens apart: the error is up to {-signals.min():.0f} dB above it. "
        "`--set keys.bits=8` keeps it."
    )
