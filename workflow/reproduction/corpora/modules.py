"""The corpus `modules`: whole source files of the installed packages of requirements.lock, one row each.

Long documents with names that are defined here and used there, read where they are installed and never copied. A file
that nearly equals one of a split that goes first is left out: what is tested was not trained on.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reproduction.corpora.packages import PACKAGES, cached, earlier, package_files
from rotquant.foundation.progress import track
from rotquant.recipes.corpus import Split

if TYPE_CHECKING:
    import numpy as np

SELECTION_VERSION = 1
"""Raised when the rules below change, so that no stale cache file is read."""

SIZES = (3_000, 200_000)
"""Shortest and longest files in characters: shorter files hold little text, longer ones are tables."""

NEAR_DUPLICATE = 0.5
"""Least share of common shingles (Jaccard) at which two files count as one; estimated to about 0.04."""

_SHINGLE = 5
_PERMUTATIONS = 128
_WORD = re.compile(r"\w+")


def module_rows(split: Split, cache: str | Path, max_characters: int | None = None) -> list[str]:
    """Return the source files of one split in the order of a hash of their names, or its head.

    The list of these files is saved under `cache`; the files themselves are read where they are installed.

    Raises:
        CorpusError: none of the split's packages is installed.
    """
    names = module_names(split, cache, max_characters)
    installed = dict(package_files(PACKAGES[split]))
    return [_read(installed[name]) for name in names]


def module_names(split: Split, cache: str | Path, max_characters: int | None = None) -> list[str]:
    """The names inside site-packages of the files of a split; raises as `module_rows` does."""
    rules = (SELECTION_VERSION, SIZES, NEAR_DUPLICATE, max_characters)
    return cached("modules", split, cache, rules, lambda: _select(split, cache, max_characters))


def _select(split: Split, cache: str | Path, max_characters: int | None) -> Iterator[str]:
    """The files of the split that are new: none is near a file of an earlier split, or a copy of one of its own."""
    import numpy as np

    known = [signature(text) for before in earlier(split) for text in module_rows(before, cache)]
    others = np.stack(known) if known else np.zeros((0, _PERMUTATIONS), dtype=np.uint64)
    seen: set[str] = set()
    characters = 0
    for name, path in track(package_files(PACKAGES[split]), f"comparing source files ({split})", "file"):
        text = _read(path)
        if not SIZES[0] <= len(text) <= SIZES[1] or text in seen:
            continue
        if len(others) and (others == signature(text)).mean(axis=1).max() >= NEAR_DUPLICATE:
            continue
        seen.add(text)
        characters += len(text)
        yield name
        if max_characters is not None and characters >= max_characters:
            return


def signature(text: str) -> "np.ndarray":
    """A text's MinHash over shingles of five words, uint64 [128] (Broder 1997); the share of equal entries of two
    estimates the share of their common shingles."""
    from datasketch import MinHash

    words = _WORD.findall(text)
    shingles = {" ".join(words[start : start + _SHINGLE]) for start in range(max(1, len(words) - _SHINGLE + 1))}
    sketch = MinHash(num_perm=_PERMUTATIONS, seed=1)
    sketch.update_batch([shingle.encode() for shingle in shingles])
    return sketch.hashvalues


def _read(path: Path) -> str:
    """A file's text with its ends of lines as \\n; empty for what is no UTF-8 or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
