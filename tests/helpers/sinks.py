"""Models with planted outlier tokens."""

import math

import torch

from reproduction.tasks import Scores
from rotquant.metrics.diagnostics import Costs
from rotquant.metrics.perplexity import PerplexityResult
from tests.helpers.models import VOCABULARY, tiny_model

SINK, BOS = 7, 1


HEIGHT = 50.0


def planted():
    """A Llama whose attention and MLPs write nothing, so that every token is its embedding in every layer.

    All tokens but SINK have the value 1 in channel 1, SINK has HEIGHT in channel 0; the rest are signs. The MLPs read
    these two channels alone, and equally.
    """
    model = tiny_model()
    with torch.no_grad():
        signs = torch.randint(2, model.model.embed_tokens.weight.shape) * 2.0 - 1
        signs[:, 0], signs[:, 1] = 0, 1
        signs[SINK, 0], signs[SINK, 1] = HEIGHT, 0
        model.model.embed_tokens.weight.copy_(signs)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.post_attention_layernorm.weight.fill_(1)
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight.zero_()
                linear.weight[:, :2] = 1
    return model


def expected_ratio(width: int = 64) -> float:
    """silu(x) x of the sink over that of another token, for their channel 0 or 1 after RMSNorm."""
    sink = HEIGHT / math.sqrt((HEIGHT**2 + width - 2) / width)
    other = 1 / math.sqrt((width - 1) / width)
    return (sink * sink / (1 + math.exp(-sink))) / (other * other / (1 + math.exp(-other)))


def result(*losses: float) -> PerplexityResult:
    nll = sum(losses) / len(losses)
    return PerplexityResult(math.exp(nll), nll, 0.0, 10, len(losses), by_window=losses)


COSTS = Costs(
    {
        "unquantized": result(1.0, 2.0, 3.0),
        "w4a4": result(1.5, 2.7, 3.9),
        "r1": result(1.2, 2.2, 3.2),
        "r12": result(1.2, 2.2, 3.2),
        "r124": result(1.1, 2.1, 3.1),
        "static": result(1.1, 2.1, 3.1),
        "rtn": result(math.inf, math.inf, math.inf),
        "quarot-rtn": result(1.1, 2.1, 3.1),
        "kv3": result(1.03, 2.03, 3.03),
        "inputs": result(1.1, 2.1, 3.1),
    },
    {
        "unquantized": Scores({"parameter": 75.0, "average": 75.0, "parameter.items": 4}, {"parameter": (1, 1, 1, 0)}),
        "w4a4": Scores({"parameter": 25.0, "average": 25.0, "parameter.items": 4}, {"parameter": (1, 0, 0, 0)}),
        "r124": Scores({"parameter": 75.0, "average": 75.0, "parameter.items": 4}, {"parameter": (1, 1, 0, 1)}),
    },
)


def text() -> torch.Tensor:
    """Four windows of 16 tokens: SINK stands first in three, at 5 in two of these, and at 9 in the last."""
    ids = torch.randint(22, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    ids[:3, 0], ids[:2, 5], ids[3, 9] = SINK, SINK, SINK
    return ids


def windows_with_sinks() -> torch.Tensor:
    """Four windows of 32 tokens: SINK stands first in all, elsewhere twice in the first window, once in the second."""
    ids = torch.randint(10, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = SINK
    ids[0, 5] = ids[0, 20] = ids[1, 31] = SINK
    return ids
