"""The corpus `docstrings`: documentation strings of the installed packages of requirements.lock, extracted with `ast`.

Real English prose that every installation has, so no download and no copy in the repository. Modules are never
imported, only parsed.
"""

import ast
import hashlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path

from reproduction.corpora.packages import PACKAGES, cached, earlier, package_files
from rotquant.foundation.progress import task
from rotquant.recipes.corpus import Split

EXTRACTION_VERSION = 1
"""Raised when the rules below change, so that no stale cache file is read."""

MINIMUM_CHARACTERS = 40
"""Shorter documentation strings ("Return the name.") are labels, not prose."""


def docstring_rows(split: Split, cache: str | Path, max_characters: int | None = None) -> list[str]:
    """Return the documentation strings of one split, read from a file under `cache` when the same packages made it.

    Files come in the order of a hash of their names, strings in source order, so that the head of a split (up to
    `max_characters`) is a fair sample of it and is found without parsing the rest.

    Raises:
        CorpusError: none of the split's packages is installed.
    """
    rules = (EXTRACTION_VERSION, MINIMUM_CHARACTERS, max_characters)
    return cached("docstrings", split, cache, rules, lambda: _extract(split, cache, max_characters))


def _extract(split: Split, cache: str | Path, max_characters: int | None) -> list[str]:
    """Parse the split's files in order, leaving out texts seen before here or in a split that goes first."""
    seen: set[bytes] = set()
    for before in earlier(split):
        seen.update(_digest(row) for row in docstring_rows(before, cache))
    rows: list[str] = []
    characters = 0
    files = package_files(PACKAGES[split])
    # How many files a head of the split takes is not known before they are read.
    total = len(files) if max_characters is None else None
    with task(f"reading documentation strings ({split})", "file", total) as under_way:
        for _, path in files:
            for row in file_docstrings(path):
                digest = _digest(row)
                if len(row) < MINIMUM_CHARACTERS or digest in seen:
                    continue
                seen.add(digest)
                rows.append(row)
                characters += len(row)
                if max_characters is not None and characters >= max_characters:
                    return rows
            under_way.advance()
    return rows


def _digest(row: str) -> bytes:
    """Equal for texts that differ in white space and case only, so that re-wrapped copies count as duplicates."""
    return hashlib.sha256(" ".join(row.split()).lower().encode("utf-8", errors="surrogatepass")).digest()


def file_docstrings(path: Path) -> Iterator[str]:
    """Yield the documentation strings of one source file in source order, dedented; nothing if it cannot be parsed."""
    try:
        source = path.read_bytes()
    except OSError:
        return
    if b'"""' not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in other people's files are not ours to report.
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # Templates, or syntax newer than this interpreter.
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text).strip()
        body = getattr(node, "body", None)
        if isinstance(body, list):
            pending.extend(reversed(body))
