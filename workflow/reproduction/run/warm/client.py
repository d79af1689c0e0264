"""Ask a warm process to run a command of rotquant: client.py KIND LOG WORDS...

The process is started if it does not run, and ends with the one that ROTQUANT_ENDS_WITH numbers, else with this one.
The command's output goes to LOG; its warnings, and the last line of a failure, also to standard error. Nothing is
imported that is not needed: this is what a job costs beyond its work.
"""

import json
import os
import select
import socket
import sys
import time

#: The variable of commands that share GPUs, one each; others see all of them.
SHARED = "ROTQUANT_SHARES_GPUS"
#: Seconds in which a process that was started has to listen.
PATIENCE = 120
#: Connections of the commands that run.
_OPEN: set[socket.socket] = set()


def folder() -> str:
    """The folder of the sockets of this user's warm processes that end with the same process."""
    owner = os.environ.setdefault("ROTQUANT_ENDS_WITH", str(os.getpid()))
    return f"{os.environ.get('TMPDIR', '/tmp')}/rotquant-{os.getuid()}-{owner}"


def connected(kind: str) -> socket.socket:
    """A connection to the warm process of a kind, which is started where there is none."""
    place = f"{folder()}/{kind}"
    until = time.monotonic() + PATIENCE
    started = None
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(place)
        except OSError:
            connection.close()
        else:
            return connection
        if started is None:
            import subprocess

            words = [sys.executable, "-m", "reproduction.run.warm.server", kind]
            alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            started = subprocess.Popen(words, env=alone, stdin=subprocess.DEVNULL, start_new_session=True)
        if started.poll() not in (None, 0) or time.monotonic() > until:  # 0: another one listens already
            sys.exit("rotquant: the process that jobs are forked from did not start.")
        select.select((), (), (), 0.05)  # time.sleep fails where libfaketime shows another clock


def run(kind: str, log: str, words: list[str], shown: bool = True) -> int:
    """Run a command; its exit status. shown: whether its warnings and failure are printed."""
    os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
    connection = connected(kind)
    asked = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), output.fileno(), output.fileno()]
        _OPEN.add(connection)
        try:
            socket.send_fds(connection, [len(asked).to_bytes(8, "big")], streams)
            connection.sendall(asked)
            status = int(connection.recv(8) or b"1")
        except OSError:  # the warm process was ended
            status = 1
        _OPEN.discard(connection)
        connection.close()
    if shown:
        _show(log, words, status)
    return status


def end() -> None:
    """End the commands that run."""
    for connection in [*_OPEN]:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has just ended
            continue


def _show(log: str, words: list[str], status: int) -> None:
    with open(log, encoding="utf-8", errors="replace") as said:
        lines = said.read().splitlines()
    if status and not os.statvfs(log).f_bavail:
        lines = [f"rotquant: No space left on device for {log}."]
    elif status and not lines:
        lines = [f"rotquant: {' '.join(words)} ended with status {status} and left no message."]
    for line in lines[-1:] if status else (line for line in lines if line.startswith("warning: ")):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
