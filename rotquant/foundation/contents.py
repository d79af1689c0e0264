"""Digests of files by their content, which cost nothing the second time.

A digest is saved in the user's cache for as long as path, size, inode and times of change are the same. Files are
hashed in parallel, with progress.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

from rotquant.foundation.files import cache_folder, canonical_json, short_hash, write_text
from rotquant.foundation.progress import task

#: Smaller files are hashed each time: looking up what is kept takes as long.
_KEPT_BYTES = 1_000_000
#: Less than this is hashed too soon to speak of it.
_SHOWN_BYTES = 500_000_000
#: Seconds within which a file may change again and show the same time.
_SETTLED = 2.0


def stamp(path: str | Path) -> list[object] | None:
    """Metadata that tell a changed file from an unchanged one without reading it; None where there is none.

    The time at which its entry changed is part of it, which a program that sets back the other time cannot set.
    """
    try:
        entry = os.stat(path)
    except OSError:
        return None
    return [entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns, entry.st_ino]


def content_digest(path: str | Path) -> str:
    """SHA-256 of a file's content, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    place = Path(path).resolve()
    before = stamp(place)
    large = before is not None and place.stat().st_size >= _KEPT_BYTES
    stored = cache_folder("contents") / short_hash(str(place), 32) if large else None
    entry = canonical_json([str(place), before])
    if stored is not None:
        with suppress(OSError, ValueError):
            known, digest = stored.read_text(encoding="utf-8").split("\n")
            if known == entry and len(digest) == 64:
                return digest
    with place.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    settled = time.time() - place.stat().st_mtime > _SETTLED
    if stored is not None and settled and stamp(place) == before:
        with suppress(OSError):
            write_text(stored, f"{entry}\n{digest}")
    return digest


def content_digests(paths: Iterable[Path], what: str) -> dict[Path, str]:
    """`content_digest` of several files, in parallel; `what` names them where progress is shown."""
    files = list(dict.fromkeys(paths))
    long = sum(path.stat().st_size for path in files if path.is_file()) > _SHOWN_BYTES
    shown = task(f"checking the content of {what}", "file", len(files)) if long else nullcontext()
    with shown as under_way, ThreadPoolExecutor() as threads:
        found = {}
        for path, digest in zip(files, threads.map(content_digest, files), strict=True):
            found[path] = digest
            if under_way is not None:
                under_way.advance()
    return found
