"""Training data: the tokenizer and the encoded corpus, made once and shared by all recipes of one corpus."""

from __future__ import annotations

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
from rotquant.foundation.progress import task
from rotquant.text import content_hash, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TrainingData:
    """The encoded corpus: the tokenizer and the ids of the train and validation splits (uint16 arrays).

    The ids contain BOS where the recipe puts it before documents.

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

    from reproduction.shipped.tokenizer import encode_documents, encode_rows, train_tokenizer

    identity: dict[str, Any] = {"corpus": config.corpus.model_dump(), "vocab_size": config.vocab_size}
    if config.bos_before_documents:
        identity["bos_before_documents"] = True
    name = f"{config.corpus.name}-{short_hash(canonical_json(identity), 8)}"
    folder = Path(data_dir or cache_folder("training-data")) / name
    if not (folder / "provenance.json").is_file():
        with atomic_directory(folder) as temporary:
            rows = load_rows(config.corpus, "train")
            tokenizer = train_tokenizer(rows, config.vocab_size, config.model.max_position_embeddings)
            tokenizer.save_pretrained(temporary)
            hashes = {}
            for split in ("train", "validation"):
                split_rows = rows if split == "train" else load_rows(config.corpus, split)
                if config.bos_before_documents:
                    ids = encode_documents(split_rows, tokenizer)
                else:
                    ids = encode_rows(split_rows, config.corpus.separator, tokenizer)
                np.save(temporary / f"{split}.npy", ids)
                hashes[split] = content_hash(config.corpus.separator.join(split_rows))
            write_json(temporary / "provenance.json", {**identity, "sha256": hashes})
    return TrainingData(folder)
