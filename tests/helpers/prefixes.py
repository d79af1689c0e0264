"""Models with prefixes in their KV cache."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import tiny_model

IDS = (5, 9, 1)


#: Without a sliding window, which a prefix would drop out of.
WHOLE: dict[str, dict[str, object]] = {"mistral": {"sliding_window": None}, "qwen2": {"use_sliding_window": False}}


def behind(tokens: Tensor) -> Tensor:
    """Texts behind the tokens of the prefix."""
    return torch.cat([torch.tensor(IDS).expand(len(tokens), -1), tokens], dim=1)


def sink_model() -> PreTrainedModel:
    """A model whose token 7 has far larger inputs of down_proj in layer 0 than any other, wherever it stands."""
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        direction = torch.zeros(model.config.hidden_size, dtype=torch.float64)
        direction[3] = 60.0
        model.model.embed_tokens.weight[:, 3] = 0.0
        model.model.embed_tokens.weight[7] += direction
        model.model.layers[0].mlp.gate_proj.weight[0, 3] = 30.0
        model.model.layers[0].mlp.up_proj.weight[0, 3] = 30.0
    return model
