"""Text corpora: where calibration and evaluation text comes from, and the papers' protocol for windows of it.

Two corpora are in every installation, source files and documentation strings of the pinned packages; WikiText-2,
C4, Pile and RedPajama go through the same functions from a hub id, a local folder or a text file. Nothing here runs
foreign code, and importing this package loads neither torch nor datasets.
"""

from rotquant.recipes.corpus import (
    BOS,
    CALIBRATION_CHARACTERS,
    DOCSTRINGS,
    MODULES,
    WIKITEXT2,
    CorpusSpec,
    Split,
    content_hash,
)
from rotquant.text.loading import check_split, corpus_identity, load_rows, load_text, split_of_file, text_files
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
    "DOCSTRINGS",
    "MODULES",
    "NO_BOS",
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
    "evaluation_windows",
    "load_rows",
    "load_text",
    "split_of_file",
    "text_files",
    "tokenize",
    "without_bos",
]
