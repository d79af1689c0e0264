"""Token windows of a text by the protocol that the papers share (GPTQ's, used by QuaRot, SpinQuant and PrefixQuant).

The whole text is tokenized at once with one BOS at its head; evaluation windows do not overlap and the tail is dropped;
calibration samples are windows at random places. A tokenizer that has no BOS (Qwen2's) puts none there, as in the
papers' codes, which take what their tokenizer gives. Nothing here touches global random state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from rotquant.foundation.errors import CorpusError
from rotquant.foundation.progress import task
from rotquant.recipes.corpus import CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rotquant.recipes.schemes import Calibration

BOS = Literal["text", "window", "none"]

#: What results say where a BOS was asked for and the tokenizer has none.
NO_BOS = "no BOS: the tokenizer has none"


@dataclass(frozen=True)
class Tokens:
    """A text as token ids.

    ids: int64 [n], of the text alone.
    bos: the id that begins texts, None where the tokenizer has none.
    """

    ids: torch.Tensor
    bos: int | None = None

    @property
    def whole(self) -> torch.Tensor:
        """The text with one BOS at its head, int64 [n + 1]; without, [n], where the tokenizer has none."""
        import torch

        return self.ids if self.bos is None else torch.cat([self.ids.new_tensor([self.bos]), self.ids])


@task("tokenizing")
def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of a text, without those that the tokenizer has a habit of adding.

    Raises:
        CorpusError: the tokenizer cannot read it.
    """
    import torch

    try:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # the tokenizers library raises bare Exception, as for a text that has no token
        raise CorpusError(f"The tokenizer cannot read the text: {str(error).strip()}.") from None
    return Tokens(torch.tensor(ids, dtype=torch.long), bos_of(tokenizer))


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that a text begins with, or None where the tokenizer has none."""
    return cast("int | None", tokenizer.bos_token_id)


def evaluation_windows(tokens: Tokens, sequence_length: int, bos: BOS = "text") -> torch.Tensor:
    """Cut a text into windows without overlap, int64 [windows, sequence_length], dropping the tail.

    Args:
        bos: `text` puts one BOS at the head of the text, hence of the first window alone (the papers' codes), and none
            where the tokenizer has none; `window` begins every window with it, followed by one token less of text;
            `none` puts none.

    Raises:
        CorpusError: the text is shorter than one window, or the tokenizer has no BOS for each.
    """
    import torch

    if bos == "window" and tokens.bos is None:
        raise CorpusError("The tokenizer has no BOS to put at the head of each window; set the metric's bos to text.")
    cut, length = tokens.whole if bos == "text" else tokens.ids, sequence_length - (bos == "window")
    n_windows = cut.numel() // length
    if n_windows == 0:
        raise CorpusError(
            f"The text has {cut.numel()} tokens, fewer than one window of {sequence_length}; "
            "use a longer text or a shorter sequence length."
        )
    windows = cut[: n_windows * length].view(n_windows, length)
    if bos != "window":
        return windows
    return torch.cat([windows.new_full((n_windows, 1), cast(int, tokens.bos)), windows], dim=1)


def calibration_samples(tokens: Tokens, calibration: Calibration, seed: int = 0) -> torch.Tensor:
    """Draw windows at uniformly random starts, int64 [samples, sequence_length]; equal seeds draw equal windows.

    Args:
        seed: the run's, which the calibration's own is added to.

    Raises:
        CorpusError: the text is shorter than one window, or has fewer places for one than samples are asked for.
    """
    import torch

    ids, length = tokens.whole, calibration.sequence_length
    last_start = ids.numel() - length
    if last_start < 0:
        raise CorpusError(
            f"The calibration text has {ids.numel()} tokens, fewer than one sample of {length}: give some "
            f"{CHARACTERS_PER_TOKEN * length:,} characters at least, better a hundred times as many, or a shorter "
            "sequence length."
        )
    if calibration.samples > last_start + 1:
        raise CorpusError(
            f"The calibration text has {ids.numel():,} tokens, in which {last_start + 1:,} samples of {length} begin, "
            f"fewer than the {calibration.samples:,} that are asked for: give more text or ask for fewer samples."
        )
    generator = torch.Generator().manual_seed(calibration.seed + seed)
    starts = torch.randint(last_start + 1, (calibration.samples, 1), generator=generator)
    return ids[starts + torch.arange(length)]
