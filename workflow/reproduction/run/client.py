"""Ask a warm process (`run.server`) to run a command of rotquant: client.py KIND LOG WORDS...

The process is started if it does not run, and ends with the one that ROTQUANT_ENDS_WITH numbers, else with this one.
The command's output goes to LOG; its warnings, and the last line of a failure, also to standard error. Nothing is
imported that is not needed, not even `socket`: this is what a job costs beyond its work.
"""

import os
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SHUT_RDWR, SO_PEERCRED, SOL_SOCKET, socket

#: The variable of commands that share GPUs, one each; others see all of them.
SHARED = "ROTQUANT_SHARES_GPUS"
#: The process with which a warm process ends.
OWNER = "ROTQUANT_ENDS_WITH"
#: Connections of the commands that run.
_OPEN: set[socket] = set()


def name(kind: str) -> bytes:
    """The abstract address of this user's warm process of a kind that ends with the same process: no file is left.

    Containers may share a network and count processes alike, so their file systems are told apart.
    """
    owner = os.environ.setdefault(OWNER, str(os.getpid()))
    return f"\0rotquant-{os.getuid()}-{owner}-{os.stat('/proc/self/ns/mnt').st_ino}-{kind}".encode()


def is_ours(connection: socket) -> bool:
    """Whether the process at the other end is of this user."""
    credentials = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def connected(kind: str) -> socket:
    """A connection to the warm process of a kind, which is started where there is none and answers once it is ready."""
    while True:
        connection = socket(AF_UNIX)
        try:
            connection.connect(name(kind))
        except ConnectionRefusedError:
            connection.close()
            _start(kind)
            continue
        if is_ours(connection):
            return connection
        sys.exit("rotquant: the process that jobs are forked from belongs to somebody else.")


def _start(kind: str) -> None:
    """Start a warm process with a socket that listens already, unless another client just does."""
    import subprocess

    listening = socket(AF_UNIX)
    try:
        listening.bind(name(kind))
    except OSError:
        listening.close()
        return
    listening.listen(256)
    words = [sys.executable, "-m", "reproduction.run.server", kind, str(listening.fileno())]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    given = {"pass_fds": [listening.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
    subprocess.Popen(words, env=alone, **given)
    listening.close()


def run(kind: str, log: str, words: list[str], shown: bool = True) -> int:
    """Run a command; its exit status. shown: whether its warnings and failure are printed."""
    os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
    connection = connected(kind)
    lines = [os.fsencode(word) for word in (os.getcwd(), str(len(words)), *words)]
    asked = b"\0".join([*lines, *(b"=".join(one) for one in os.environb.items())])
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:
        streams = b"".join(one.fileno().to_bytes(4, sys.byteorder) for one in (nothing, output, output))
        _OPEN.add(connection)
        try:
            connection.sendmsg([len(asked).to_bytes(8, "big")], [(SOL_SOCKET, SCM_RIGHTS, streams)])
            connection.sendall(asked)
            answer = connection.recv(8)
        except OSError:
            answer = b""
        _OPEN.discard(connection)
        connection.close()
    status = int(answer or b"1")
    if shown:
        _show(log, words, status if answer else None)
    return status


def end() -> None:
    """End the commands that run."""
    for connection in [*_OPEN]:
        try:
            connection.shutdown(SHUT_RDWR)
        except OSError:  # it has just ended
            continue


def said_in(log: str) -> list[str]:
    """The lines of a log but empty ones, with which messages of CUDA end."""
    with open(log, encoding="utf-8", errors="replace") as said:
        return [line for line in said.read().splitlines() if line.strip()]


def _show(log: str, words: list[str], status: int | None) -> None:
    """Print warnings, or the last line of a failure. status: None where the warm process was ended."""
    lines = said_in(log)
    if status != 0 and not os.statvfs(log).f_bavail:
        lines = [f"rotquant: No space left on device for {log}."]
    elif status is None and not lines:
        lines = ["rotquant: the process that jobs are forked from has ended."]
    elif status and not lines:
        lines = [f"rotquant: {' '.join(words)} ended with status {status} and left no message."]
    for line in lines[-1:] if status != 0 else (line for line in lines if line.startswith("warning: ")):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
