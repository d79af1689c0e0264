"""Counts: parameters and bits of a model (RCP Figure 1), tokens of a prefix (PrefixQuant Table 1), and statistics of a
training's loss (RCP Figure 6).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reproduction.metrics.settings import TrainingLoss
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.recipes.schemes import UNQUANTIZED_BITS, WeightQuantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: PrefixQuant's sign for the BOS token, whatever a tokenizer writes for it.
BOS = "[BOS]"


def model_size(model: "PreTrainedModel", weights: WeightQuantization | None) -> dict[str, float]:
    """Count a checkpoint's parameters, shared ones once, and the bits that they take.

    Args:
        weights: how the weights of all linear layers but lm_head are quantized; None for not at all.

    Returns:
        `megabits` and `parameters`, both in millions. Scales, zero points and tables of levels are not counted.
    """
    architecture = architecture_of(model)
    names = [name for site in architecture.sites for name in site.linears]
    linear = sum(linear_of(layer, name).weight.numel() for layer in decoder_layers(model) for name in names)
    every = sum(parameter.numel() for parameter in model.parameters())
    bits = UNQUANTIZED_BITS if weights is None else weights.scheme.bits
    return {"megabits": (linear * bits + (every - linear) * UNQUANTIZED_BITS) / 1e6, "parameters": every / 1e6}


def prefix_tokens(
    ids: Sequence[int], bos: int | None, decode: Callable[[int], str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Count the tokens of a prefix, and format them as in PrefixQuant's Table 1.

    Args:
        ids: the tokens, in their order; none where a model has no outlier token.
        bos: the id of the BOS token; None where the model has none.
        decode: the text of a token id.

    Returns:
        Metrics: `tokens`, their number. Texts: `content`, the tokens without separators (`content_of`).
    """
    return {"tokens": float(len(ids))}, {"content": content_of(ids, bos, decode)}


def content_of(ids: Sequence[int], bos: int | None, decode: Callable[[int], str]) -> str:
    r"""The tokens on one line as in PrefixQuant's Table 1: `[BOS]`, `\n` for a line end and `_` for a space."""
    return "".join(BOS if token == bos else _visible(decode(token)) for token in ids)


def _visible(text: str) -> str:
    """A text with every character made visible."""
    return "".join(repr(one)[1:-1] if not one.isprintable() else "_" if one == " " else one for one in text)


def training_loss(losses: Sequence[float], metric: TrainingLoss) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure a loss curve.

    Args:
        losses: the loss of every step, two at least.

    Returns:
        Metrics: `spikes`, the number of first steps whose loss is above `factor` times the least before;
        `highest_spike`, the largest of these ratios; `final_loss`, the mean over the last tenth of the steps;
        `remaining`, that in percent of the first step's. Arrays: `losses`, and `spikes`, the indices of those steps.
    """
    least = itertools.accumulate(losses, min)
    ratios = [loss / before for loss, before in zip(losses[1 : metric.first], least, strict=False)]
    spikes = [step for step, ratio in enumerate(ratios, 1) if ratio > metric.factor]
    last = losses[-max(1, len(losses) // 10) :]
    final = sum(last) / len(last)
    metrics = {
        "spikes": float(len(spikes)),
        "highest_spike": max(ratios),
        "final_loss": final,
        "remaining": 100 * final / losses[0],
    }
    return metrics, {"losses": list(losses), "spikes": spikes}
