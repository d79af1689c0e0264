"""Training data: the tokenizer and the encoded corpus, made once and shared by all recipes of one corpus.

The tokenizer is a byte-level BPE, trained only on the train split. Training is deterministic, so the same text gives
the same `tokenizer.json`. The tokenizer itself adds the BOS, as Llama's does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.reading.arrays import read_array
from reproduction.shipped.recipe import TrainingConfig
from rotquant.foundation.errors import ResultError, RotquantError
from rotquant.foundation.files import (
    atomic_directory,
    cache_folder,
    canonical_json,
    read_object,
    short_hash,
    write_json,
)
from rotquant.foundation.progress import task, track
from rotquant.text import content_hash, load_rows

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"
#: Characters of text that the tokenizer learns from; more text does not change the frequent pairs.
TRAINED_ON = 40_000_000
#: Documents encoded at once: enough for all cores, few enough for short steps of the progress bar.
_BATCH = 64


class TrainingData:
    """The encoded corpus: the tokenizer and the ids of the train and validation splits (uint16 arrays).

    The ids contain a BOS before each document.

    Raises:
        ResultError: the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        try:
            self.tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
            self.train = read_array(folder / "train.npy", "uint16")
            self.validation = read_array(folder / "validation.npy", "uint16")
        except RotquantError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
            said = " ".join(str(error).split())[:200]
            raise ResultError(f"the training data in {folder} is damaged ({said}); delete the folder.") from None
        self.provenance = read_object(folder / "provenance.json", "record of training data")


@task("preparing the corpus")
def prepare_data(config: TrainingConfig, data_dir: str | Path | None = None) -> TrainingData:
    """Train the tokenizer and encode the corpus, or read an earlier result in `data_dir` (default: the user's cache).

    All recipes of one corpus and vocabulary share one folder, hence one tokenizer.
    """
    import numpy as np

    identity: dict[str, Any] = {
        "corpus": config.corpus.model_dump(),
        "vocab_size": config.vocab_size,
        "bos_before_documents": True,
    }
    name = f"{config.corpus.name}-{short_hash(canonical_json(identity), 8)}"
    folder = Path(data_dir or cache_folder("training-data")) / name
    if not (folder / "provenance.json").is_file():
        with atomic_directory(folder) as temporary:
            rows = load_rows(config.corpus, "train")
            tokenizer = _train_tokenizer(rows, config.vocab_size, config.model.max_position_embeddings)
            tokenizer.save_pretrained(temporary)
            hashes = {}
            for split in ("train", "validation"):
                split_rows = rows if split == "train" else load_rows(config.corpus, split)
                np.save(temporary / f"{split}.npy", _encode(split_rows, tokenizer))
                hashes[split] = content_hash(config.corpus.separator.join(split_rows))
            write_json(temporary / "provenance.json", {**identity, "sha256": hashes})
    return TrainingData(folder)


def _train_tokenizer(rows: Sequence[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
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


def _encode(rows: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
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
