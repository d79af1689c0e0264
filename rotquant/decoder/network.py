"""A decoder in the place of a transformers model, for evaluation: complete texts in, logits out, and nothing more.

Perplexity, KL divergence and lm-eval's log-likelihoods ask for no more than `Network` has.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.decoder.model import Decoder


@dataclass(frozen=True)
class Output:
    """Output of `Network`: logits [batch, tokens, vocabulary]."""

    logits: Tensor


@dataclass(frozen=True)
class HiddenStates:
    """Output of `Network.states`: [batch, tokens, hidden]."""

    last_hidden_state: Tensor


class Network(nn.Module):
    """A decoder with the call signature of a causal language model.

    config: the parts of a transformers configuration that evaluation reads.
    """

    name_or_path = "decoder"
    base_model_prefix = "states"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        # Evaluation asks the parameters for the device, and the decoder's weights are buffers.
        self.embedding = nn.Parameter(decoder.embedding, requires_grad=False)
        self.config = SimpleNamespace(
            model_type="rotquant",
            vocab_size=decoder.config.vocabulary,
            max_position_embeddings=decoder.config.max_positions,
        )

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.decoder.device

    def tie_weights(self) -> None:
        """Asked for by lm-eval; there is nothing to tie."""

    def states(self, input_ids: Tensor, use_cache: bool = False) -> HiddenStates:
        """int64 [batch, tokens] -> what `lm_head` reads."""
        return HiddenStates(self.decoder.states(input_ids))

    def lm_head(self, states: Tensor) -> Tensor:
        """[..., hidden] -> logits [..., vocabulary]; it contains the last norm."""
        return self.decoder.predict(states)

    def forward(self, input_ids: Tensor, use_cache: bool = False, **_: Any) -> Output:
        """int64 [batch, tokens] -> logits."""
        return Output(self.decoder.logits(input_ids))
