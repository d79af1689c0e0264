"""A case read in a process that is watched: what it opens, starts and unpickles, its memory and its time.

The process is forked from one that has loaded all libraries, reads one case after another, and is replaced where it
does not answer. Python's audit events show what Python opens; what compiled libraries write is found by what lies
beside the case's folder afterwards.
"""

import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.trials.fuzz.cases import Case
from tests.trials.fuzz.formats import Format
from tests.trials.trial import REPOSITORY

#: Seconds of computing, or of sleeping, after which a reader hangs; waiting for a core is neither.
SECONDS = 5.0
#: Memory that a case may take beyond what the process has.
BYTES = 2 << 30
#: Characters of a sentence, however long the names in it are.
LONGEST = 1200

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen")
_REACHES = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind")
#: Where what every reader may read lies: Python, its packages, this project's own code and data, the system.
_OURS = ("rotquant", "workflow/reproduction", "kernels", "tests")
_SYSTEM = ("/proc", "/sys", "/usr", "/lib", "/lib64", "/etc/ssl", "/etc/localtime", "/etc/mime.types", "/dev/null")


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    kind: accepted, sentence, or what a reader must not do: traceback, untidy (a sentence of several lines or without
    end), hang, death, outside (a file that it opened or changed), started, reached, unpickled, ran.
    where: the innermost line of this project, by which failures are told apart.
    """

    kind: str
    detail: str = ""
    where: str = ""
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """Whether the reader did as it must."""
        return self.kind in ("accepted", "sentence")


class Guard:
    """The audit hook of a process: looks while `folder` is set, notes what must not happen, and prevents the worst."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.folder: str | None = None
        self.names_places = self.linked = False
        self.seen: list[tuple[str, str]] = []
        readable = (sys.prefix, sys.base_prefix, *_SYSTEM)
        own = [str(REPOSITORY / name) for name in _OURS]
        self.readable = tuple({*readable, *own, *map(os.path.realpath, (*readable, *own))})
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self, folder: Path, names_places: bool, linked: bool) -> Iterator[None]:
        """While open, what happens is noted; `linked`: a link in the folder leads to the secret, which may be read."""
        self.seen, self.names_places, self.folder, self.linked = [], names_places, os.path.realpath(folder), linked
        try:
            yield
        finally:
            self.folder = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            self._opened(*arguments)
        elif event in _CHANGES:
            for place in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                self._written(event, place)
        elif event in _STARTS:
            self._refuse("started", f"{event} {arguments[:2]}")
        elif event in _REACHES:
            if not self.names_places:
                self.seen.append(("reached", f"{event} {arguments[1:]}"))
            raise PermissionError(1, "the network is out of reach")
        elif event == "pickle.find_class":
            self._refuse("unpickled", ".".join(map(str, arguments[-2:])))
        elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(f"{self.root}/"):
            self._refuse("ran", arguments[0].co_filename)

    def _opened(self, place: Any, mode: Any, flags: Any) -> None:
        if isinstance(place, int) or place is None:
            return
        if (isinstance(flags, int) and flags & _WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
            self._written("open", place)
            return
        path = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(place)))  # by its name: links may lead out
        secret = _below(path, (f"{self.root}/outside",)) and not self.linked
        if not self.names_places and (secret or not _below(path, (self.root, *self.readable))):
            self.seen.append(("outside", f"read {path}"))

    def _written(self, event: str, place: Any) -> None:
        if isinstance(place, int):
            return
        path = os.path.realpath(os.path.join(os.getcwd(), os.fsdecode(place)))
        if not _below(path, (str(self.folder), f"{self.root}/cache", "/dev/null")):
            self._refuse("outside", f"{event} {path}")

    def _refuse(self, kind: str, what: str) -> None:
        self.seen.append((kind, what))
        raise PermissionError(1, f"refused by the trial: {what}")


def _below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def lay(folder: Path, form: Format, case: Case) -> None:
    """Make the folder of a case: the format's example with the case's files."""
    for name, content in {**form.files, **case}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "folder":
            path.mkdir()
        elif content == "pipe":
            os.mkfifo(path)
        elif content.startswith("link"):
            out = str(folder.parent / "outside/secret.txt")
            target = {"link out": out, "link to itself": path.name, "link to nowhere": "nowhere"}
            path.symlink_to(target.get(content, "/dev/zero"))


class Reader:
    """A process that reads cases; `outcome` gives it one and waits."""

    def __init__(self, root: Path, formats: dict[str, Format]) -> None:
        self.root, self.formats = root, formats
        self.replaced = 0
        for name in ("outside", "cache"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "outside/secret.txt").write_text("secret\n")
        self._beside = self._snapshot()
        self._fork()

    def _fork(self) -> None:
        ours, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                _serve(theirs, self.root, self.formats)
            finally:
                os._exit(0)
        theirs.close()
        self.pipe = ours

    def outcome(self, form: Format, case: Case) -> Outcome:
        """Read a case."""
        before, slept = _computed(self.pid)[0], 0.0
        self.pipe.send((form.name, case))
        while not self.pipe.poll(0.2):
            computed, state = _computed(self.pid)
            slept += 0.2 * (state == "S")
            if max(computed - before, slept) > SECONDS:
                self._replace()
                what = f"{computed - before:.1f} s of computing and {slept:.1f} s of sleeping"
                return Outcome("hang", f"no answer after {what}", form.name)
        try:
            found = Outcome(*self.pipe.recv())
        except EOFError:
            status = self._replace()
            return Outcome("death", f"the process ended by signal {os.WTERMSIG(status)}, status {status}", form.name)
        beside = self._snapshot()
        if beside != self._beside:
            changed = sorted(set(beside) ^ set(self._beside))
            self._beside = beside
            return Outcome("outside", f"beside the folder: {changed}", form.name)
        return found

    def _snapshot(self) -> list[tuple[str, int, int]]:
        """What lies beside the folder of the case, the cache aside."""
        places = [*self.root.parent.iterdir(), *self.root.iterdir(), *(self.root / "outside").rglob("*")]
        aside = ("cache", "case", self.root.name)
        found = ((str(one), one.lstat()) for one in places if one.name not in aside)
        return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)

    def _replace(self) -> int:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pipe.close()
        self.replaced += 1
        self._fork()
        return status

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _computed(pid: int) -> tuple[float, str]:
    """Seconds that a process has computed, and its state: S sleeps."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0]
    return 0.0, ""


def _serve(pipe: Connection, root: Path, formats: dict[str, Format]) -> None:
    """Read cases until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    os.environ["ROTQUANT_CACHE"] = os.environ["HF_HOME"] = os.environ["HOME"] = str(root / "cache")
    os.environ["TMPDIR"] = tempfile.tempdir = str(root / "cache")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # pyright: ignore
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    guard = Guard(root)
    while True:
        try:
            name, case = pipe.recv()
        except EOFError:
            return
        found = _read(guard, root / "case", formats[name], case)
        pipe.send((found.kind, found.detail, found.where, found.seconds))


def _read(guard: Guard, folder: Path, form: Format, case: Case) -> Outcome:
    from rotquant.foundation.errors import RotquantError

    os.chdir(guard.root)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lay(folder, form, case)
    os.chdir(folder)
    found, started = Outcome("accepted"), time.monotonic()
    with guard.watching(folder, form.names_places, "link out" in case.values()):
        try:
            form.read(folder)
        except RotquantError as error:
            found = _tidy(str(error), _where(error))
        except OSError as error:  # of which the command line makes a sentence
            named = error.errno is not None and not guard.seen
            found = _tidy(f"{error.filename}: {error.strerror}.", _where(error)) if named else _told(error)
        except BaseException as error:  # a library's panic is no Exception
            found = _told(error)
    seconds = time.monotonic() - started
    if guard.seen:
        kind, detail = guard.seen[0]
        found = Outcome(kind, detail, f"{form.name}: {kind} {re.sub(r'[0-9a-f]{8,}', '*', detail)[:80]}")
    return Outcome(found.kind, found.detail, found.where, seconds)


def _tidy(sentence: str, where: str) -> Outcome:
    """A sentence is one line that ends with a full stop, of letters that a terminal only shows."""
    if not sentence.strip() or not sentence.endswith(".") or len(sentence) > LONGEST or not sentence.isprintable():
        return Outcome("untidy", repr(sentence[:300]), f"untidy {where}")
    return Outcome("sentence", sentence, where)


def _told(error: BaseException) -> Outcome:
    lines = traceback.format_exception(error)
    detail = f"{type(error).__name__}: {str(error)[:200]!r}; " + " < ".join(_steps(error)[-6:][::-1])
    return Outcome("traceback", detail, f"{type(error).__name__} {_where(error)}" if lines else "")


def _where(error: BaseException) -> str:
    """The innermost line of this project's code that an error passed."""
    steps = [step for step in _steps(error) if step.startswith(("rotquant/", "workflow/reproduction/"))]
    return steps[-1] if steps else json.dumps(_steps(error)[-1:])


def _steps(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename.removeprefix(f'{REPOSITORY}/')}:{frame.lineno}" for frame in frames]
