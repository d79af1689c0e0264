"""From text to token windows by the protocol that the papers share (GPTQ's, used by QuaRot, SpinQuant and PrefixQuant).

The whole text is tokenized at once with one BOS at its head; evaluation windows do not overlap and the tail is dropped;
calibration samples are windows at random places. Nothing here touches global random state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rotquant.errors import CorpusError
from rotquant.progress import task

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

BOS = Literal["text", "window", "none"]


@task("tokenizing")
def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the token ids of `text`, LongTensor [n], with exactly one BOS at the head whatever the tokenizer's habit.

    Raises:
        CorpusError: the tokenizer has no BOS token.
    """
    import torch

    if tokenizer.bos_token_id is None:
        raise CorpusError(
            f"The tokenizer of {tokenizer.name_or_path or 'this model'} has no BOS token; "
            "the perplexity protocol puts one at the head of the text."
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([tokenizer.bos_token_id, *ids], dtype=torch.long)


def evaluation_windows(token_ids: torch.Tensor, sequence_length: int, bos: BOS = "text") -> torch.Tensor:
    """Cut ids [n] into windows without overlap, LongTensor [windows, sequence_length], dropping the tail.

    Args:
        token_ids: int64 [n], a text with one BOS at its head, as `tokenize` makes it.
        bos: `text` leaves it there, in the first window alone (the papers' codes); `window` begins every window with
            it, followed by one token less of text; `none` takes it away.

    Raises:
        CorpusError: the text is shorter than one window.
    """
    import torch

    first, text = token_ids[:1], token_ids[1:]
    cut, length = {
        "text": (token_ids, sequence_length),
        "window": (text, sequence_length - 1),
        "none": (text, sequence_length),
    }[bos]
    n_windows = cut.numel() // length
    if n_windows == 0:
        raise CorpusError(
            f"The text has {token_ids.numel()} tokens, fewer than one window of {sequence_length}; "
            "use a longer text or a shorter sequence length."
        )
    windows = cut[: n_windows * length].view(n_windows, length)
    return torch.cat([first.expand(n_windows, 1), windows], dim=1) if bos == "window" else windows


def calibration_samples(token_ids: torch.Tensor, n_samples: int, sequence_length: int, seed: int) -> torch.Tensor:
    """Draw windows at uniformly random starts, LongTensor [n_samples, sequence_length]; equal seeds draw equal windows.

    Raises:
        CorpusError: the text is shorter than one window.
    """
    import torch

    last_start = token_ids.numel() - sequence_length
    if last_start < 0:
        raise CorpusError(
            f"The calibration text has {token_ids.numel()} tokens, fewer than one sample of {sequence_length}."
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(last_start + 1, (n_samples, 1), generator=generator)
    return token_ids[starts + torch.arange(sequence_length)]
