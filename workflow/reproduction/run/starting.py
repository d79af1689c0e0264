"""What a start of the workflow sets right: the lock of a Snakemake that was killed, and files dated in the future.

Snakemake's lock is a file, which stays where a Snakemake was killed; and its question is whether a file is newer than
another, which a clock that was set back answers wrongly for as long as it was set back.
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

#: Held by every Snakemake that runs here, for as long as it lives.
RUNNING = Path(".snakemake/running.lock")
#: Where Snakemake keeps its own lock: lists of the files that it works on.
LISTS = Path(".snakemake/locks")
#: Bytes that Snakemake's records of a run may take.
ROOM = 1_000_000
#: Files whose times Snakemake or `States` compare.
DATED = ("results/*.json", "results/*/*.*", "results/*/*/*.json", "reports/**/*.*", "config/**/*.yaml")
#: Nanoseconds that a file's time may be ahead of its file system's: clocks of times are coarse.
AHEAD = 1_000_000_000


def begin() -> BinaryIO:
    """Set right what earlier starts left in the working folder; the file returned is to be kept open by Snakemake.

    Raises:
        ResultError: there is no place for Snakemake's records.
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
    """Remove Snakemake's lock where no Snakemake runs. The system drops the lock on `running` when a process ends.

    Where a file system has no locks nothing is known, and `snakemake --unlock` is the user's to say.
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
    """Give files of the future the present time, in their order: so they stay newer than all before them, and what is
    made from them will be newer still."""
    times = sorted((path.stat().st_mtime_ns, path) for pattern in DATED for path in Path().glob(pattern))
    os.utime(RUNNING)
    now = RUNNING.stat().st_mtime_ns  # by the clock of the file system
    future = groupby((dated for dated in times if dated[0] > now + AHEAD), key=lambda dated: dated[0])
    for rank, (_, files) in enumerate(future):
        for _, path in files:
            os.utime(path, ns=(now, now + 1000 * rank))
