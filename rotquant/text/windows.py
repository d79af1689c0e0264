"""Token windows of a text by the protocol that the papers share (GPTQ's, used by QuaRot, SpinQuant and PrefixQuant).

The whole text is tokenized at once; evaluation windows do not overlap and the tail is dropped; calibration samples are
windows at random places. Where BOS stands is one setting (`BOS`), which is applied here alone: `text` puts one at the
head of the whole text, as the papers do, and none where a tokenizer has none (Qwen2's), as in the papers' codes, which
take what their tokenizer gives. A text or window that begins with BOS gets no second one. Nothing here touches global
random state.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rotquant.foundation.errors import CorpusError
from rotquant.foundation.progress import task
from rotquant.recipes.corpus import BOS, CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rotquant.recipes.schemes import Calibration

#: What makes a chat template write no BOS.
_NO_BOS = "{%- set bos_token = '' -%}"

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
        """The text with one BOS at its head, int64 [n + 1]; [n] where it begins with one or the tokenizer has none."""
        import torch

        headed = self.bos is None or bool((self.ids[:1] == self.bos).any())
        return self.ids if headed else torch.cat([self.ids.new_tensor([cast(int, self.bos)]), self.ids])

    def read(self, bos: BOS) -> torch.Tensor:
        """The token ids that windows are cut from, int64 [n]: with BOS at the head of the text alone, or without."""
        return self.whole if bos == "text" else self.ids

    def check(self, bos: BOS) -> None:
        """Raise `CorpusError` where each window is to begin with BOS and the tokenizer has none."""
        if bos == "window" and self.bos is None:
            raise CorpusError("The tokenizer has no BOS to put at the head of each window: set bos to text.")


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


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself begins a text with BOS, as it is called by default."""
    bos = bos_of(tokenizer)
    return bos is not None and list(cast("list[int]", tokenizer("a", verbose=False)["input_ids"]))[:1] == [bos]


def without_bos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that begins neither texts nor chats with BOS: for a model whose prefix holds one."""
    found: Any = copy.deepcopy(tokenizer)
    found.add_bos_token = False
    templates = found.chat_template
    if isinstance(templates, str):
        found.chat_template = _NO_BOS + templates
    elif templates:
        found.chat_template = {name: _NO_BOS + template for name, template in templates.items()}
    return found


def evaluation_windows(tokens: Tokens, sequence_length: int, bos: BOS = "text") -> torch.Tensor:
    """Cut a text into windows without overlap, int64 [windows, sequence_length], dropping the tail.

    Args:
        bos: `text` puts one BOS at the head of the text, hence of the first window alone (the papers' codes), and none
            where the tokenizer has none; `window` begins every window with it, followed by one token less of text;
            `none` puts none. A window whose text begins with BOS has one token of text more in its place.

    Raises:
        CorpusError: the text is shorter than one window, or the tokenizer has no BOS for each.
    """
    import torch

    tokens.check(bos)
    cut, length = tokens.read(bos), sequence_length - (bos == "window")
    n_windows = cut.numel() // length
    if n_windows == 0:
        raise CorpusError(
            f"The text has {cut.numel()} tokens, fewer than one window of {sequence_length}; "
            "use a longer text or a shorter sequence length."
        )
    if bos == "window":
        return _headed(tokens, torch.arange(n_windows) * length, sequence_length)
    return cut[: n_windows * length].view(n_windows, length)


def calibration_samples(tokens: Tokens, calibration: Calibration, seed: int = 0) -> torch.Tensor:
    """Draw windows at uniformly random starts, int64 [samples, sequence_length]; equal seeds draw equal windows.

    Args:
        seed: the run's, which the calibration's own is added to.

    Raises:
        CorpusError: the text is shorter than one window, has fewer places for one than samples are asked for, or the
            tokenizer has no BOS for each.
    """
    import torch

    tokens.check(calibration.bos)
    ids, length = tokens.read(calibration.bos), calibration.sequence_length
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
    if calibration.bos == "window":
        return _headed(tokens, starts[:, 0], length)
    return ids[starts + torch.arange(length)]


def _headed(tokens: Tokens, starts: torch.Tensor, sequence_length: int) -> torch.Tensor:
    """Windows of a text that begin with BOS, int64 [windows, sequence_length], from these places on, int64 [windows].

    BOS stands before the place, or where the text has one there, it is that; the window at the text's end then has the
    token before.
    """
    import torch

    first = (starts + (tokens.ids[starts] == tokens.bos)).clamp(max=tokens.ids.numel() - sequence_length + 1)
    windows = tokens.ids[first[:, None] + torch.arange(sequence_length - 1)]
    return torch.cat([windows.new_full((len(windows), 1), cast(int, tokens.bos)), windows], dim=1)
