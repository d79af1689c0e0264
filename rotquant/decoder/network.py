"""A decoder in the place of a transformers model, for evaluation: `model(input_ids=...).logits`, and nothing more."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from rotquant.decoder.model import Decoder


@dataclass(frozen=True)
class Output:
    """What `Network` returns: logits [batch, tokens, vocabulary]."""

    logits: Tensor


class Network(nn.Module):
    """Complete texts in, logits out; perplexity and zero-shot tasks ask for no more.

    config: the parts of a transformers configuration that evaluation reads.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        # Evaluation asks the parameters for the device, and the decoder's weights are buffers.
        self.embedding = nn.Parameter(decoder.embedding, requires_grad=False)
        self.config = SimpleNamespace(
            vocab_size=decoder.config.vocabulary, max_position_embeddings=decoder.config.max_positions
        )

    def forward(self, input_ids: Tensor, use_cache: bool = False, **_: Any) -> Output:
        """int64 [batch, tokens] -> logits."""
        return Output(self.decoder.logits(input_ids))
