"""A decoder in the place of a transformers model, for evaluation: complete texts in, logits or greedy texts out.

Perplexity, KL divergence and zero-shot tasks ask for no more than `Network` has.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StopStringCriteria
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from rotquant.decoder.model import Decoder
from rotquant.foundation.errors import KernelError
from rotquant.models.generation import end_tokens


class Network(nn.Module):
    """A decoder with the call signature of a causal language model.

    config: the parts of a transformers configuration that evaluation reads. generation_config: the model's own.
    takes_masks: a decoder's rows are texts, each by itself from the first column on.
    """

    takes_masks = False
    name_or_path = "decoder"
    base_model_prefix = "states"

    def __init__(self, decoder: Decoder, generation_config: GenerationConfig | None = None) -> None:
        super().__init__()
        self.decoder, self.generation_config = decoder, generation_config
        # Evaluation asks the parameters for the device, and the decoder's weights are buffers.
        self.embedding = nn.Parameter(decoder.embedding, requires_grad=False)
        self.config = SimpleNamespace(
            model_type="rotquant",
            vocab_size=decoder.config.vocabulary,
            max_position_embeddings=decoder.config.max_positions,
        )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens that stand in the cache before every text."""
        return self.decoder.prefix_ids

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not an integer."""
        return self.decoder.dtype

    def tie_weights(self) -> None:
        """Asked for by lm-eval; there is nothing to tie."""

    def states(self, input_ids: Tensor, use_cache: bool = False) -> BaseModelOutput:
        """int64 [batch, tokens] -> what `lm_head` reads."""
        return BaseModelOutput(last_hidden_state=cast(Any, self.decoder.states(input_ids)))

    def lm_head(self, states: Tensor) -> Tensor:
        """[..., hidden] -> logits [..., vocabulary]; it contains the last norm."""
        return self.decoder.predict(states)

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, logits_to_keep: int | Tensor = 0, **others: Any
    ) -> CausalLMOutput:
        """int64 [batch, tokens] -> logits, of the last tokens or of those of some columns where these are asked for.

        Raises:
            KernelError: a mask or positions of a text's tokens, which the decoder does not know.
        """
        if unknown := [name for name, value in others.items() if value is not None]:
            raise KernelError(f"a decoder reads whole texts that begin in the first column, and takes no {unknown[0]}.")
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=cast(Any, self.decoder.predict(self.decoder.states(input_ids)[:, keep])))

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        stop_strings: list[str] | None = None,
        logits_processor: Sequence[Any] = (),
        tokenizer: Any = None,
        max_length: int | None = None,
        stopping_criteria: Sequence[Any] = (),
        do_sample: bool = False,
        **others: Any,
    ) -> Tensor:
        """Continue one text greedily by `generation_config`, as transformers' `generate` does.

        Args:
            input_ids: int64 [1, tokens].
            stop_strings: it ends where its continuation has one of them; needs the tokenizer.
            logits_processor: each is called with the tokens so far, [1, tokens], and the next logits.
            max_length: tokens of text and continuation, in place of the settings' number.
            stopping_criteria: it ends where one of them, called with the tokens and None, says so.
            others: `pad_token_id` and `use_cache`, which change nothing here.

        Returns:
            The text with its continuation, int64 [1, tokens].

        Raises:
            KernelError: several texts, or one that is filled up; or another way of decoding.
        """
        if do_sample or others.keys() - {"pad_token_id", "use_cache"}:
            raise KernelError(
                f"a decoder takes the likeliest token each time, and no {', '.join(['do_sample', *others])}."
            )
        if len(input_ids) != 1 or (attention_mask is not None and not attention_mask.all()):
            raise KernelError("a decoder continues one text at a time, from its first column on.")
        rule = self.generation_config or GenerationConfig()
        count, ends = rule.max_new_tokens or 1, end_tokens(rule, None)
        count = count if max_length is None else max_length - input_ids.shape[1]
        stops = [*([StopStringCriteria(tokenizer, stop_strings)] if stop_strings else []), *stopping_criteria]
        cache = self.decoder.new_cache(1, input_ids.shape[1] + count)
        logits = self.decoder.prefill(input_ids, cache)
        for left in reversed(range(count)):
            for process in logits_processor:
                logits = process(input_ids, logits)
            input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=1)
            if (
                not left
                or input_ids[0, -1].item() in ends
                or any(torch.as_tensor(stop(cast(Any, input_ids), cast(Any, None))).all() for stop in stops)
            ):
                break
            logits = self.decoder.decode(input_ids[:, -1], cache)
        return input_ids
