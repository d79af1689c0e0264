"""Text as token ids for the computing stages, tokenized once per text and tokenizer and stored in the project.

Tokenizing takes seconds, about as long as evaluating a small model, and all jobs of a table need the same two texts.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reproduction.corpora import INSTALLED, Corpus
from reproduction.corpora.digests import refuse_other_text
from reproduction.identity.run import Run, named
from reproduction.reading.arrays import read_array
from rotquant.foundation.files import atomic_path
from rotquant.recipes.schemes import Calibration
from rotquant.text import (
    NO_BOS,
    CorpusSpec,
    Split,
    Tokens,
    bos_of,
    calibration_samples,
    content_hash,
    corpus_identity,
    load_text,
    tokenize,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

#: Folder of a project's token ids.
TOKENS = Path("results") / "corpora" / "tokens"
#: Recorded content hashes of the corpora that are read from installed packages, whose text depends on the version.
EXPECTED_HASHES = Path(__file__).parents[3] / "resources" / "models" / "corpus.json"


def expected_hashes(spec: CorpusSpec) -> dict[str, str]:
    """The recorded content hashes of a corpus from installed packages, by portion; empty for other corpora."""
    if spec.source not in INSTALLED or not EXPECTED_HASHES.is_file():
        return {}
    return json.loads(EXPECTED_HASHES.read_text(encoding="utf-8")).get(spec.source, {}).get("sha256", {})


def token_ids(
    spec: Corpus,
    split: Split,
    tokenizer: "PreTrainedTokenizerBase",
    max_characters: int | None = None,
    planned: str | None = None,
) -> tuple[Tokens, dict[str, Any]]:
    """The tokens of one split (or of its beginning), and the text's provenance.

    Args:
        planned: the digest of the planned text, if any.

    Raises:
        CorpusError: the text cannot be read, or is not the planned one.
    """
    text = load_text(spec, split, max_characters=max_characters)
    refuse_other_text(spec, split, max_characters, text, planned)
    tokens, identity = _tokens(spec, split, tokenizer, max_characters, text)
    return tokens, {**identity, "ids": hashlib.sha256(tokens.ids.numpy().tobytes()).hexdigest()[:16]}


def _tokens(
    spec: Corpus, split: Split, tokenizer: "PreTrainedTokenizerBase", max_characters: int | None, text: str
) -> tuple[Tokens, dict[str, Any]]:
    """The tokens of a text, cached by everything that decides them, and the text's provenance."""
    import torch

    identity = corpus_identity(spec, (split,), max_characters=max_characters, texts={split: text})
    for name, entry in identity["splits"].items():
        if "packages" in entry:
            entry["expected_sha256"] = expected_hashes(spec).get(name)
    if tokenizer.bos_token_id is None:
        identity["note"] = NO_BOS
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python has no complete description to tell it from others
        return tokenize(text, tokenizer), identity
    description = f"{content_hash(text)} {backend.to_str()}"
    path = TOKENS / f"{hashlib.sha256(description.encode()).hexdigest()[:32]}.npy"
    try:
        return Tokens(torch.from_numpy(read_array(path, "int64")), bos_of(tokenizer)), identity
    except (OSError, ValueError):  # missing or damaged: make it
        tokens = tokenize(text, tokenizer)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, tokens.ids.numpy(), allow_pickle=False)
    return tokens, identity


def text_samples(
    run: Run, calibration: Calibration, tokenizer: "PreTrainedTokenizerBase"
) -> tuple["torch.Tensor", dict[str, Any]]:
    """Samples of a corpus's train split, int64 [samples, sequence_length], and the text's provenance.

    Args:
        run: whose seed draws them.

    Raises:
        CorpusError: the text cannot be read, is shorter than one sample, or is not the planned one.
    """
    corpus, characters = calibration.corpus, calibration.characters
    planned = run.texts.get(named(corpus, "train", characters))
    tokens, identity = token_ids(run.corpora[corpus], "train", tokenizer, characters, planned)
    return calibration_samples(tokens, calibration, run.seed), identity
