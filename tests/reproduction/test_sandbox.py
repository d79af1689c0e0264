"""Programs that models write: what passes, and that nothing else does, reaches out or goes on."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reproduction.tasks import check_allowed, confined, sandbox
from reproduction.tasks.sandbox import Limits, passes
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import TaskError

SHORT = Limits(cpu_seconds=1, wall_seconds=2.0)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are confined on Linux alone")

# What a program may do


@pytest.mark.parametrize("add", ["return x + 1", "import math\n    return math.floor(x + 1.5)"])
def test_a_right_program_passes_and_a_wrong_one_does_not(add: str):
    test = "def check(candidate):\n    assert candidate(2) == 3\n\ncheck(add)"
    assert passes(f"def add(x):\n    {add}\n", test)
    assert not passes("def add(x):\n    return x\n", test)
    assert not passes("def add(x:\n", test)
    assert not passes("", test)


ORDINARY = """
from typing import List, Optional
from collections import Counter, defaultdict, deque, namedtuple
def common(words: List[str]) -> Optional[str]:
    return Counter(words).most_common(1)[0][0] if words else None
assert common(['a', 'b', 'a']) == 'a' and common([]) is None

import math, cmath, statistics, fractions, decimal, numbers
assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3') and statistics.median([1, 3]) == math.sqrt(4)

import re, string, textwrap, difflib
assert re.findall(r'\\d+', 'a1b22') == ['1', '22'] and string.ascii_lowercase[0] == 'a'

import random
random.seed(1)
assert 1 <= random.randint(1, 6) <= 6 and sorted(random.sample(range(9), 9)) == list(range(9))

from datetime import datetime
assert datetime.strptime('2024-02-29', '%Y-%m-%d').month == 2 and datetime.now().year > 2000

import json, csv, io, pprint
assert json.loads(json.dumps({'a': [1, None]})) == {'a': [1, None]}

import functools, itertools, operator
assert functools.reduce(operator.mul, itertools.islice(itertools.count(1), 3)) == 6

import heapq, bisect, queue, array, copy
assert heapq.nsmallest(1, [3, 1]) == [1] and bisect.bisect([1, 2], 1) == 1

import hashlib, zlib, base64, hmac
assert hashlib.md5(b'a').hexdigest()[:4] == '0cc1' and hashlib.new('sha256', b'a')

from functools import singledispatch
@singledispatch
def kind(x): return 0
@kind.register
def _(x: int): return 1
assert kind(1) == 1 and kind('') == 0

from dataclasses import dataclass
from enum import Enum
@dataclass(order=True)
class Point:
    x: int = 0
assert Point(1) > Point()

from typing import Protocol, runtime_checkable
@runtime_checkable
class Goes(Protocol):
    def go(self): ...
assert not isinstance(1, Goes)

import sys
sys.setrecursionlimit(100_000)
def deep(n): return n and 1 + deep(n - 1)
assert deep(50_000) == 50_000

import os.path, time
time.sleep(0.01)
assert os.path.join('a', 'b') == 'a/b' and time.time() > 1e9 and time.localtime().tm_year > 2000

assert 'naïve \\N{BULLET}'.encode('latin-1', 'ignore').decode('cp1252') == 'naïve '

assert __import__('math').pi > 3

try:
    import numpy
except ImportError:
    numpy = None
assert numpy is None

import traceback
try:
    1 / 0
except ZeroDivisionError:
    assert 'division' in traceback.format_exc()

import signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.alarm(9)
assert signal.alarm(0) > 0

import logging, warnings
warnings.warn('a')
logging.error('b')
assert '\\d' is not None
""".strip().split("\n\n")


@pytest.mark.parametrize("program", ORDINARY, ids=lambda program: program.split("\n")[0][:40])
def test_an_ordinary_program_passes(program: str):
    assert passes(program, "")


def test_equal_programs_have_equal_verdicts():
    """Strings hash alike in every process, so that sets have one order."""
    code = "import sys; sys.stdout.write(str(hash('a')))"
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, check=True)
    assert passes("", f"assert hash('a') == {found.stdout.decode()}")


def test_programs_run_side_by_side():
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(passes("x = 1", "assert x"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_its_surroundings_are_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    assert passes("import os", "assert 'SECRET_OF_MINE' not in os.environ")
    assert passes("import sys", "assert not any('site-packages' in place for place in sys.path)")
    assert passes("seen = [name for name in dir() if not name.startswith('__')]", "assert seen == []")


# What ends it


@pytest.mark.parametrize(
    "leaving",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "quit = exit = None\nraise KeyboardInterrupt",
        "import atexit\natexit.register(print)\nraise BaseException",
        "import os\nos.write(1, b'0' * 32)\nos._exit(0)",
        "import os\nos.closerange(0, 64)",
        "import ctypes\nctypes.string_at(0)",
    ],
)
def test_leaving_before_the_assertions_is_not_passing(leaving: str):
    assert not passes(leaving, "")


ENDLESS = (
    "while True:\n    pass",
    "import time\ntime.sleep(600)",
    "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "import threading\nwhile True:\n    try:\n        threading.Thread(target=int).start()\n"
    "    except RuntimeError:\n        pass",
    "held = bytearray(10 << 30)",
    "held = []\nwhile True:\n    held.append(bytearray(1 << 22))",
    "import mmap\nheld = [mmap.mmap(-1, 1 << 28) for _ in range(40)]",
    "for _ in range(1000):\n    print('x' * (1 << 20))",
    "import os\nwhile True:\n    for number in range(64):\n        try:\n            os.write(number, b'0' * 4096)\n"
    "        except OSError:\n            pass",
    "def f(): return f()\nimport sys\nsys.setrecursionlimit(1 << 30)\nf()",
    "x = 9 ** 9 ** 9",
    "eval('(' * 10**6)",
)


def test_a_program_without_end_or_measure_ends_within_its_limits_and_fails():
    started = time.monotonic()
    with ThreadPoolExecutor(len(ENDLESS)) as pool:
        found = dict(zip(ENDLESS, pool.map(lambda program: passes(program, "", SHORT), ENDLESS), strict=True))
    assert [program for program, passed in found.items() if passed] == []
    assert time.monotonic() - started < 30  # of CPUs that others share


def test_a_loop_ends_with_its_cpu_time():
    started = time.monotonic()
    assert not passes("while True:\n    pass", "", Limits(cpu_seconds=1, wall_seconds=60.0))
    assert time.monotonic() - started < 30


def test_memory_is_limited():
    few = Limits(memory_bytes=1 << 28)
    assert passes("held = bytearray(1 << 24)", "assert len(held)", few)
    assert not passes("held = bytearray(1 << 29)", "", few)


def test_what_is_printed_is_lost_and_stops_nothing():
    program = "import sys\nfor _ in range(20):\n    print('x' * 100_000)\n    print('y' * 100_000, file=sys.stderr)"
    assert passes(program, "assert True")


def test_a_program_ends_with_the_process_that_waits_for_it():
    """Even with one that is killed: nobody would be left to end it."""
    code = "from reproduction.tasks.sandbox import passes; passes('import time; time.sleep(600)', '')"
    with subprocess.Popen([sys.executable, "-c", code]) as waiting:
        while not (found := _waiting_programs(waiting.pid)):
            time.sleep(0.05)
        waiting.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(_runs(one) for one in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(one) for one in found)


def _waiting_programs(parent: int) -> list[int]:
    """The children of a process that sleep confined."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text()]


def _runs(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


# What it reaches

CALLS = """
import ctypes, os, resource, signal, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result
other, place = os.getppid(), {place!r}
"""

ATTACKS = {
    "its parent's limits": "resource.prlimit(other, resource.RLIMIT_NOFILE, (3, 3))",
    "its own limits": "call('setrlimit', resource.RLIMIT_AS, (ctypes.c_ulong * 2)(1 << 40, 1 << 40))",
    "its parent's processors": "os.sched_setaffinity(other, {0})",
    "its parent's priority": "os.setpriority(os.PRIO_PROCESS, other, 19)",
    "every process's priority": "os.setpriority(os.PRIO_USER, 0, 19)",
    "its parent's scheduler": "os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0))",
    "its parent's life": "os.kill(other, 0)",
    "everybody's life": "os.kill(-1, 0)",
    "its parent's threads": "call('tgkill', other, other, 0)",
    "a handle on its parent": "call('syscall', 434, other, 0)",
    "its parent by ptrace": "call('ptrace', 16, other, 0, 0)",
    "its parent's memory, read": "call('process_vm_readv', other, 0, 0, 0, 0, 0)",
    "its parent's memory, written": "call('process_vm_writev', other, 0, 0, 0, 0, 0)",
    "its parent's environment": "found = open(f'/proc/{other}/environ', 'rb').read()",
    "its parent's environment, by number": "os.open(f'/proc/{other}/environ', os.O_RDONLY)",
    "its parent's open files": "os.readlink(f'/proc/{other}/fd/0')",
    "its parent's group": "os.setpgid(other, 0)",
    "a session": "os.setsid()",
    "another root": "os.chroot('/')",
    "another user": "os.setuid(65534)",
    "another group": "os.setgid(65534)",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 1e9)",
    "the clock's rate": "call('adjtimex', ctypes.create_string_buffer(256))",
    "the machine's name": "call('sethostname', b'taken', 5)",
    "a mount": "call('mount', None, b'/', None, 0x1000, None)",
    "other namespaces": "call('unshare', 0x10000000)",
    "the kernel's keys": "call('syscall', 250, 0, -3, 0)",
    "a ring of calls": "call('syscall', 425, 1, ctypes.create_string_buffer(256))",
    "shared memory": "call('shmget', 0, 4096, 0o1666)",
    "memory without a limit": "call('memfd_create', b'a', 0)",
    "a fork": "os.fork()",
    "a program": "os.execv('/bin/true', ['true'])",
    "a program beside it": "os.posix_spawn('/bin/true', ['true'], {})",
    "a shell": "if os.system('true'): raise OSError(1, 'no shell')",
    "a socket": "socket.socket()",
    "a pair of sockets": "socket.socketpair()",
    "a file's content": "open(place + '/kept.txt')",
    "a folder's content": "os.listdir(place)",
    "whether a file is there": "os.stat(place)",
    "a file, overwritten": "open(place + '/kept.txt', 'w').write('changed')",
    "a file, removed": "os.remove(place + '/kept.txt')",
    "a file, renamed": "os.rename(place + '/kept.txt', place + '/mine')",
    "a file, cut": "os.truncate(place + '/kept.txt', 0)",
    "a file's mode": "os.chmod(place + '/kept.txt', 0)",
    "a file's owner": "os.chown(place + '/kept.txt', 65534, 65534)",
    "a file's times": "os.utime(place + '/kept.txt', (0, 0))",
    "the mode of what is open": "os.fchmod(1, 0)",
    "a link": "os.symlink(place + '/kept.txt', place + '/link')",
    "a folder": "os.mkdir(place + '/folder')",
    "a device": "os.mknod(place + '/null', 0o020666, os.makedev(1, 3))",
    "a hundred files of 1 MiB": "[open(f'{place}/{n}', 'wb').write(bytes(1 << 20)) for n in range(100)]",
    "a file in its own folder": "open('own.txt', 'w')",
    "a file in /tmp": "open('/tmp/rotquant-taken', 'w')",
    "a file in /dev/shm": "open('/dev/shm/rotquant-taken', 'w')",
}
"""What a hostile program reaches for: each must end as a refusal by the kernel, which the program itself sees."""


def _world(place: Path) -> dict[str, Any]:
    """What of this process, of a folder and of the machine a program could have changed."""
    here = os.getpid()
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{here}/status").read_text().splitlines())
    return {
        "limits": [resource.getrlimit(kind) for kind in range(16)],
        "processors": os.sched_getaffinity(0),
        "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        "ids": (status["Uid"], status["Gid"], os.getpgid(0), os.getsid(0), status["TracerPid"]),
        "root": os.stat("/").st_ino,
        "clock": round((time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)) / 60),
        "name": os.uname().nodename,
        "mounts": Path("/proc/self/mounts").read_text(),
        "files": {p.name: (p.read_text(), p.stat().st_mode, p.stat().st_mtime_ns) for p in place.iterdir()},
        "elsewhere": [Path(p).exists() for p in ("/tmp/rotquant-taken", "/dev/shm/rotquant-taken", "/own.txt")],
        "mode of null": os.stat("/dev/null").st_mode,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reached")
    (folder / "kept.txt").write_text("as it was")
    return folder


@pytest.mark.parametrize("what", ATTACKS)
def test_nothing_outside_is_reached(what: str, place: Path):
    """The kernel refuses it with EPERM, so the program's own check passes; and the world is as it was."""
    calls = CALLS.format(place=str(place))
    attempt = f"try:\n{textwrap.indent(ATTACKS[what], '    ')}\nexcept OSError as error:\n    refused = error.errno"
    before = _world(place)
    assert passes(f"{calls}\nrefused = None\n{attempt}", "assert refused == 1")
    assert _world(place) == before


@pytest.mark.skipif(os.uname().machine not in confined._ARCHITECTURES, reason="numbers of calls")
def test_every_call_that_is_not_allowed_is_refused():
    """By its number, those of x86-64's second table (x32) included; the kernel knows some 470.

    Of x86-64 335 and 336 (uretprobe, uprobe) are no calls: outside the kernel's own trampolines they end the process.
    """
    column = confined._ARCHITECTURES[os.uname().machine][1]
    known = {numbers[column] for numbers in confined._ALLOWED.values()} | ({335, 336} if column == 0 else set())
    refused = [number for number in (*range(600), *range(1 << 30, (1 << 30) + 600)) if number not in known]
    program = f"{CALLS.format(place='')}\nfor number in {refused}:\n    libc.syscall(number, 0, 0, 0, 0, 0, 0)\n"
    assert passes(f"{program}    assert ctypes.get_errno() == 1, number\n    ctypes.set_errno(0)", "")


@pytest.mark.parametrize(
    "script", ["def _confine() -> bool:\n    return False", "def _confine() -> bool:\n    return True"]
)
def test_where_programs_cannot_be_confined_none_is_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kernel without the filter, and one that says yes and filters nothing."""
    source = Path(sandbox._SCRIPT).read_text()
    changed = tmp_path / "confined.py"
    changed.write_text(source.replace("def _ends(", f"{script}\n\n\ndef _ends("))
    monkeypatch.setattr(sandbox, "_SCRIPT", changed)
    sandbox.check.cache_clear()
    with pytest.raises(TaskError, match="only where the kernel can confine them, which this machine's cannot"):
        passes(f"open({str(tmp_path / 'ran')!r}, 'w')", "")
    with pytest.raises(TaskError, match="leave their task out"):
        check_allowed(ZeroShot(suite="paper", tasks=("humaneval",)), allowed=True)
    check_allowed(ZeroShot(suite="paper", tasks=("gsm8k",)), allowed=True)
    sandbox.check.cache_clear()
    assert not (tmp_path / "ran").exists()
