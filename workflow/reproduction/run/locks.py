"""Locks of results: only one of several processes of a project computes a result.

A lock is on one byte of a file, at an offset from the result's key. The system releases it when the process ends in any
way. On a file system without locks every lock is granted, and a result may be computed twice.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import short_hash

LOCKS = Path("results/units.lock")


@contextmanager
def locked(keys: Sequence[str]) -> Iterator[bool]:
    """Lock results by their keys, all or none, while the block runs; yield whether they were free.

    A process may have one such block at a time: closing the file releases all of its locks.

    Raises:
        ResultError: the file cannot be written.
    """
    try:
        LOCKS.parent.mkdir(parents=True, exist_ok=True)
        file = LOCKS.open("ab")
    except OSError as error:
        raise ResultError(f"{LOCKS.absolute()} cannot be written: {error.strerror}.") from None
    with file:
        yield all(_lock(file.fileno(), key) for key in sorted(keys))


def _lock(file: int, key: str) -> bool:
    place = int(short_hash(key, 15), 16)  # below the largest offset, 2^63
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place, os.SEEK_SET)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
