"""The shipped models' tokenizer: byte-level BPE with a BOS token, trained only on the train split.

Training is deterministic, so the same text gives the same `tokenizer.json`. The tokenizer itself adds the BOS, as
Llama's does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rotquant.foundation.progress import track

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"
CHUNK_CHARACTERS = 1_000_000
TRAINED_ON = 40_000_000
"""Characters of text that the tokenizer learns from; more text does not change the frequent pairs."""

_BATCH = 64
"""Documents encoded at once: enough for all cores, few enough for short steps of the progress bar."""


def train_tokenizer(rows: Sequence[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` entries (BOS has id 0, EOS id 1); encoding is lossless.

    Args:
        rows: the training texts.
        vocab_size: entries, including the two special tokens and the 256 bytes, so more than 258.
        max_length: the model's longest sequence, recorded in the tokenizer's configuration.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_head(rows), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        add_bos_token=True,
    )


def _head(rows: Sequence[str]) -> list[str]:
    """The first rows, up to the number of characters that the tokenizer learns from."""
    ends = itertools.accumulate(map(len, rows), initial=0)
    return [row for row, end in zip(rows, ends, strict=False) if end < TRAINED_ON]


def encode_documents(rows: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the ids of the rows, each after a BOS, uint16 [n]; a "<s>" that a row writes out is text."""
    import numpy as np

    tokens = tokenizer.backend_tokenizer
    tokens.encode_special_tokens = True
    bos = np.array([tokenizer.bos_token_id], dtype=np.uint16)
    pieces: list[np.ndarray] = []
    for start in track(range(0, len(rows), _BATCH), "encoding", "batch"):
        for encoded in tokens.encode_batch_fast(list(rows[start : start + _BATCH]), add_special_tokens=False):
            pieces += [bos, np.asarray(encoded.ids, dtype=np.uint16)]
    tokens.encode_special_tokens = False
    return np.concatenate(pieces)


def encode_rows(rows: Iterable[str], separator: str, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the ids of the rows joined by `separator`, uint16 [n], without BOS.

    The text is encoded in pieces of about a million characters to bound memory; only merges across pieces can differ
    from encoding the whole text at once.
    """
    import numpy as np

    pieces: list[np.ndarray] = []
    pending: list[str] = []
    characters = 0
    for row in rows:
        pending.append(row)
        characters += len(row)
        if characters >= CHUNK_CHARACTERS:
            pieces.append(_encode(separator.join(pending) + separator, tokenizer))
            pending, characters = [], 0
    if pending:
        pieces.append(_encode(separator.join(pending), tokenizer))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint16)


def _encode(text: str, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    import numpy as np

    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.uint16)
