"""The warm process: a child for each command that a client asks for, forked from imports that are loaded once.

It waits for events in one thread, so that a fork copies no lock that another holds. Where a machine has several GPUs a
child sees the one that fewest children use. A child is killed when its client has gone, and all of them, with this
process, when the one that ROTQUANT_ENDS_WITH numbers has ended. No import may ask CUDA's driver for a GPU, since no
child could use one then: where one did, children import everything anew.
"""

import ctypes
import fcntl
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reproduction.run.client import OWNER, SHARED, is_ours
from reproduction.run.plan import read_plan
from reproduction.run.stages.states import VARIABLE as SHARED_STATES
from reproduction.run.workers import VISIBLE, visible_gpus
from rotquant.cli import app, tree
from rotquant.foundation.environment import SHARED_TEXTS
from rotquant.foundation.errors import RotquantError

#: What each kind of process imports before it forks, and the command that it parses once: typer prepares it then.
PRELOADED = {
    "cells": ("reproduction.run.stages.loaded", ("runs", "make")),
    "pages": ("reproduction.commands.preloaded", ("report", "page")),
}
#: Variables that name the folder of what children share: states of float models, and texts that models write.
_FOLDERS = (SHARED_STATES, SHARED_TEXTS)
#: Packages that transformers imports where they are, that ask the driver then, and that nothing here uses.
_LEFT_OUT = ("torchao",)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
#: A command in a new process.
_ANEW = ("-c", "import sys; from rotquant.cli import app; app(sys.argv[1:])")


@dataclass
class _Child:
    """A running command: its process, a file that is readable when it has ended, its client, and its GPU."""

    process: int
    ended: int
    client: socket.socket
    gpu: str | None


class Server:
    """A listening socket and the running children."""

    def __init__(self, listening: socket.socket, anew: bool) -> None:
        self.listening, self.children, self.anew = listening, list[_Child](), anew
        self.gpus = visible_gpus()
        self.events = selectors.DefaultSelector()
        self.events.register(listening, selectors.EVENT_READ, self._accept)
        self.events.register(os.pidfd_open(int(os.environ[OWNER])), selectors.EVENT_READ, self._end)

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
                asked = [os.fsdecode(one) for one in rest.read(int.from_bytes(length, "big")).split(b"\0")]
            if not is_ours(client) or len(streams) != 3:
                raise ValueError
            place, count, *words = asked
            words, variables = words[: int(count)], words[int(count) :]
            environment = dict(one.split("=", 1) for one in variables)
        except (OSError, ValueError):  # it has gone, or is none of ours
            client.close()
            return
        used = Counter(child.gpu for child in self.children)
        shared = SHARED in environment and len(self.gpus) > 1
        gpu = min(self.gpus, key=lambda one: used[one]) if shared else None
        process = os.fork()
        if process == 0:
            self.listening.close()
            self.events.close()
            own = {name: os.environ[name] for name in _FOLDERS} | ({} if gpu is None else {VISIBLE: gpu})
            _run(words, environment | own, place, streams, self.anew)
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


def _run(words: list[str], environment: dict[str, str], place: str, streams: list[int], anew: bool) -> None:
    """Run a command in this child and end it; `anew`: without what is imported."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(streams):
        os.dup2(file, stream)
        os.close(file)
    if anew:
        os.execv(sys.executable, [sys.executable, *_ANEW, *words])
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


def _driver_was_asked() -> bool:
    """Whether an import has asked CUDA's driver, so that torch refuses a forked child a GPU: a child tells."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    process = os.fork()
    if process == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(process, 0)[1] != 0


def _own_folder() -> Path:
    """A folder for what children share, locked as long as this process or a child lives; killed ones' are removed."""
    begin = f"rotquant-{os.getuid()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{begin}*"):
        with suppress(OSError):  # it is used, or somebody else's
            _lock(left)
            shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=begin))
    _lock(folder)
    return folder


def _lock(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise


def main() -> None:
    """Serve as the process of a kind, at a socket that listens already."""
    listening = socket.socket(fileno=int(sys.argv[2]))
    # Python 3.12 warns of threads that imports have started, which hold no lock while this one waits.
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
    shared = _own_folder()
    try:
        for name in _FOLDERS:
            os.environ.setdefault(name, str(shared))
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU, without the driver
        for name in _LEFT_OUT:
            sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]  # as if it were not installed
        module, (group, command) = PRELOADED[sys.argv[1]]
        importlib.import_module(module)
        tree().commands[group].commands[command].make_context(command, ["name"])
        if plan := os.environ.get("ROTQUANT_PLAN"):
            with suppress(RotquantError):  # each command says what is wrong with it
                known = read_plan(Path(plan))
                if known.runs:
                    known.run(next(iter(known.runs)))  # the first one takes 40 ms: pydantic prepares recipes
        gc.collect()
        gc.freeze()  # no child looks through what is imported here, nor copies it thereby
        Server(listening, _driver_was_asked()).serve()
    finally:
        shutil.rmtree(shared, ignore_errors=True)


if __name__ == "__main__":
    main()
