"""Text corpora: where calibration and evaluation text comes from, and the papers' protocol for windows of it.

WikiText-2, C4, Pile and RedPajama go through the same functions from a hub id, a local folder or a text file. Nothing
here runs foreign code, and importing this package loads neither torch nor datasets.
"""

from rotquant.recipes.corpus import (
    BOS,
    CALIBRATION_CHARACTERS,
    WIKITEXT2,
    CorpusSpec,
    Split,
    content_hash,
)
from rotquant.text.loading import (
    UNREAD,
    check_split,
    corpus_identity,
    corpus_spec,
    load_rows,
    load_text,
    split_of_file,
    text_digest,
)
from rotquant.text.windows import (
    NO_BOS,
    Tokens,
    adds_bos,
    bos_of,
    calibration_samples,
    evaluation_windows,
    tokenize,
    without_bos,
)

__all__ = [
    "BOS",
    "CALIBRATION_CHARACTERS",
    "NO_BOS",
    "UNREAD",
    "WIKITEXT2",
    "CorpusSpec",
    "Split",
    "Tokens",
    "adds_bos",
    "bos_of",
    "calibration_samples",
    "check_split",
    "content_hash",
    "corpus_identity",
    "corpus_spec",
    "evaluation_windows",
    "load_rows",
    "load_text",
    "split_of_file",
    "text_digest",
    "tokenize",
    "without_bos",
]
