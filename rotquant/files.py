"""Files that are either whole or absent: every result is written under a temporary name and renamed.

A process killed at any point leaves at most a stray `.tmp-*` entry beside an intact earlier result.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rotquant.errors import ResultError


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of the file `path`; it replaces `path` when the block ends without an exception."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling folder; it takes the place of the folder `path` when the block ends well.

    An existing folder is moved aside first and removed last, so an interruption never leaves a half-written one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{path.name}-", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".tmp-old-{path.name}-", dir=path.parent))
            path.replace(old / "was")
            temporary.replace(path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically; NaN and infinities become their names as strings."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path, what: str = "file") -> Any:
    """Read JSON, or raise `ResultError` naming the file: missing or damaged."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultError(f"{what} {path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{what} {path} is damaged ({error}); delete it and run again to recompute it.") from None


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN. Equal values have equal texts, hence equal keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def short_hash(text: str, length: int = 16) -> str:
    """The first `length` hexadecimal digits of the SHA-256 of `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: str | Path) -> str | None:
    """The first 16 hexadecimal digits of a file's SHA-256; None where there is no file."""
    path = Path(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def _finite(value: Any) -> Any:
    """Replace non-finite floats by "inf", "-inf", "nan" so that the file stays standard JSON."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
