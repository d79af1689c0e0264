"""Repairs at the start of the workflow: the lock of a killed Snakemake, and files dated in the future.

Snakemake's lock is a file, which remains when a Snakemake is killed. Snakemake compares file times, which are wrong for
a while after a clock was set back.
"""

import errno
import fcntl
import os
import shutil
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import check_output_file

#: Lock file held by every Snakemake that runs here until it ends.
RUNNING = Path(".snakemake/running.lock")
#: Folder of Snakemake's own lock: lists of the files that it works on.
LISTS = Path(".snakemake/locks")
#: Bytes that Snakemake's records of a run may need.
ROOM = 1_000_000
#: Files whose times Snakemake or `States` compare.
DATED = ("results/*.json", "results/*/*.*", "results/*/*/*.json", "reports/**/*.*", "config/**/*.yaml")
#: Nanoseconds that a file's time may be ahead of its file system's, whose clock is coarse.
AHEAD = 1_000_000_000


def begin() -> BinaryIO:
    """Repair the state that earlier starts left in the working folder; Snakemake keeps the returned file open.

    Raises:
        ResultError: there is no disk space for Snakemake's records.
    """
    check_output_file(RUNNING)
    RUNNING.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(RUNNING.parent).free
    if free < ROOM:
        raise ResultError(
            f"{RUNNING.parent.absolute()} has {free / 1e6:.2f} MB left, too little for a start: make room."
        )
    file = RUNNING.open("a+b")
    _drop_stale_lock(file)
    _redate()
    return file


def _drop_stale_lock(running: BinaryIO) -> None:
    """Remove Snakemake's lock if no Snakemake runs. The system releases the lock on `running` when a process ends.

    Without file locks this is unknown, and the user must call `snakemake --unlock`.
    """
    try:
        fcntl.lockf(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return
    else:
        for stale in LISTS.glob("*.lock"):
            stale.unlink(missing_ok=True)
    fcntl.lockf(running, fcntl.LOCK_SH)


def _redate() -> None:
    """Give files dated in the future the present time, in their order, so that they stay newer than earlier files and
    older than their future outputs."""
    times = sorted((path.stat().st_mtime_ns, path) for pattern in DATED for path in Path().glob(pattern))
    os.utime(RUNNING)
    now = RUNNING.stat().st_mtime_ns  # the file system's clock
    future = groupby((dated for dated in times if dated[0] > now + AHEAD), key=lambda dated: dated[0])
    for rank, (_, files) in enumerate(future):
        for _, path in files:
            os.utime(path, ns=(now, now + 1000 * rank))
