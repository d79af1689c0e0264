"""The warm process: a child for each command that a client asks for, forked from imports that are loaded once.

It waits for events in one thread, so that a fork copies no lock that another holds. Where a machine has several GPUs a
child sees the one that fewest children use. A child is killed when its client has gone, and all of them, with this
process, when the one that ROTQUANT_ENDS_WITH numbers has ended.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reproduction.run.stages.states import VARIABLE
from reproduction.run.warm.client import SHARED, folder
from reproduction.run.workers import VISIBLE, visible_gpus
from rotquant.cli import app, tree

#: What each kind of process imports before it forks.
PRELOADED = {"cells": ("reproduction.run.stages.loaded",), "pages": ("reproduction.commands.preloaded",)}
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass
class _Child:
    """A running command: its process, a file that is readable when it has ended, its client, and its GPU."""

    process: int
    ended: int
    client: socket.socket
    gpu: str | None


class Server:
    """A listening socket and the running children."""

    def __init__(self, listening: socket.socket, owner: int | None) -> None:
        self.listening, self.children = listening, list[_Child]()
        self.gpus = visible_gpus()
        self.events = selectors.DefaultSelector()
        self.events.register(listening, selectors.EVENT_READ, self._accept)
        if owner is not None:
            self.events.register(os.pidfd_open(owner), selectors.EVENT_READ, self._end)

    def serve(self) -> None:
        """Answer until the owner has ended."""
        while True:
            for key, _ in self.events.select():
                key.data()

    def _accept(self) -> None:
        client, _ = self.listening.accept()
        try:
            length, streams, _, _ = socket.recv_fds(client, 8, 3)
            with client.makefile("rb") as rest:
                words, environment, place = json.loads(rest.read(int.from_bytes(length, "big")))
        except (OSError, ValueError, TypeError):  # it has gone, or is none of ours
            client.close()
            return
        used = Counter(child.gpu for child in self.children)
        shared = SHARED in environment and len(self.gpus) > 1
        gpu = min(self.gpus, key=lambda one: used[one]) if shared else None
        process = os.fork()
        if process == 0:
            self.listening.close()
            self.events.close()
            own = {VARIABLE: os.environ[VARIABLE]} | ({} if gpu is None else {VISIBLE: gpu})
            _run(words, environment | own, place, streams)
        with suppress(OSError):  # here too, since its client may go before it does so itself
            os.setpgid(process, process)
        for stream in streams:
            os.close(stream)
        child = _Child(process, os.pidfd_open(process), client, gpu)
        self.children.append(child)
        self.events.register(child.ended, selectors.EVENT_READ, lambda: self._ended(child))
        self.events.register(client, selectors.EVENT_READ, lambda: self._gone(child))

    def _ended(self, child: _Child) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
        self.events.unregister(child.ended)
        os.close(child.ended)
        self.children.remove(child)
        if child.client in self.events.get_map():
            self.events.unregister(child.client)
        with suppress(OSError):
            child.client.sendall(b"%d" % (status if status >= 0 else 128 - status))
        child.client.close()

    def _gone(self, child: _Child) -> None:
        """The client says nothing more unless it has gone. The child may have ended at the same time."""
        if child not in self.children:
            return
        self.events.unregister(child.client)
        os.killpg(child.process, signal.SIGKILL)

    def _end(self) -> None:
        for child in self.children:
            os.killpg(child.process, signal.SIGKILL)
        raise SystemExit


def _run(words: list[str], environment: dict[str, str], place: str, streams: list[int]) -> None:
    """Run a command in this child and end it."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(streams):
        os.dup2(file, stream)
        os.close(file)
    sys.argv = ["rotquant", *words]
    threads = int(environment.get("OMP_NUM_THREADS", "1"))
    if threads > 1 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    status: object = 1
    try:
        app(words)
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def main() -> None:
    """Listen as the process of a kind, unless another one does already."""
    kind, owner = sys.argv[1], os.environ.get("ROTQUANT_ENDS_WITH")
    home = Path(folder())
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid() or home.is_symlink():
        sys.exit(f"rotquant: {home} belongs to somebody else.")
    alone = (home / f"{kind}.lock").open("w")
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another one listens, or is about to
        return
    (home / kind).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(home / kind))
    for left in home.glob(f"{kind}-states-*"):  # of one that was killed
        shutil.rmtree(left, ignore_errors=True)
    states = tempfile.mkdtemp(prefix=f"{kind}-states-", dir=home)
    try:
        os.environ.setdefault(VARIABLE, states)
        for module in PRELOADED[kind]:
            importlib.import_module(module)
        tree()
        gc.collect()
        gc.freeze()  # no child looks through what is imported here, nor copies it thereby
        listening.listen(256)
        Server(listening, None if owner is None else int(owner)).serve()
    finally:
        for left in (home / kind, home / f"{kind}.lock"):
            left.unlink(missing_ok=True)
        shutil.rmtree(states, ignore_errors=True)
        with suppress(OSError):  # another one is in it, or has just removed it
            home.rmdir()


if __name__ == "__main__":
    main()
