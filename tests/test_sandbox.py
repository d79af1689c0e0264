"""Programs that models write: what passes, and that nothing else does, reaches out or goes on."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rotquant.metrics.zeroshot import confined
from rotquant.metrics.zeroshot.sandbox import Limits, passes

SHORT = Limits(cpu_seconds=1, wall_seconds=4.0)


def tried(code: str) -> bool:
    """Whether code that is tried inside raises an OSError or is killed: it passes if it went through."""
    return passes(f"try:\n    {code}\nexcept OSError:\n    raise\n", "", SHORT)


def test_a_right_program_passes_and_a_wrong_one_does_not():
    test = "def check(candidate):\n    assert candidate(2) == 3\n\ncheck(add)"
    assert passes("def add(x):\n    return x + 1\n", test)
    assert not passes("def add(x):\n    return x\n", test)
    assert not passes("def add(x:\n", test)
    assert not passes("", test)


def test_what_the_standard_library_offers_is_there():
    names = "math, re, hashlib, collections, itertools, functools, datetime, random, string, heapq, typing, decimal"
    assert passes(f"import {names}\n", "assert math.pi > 3 and hashlib.md5(b'a').hexdigest()")
    assert passes("import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()", "assert not t.is_alive()")
    assert passes("with open('own.txt', 'w') as file:\n    file.write('a')", "assert open('own.txt').read() == 'a'")


@pytest.mark.parametrize(
    "leaving",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "quit = exit = None\nraise KeyboardInterrupt",
        "import atexit\natexit.register(print)\nraise BaseException",
        "import os\nos.write(1, b'0' * 32)\nos._exit(0)",
    ],
)
def test_leaving_before_the_assertions_is_not_passing(leaving: str):
    assert not passes(leaving, "assert False")
    assert not passes(leaving, "")


def test_an_endless_loop_ends_with_its_cpu_time():
    started = time.monotonic()
    assert not passes("while True:\n    pass", "", Limits(cpu_seconds=1, wall_seconds=60.0))
    assert time.monotonic() - started < 30  # of one CPU that others share


def test_waiting_ends_with_the_clock():
    started = time.monotonic()
    assert not passes("import time\ntime.sleep(600)", "", Limits(wall_seconds=1.0))
    assert time.monotonic() - started < 30


def test_a_thread_that_goes_on_is_no_reason_to_wait():
    started = time.monotonic()
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    assert passes(program, "assert True", Limits(wall_seconds=60.0))
    assert time.monotonic() - started < 30


def test_memory_is_limited():
    few = Limits(memory_bytes=1 << 28)
    assert passes("held = bytearray(1 << 24)", "assert len(held)", few)
    assert not passes("held = bytearray(1 << 29)", "", few)
    assert not passes("held = []\nwhile True:\n    held.append(bytearray(1 << 22))", "", few)


def test_what_is_printed_is_lost_and_stops_nothing():
    program = "import sys\nfor _ in range(200):\n    print('x' * 100_000)\n    print('y' * 100_000, file=sys.stderr)"
    assert passes(program, "assert True")


def test_flooding_every_open_file_does_not_pass():
    program = "import os\nfor number in range(3, 64):\n    try:\n        while True:\n"
    program += "            os.write(number, b'0' * 4096)\n    except OSError:\n        pass"
    assert not passes(program, "", SHORT)


def test_no_connection_is_made():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        port = server.getsockname()[1]
        assert not tried(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not tried("import socket; socket.socketpair()")


def test_nothing_is_written_outside_its_folder(tmp_path: Path):
    kept = tmp_path / "kept.txt"
    kept.write_text("as it was")
    for code in (
        f"open({str(kept)!r}, 'w').write('changed')",
        f"open({str(tmp_path / 'new.txt')!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import os; os.chmod({str(kept)!r}, 0)",
        f"import os; os.mkdir({str(tmp_path / 'folder')!r})",
        f"import os; os.symlink({str(kept)!r}, 'link'); open('link', 'w')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    ):
        assert not tried(code), code
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "as it was"
    assert kept.stat().st_mode & 0o777


def test_files_are_small_and_gone_afterwards():
    program = "import os\nplace = os.getcwd()\nassert os.listdir('.') == []\nopen('a', 'wb').write(b'0' * 1000)"
    assert passes(program, "assert os.listdir('.') == ['a']")
    assert not passes("open('a', 'wb').write(b'0' * (1 << 21))", "")


def test_no_other_process_is_started():
    assert not tried("import os; os.fork()")
    assert not passes(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "", SHORT
    )
    assert not tried("import subprocess; subprocess.run(['true'])")
    assert not tried("import os; os.system('true') and None")
    assert not tried("import multiprocessing as m; p = m.get_context('fork').Process(target=int); p.start()")
    assert not tried("import os; os.execv('/bin/true', ['true'])")
    assert not tried(f"import os; os.kill({os.getpid()}, 0)")


def test_the_environment_is_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    assert passes("import os", "assert 'SECRET_OF_MINE' not in os.environ and os.environ['HOME'] == os.getcwd()")
    assert passes("import sys", "assert not any('site-packages' in place for place in sys.path)")


def test_a_pass_needs_the_token_and_no_program_is_given_it():
    names = "[name for name in dir() if not name.startswith('__')]"
    assert passes(f"seen = {names}", "assert seen == []")


def by_itself(layer: str, code: str) -> str:
    """What an attempt says in a fresh process where one layer alone stands."""
    script = f"import ctypes, os, socket, threading\nfrom rotquant.metrics.zeroshot import confined\n{layer}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout + done.stderr).strip().split("\n")[-1]


LIBC = "libc = ctypes.CDLL(None, use_errno=True); libc.prctl(38, 1, 0, 0, 0)"


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in confined._CALLS, reason="Linux' filter of calls"
)
def test_the_kernel_alone_refuses_sockets_and_processes():
    layer = f"{LIBC}; assert confined._filter_calls(libc)"
    assert by_itself(layer, "socket.socket()").startswith("PermissionError")
    assert by_itself(layer, "os.fork()").startswith("PermissionError")
    assert by_itself(layer, "os.execv('/bin/true', ['true'])").startswith("PermissionError")
    assert by_itself(layer, "os.posix_spawn('/bin/true', ['true'], {})").startswith("PermissionError")
    thread = "one = threading.Thread(target=print, args=('ran',)); one.start(); one.join()"
    assert by_itself(layer, thread) == "ran"


def test_the_kernel_alone_refuses_writing_where_it_can(tmp_path: Path):
    inside = tmp_path / "inside"
    inside.mkdir()
    known = by_itself(LIBC, "print(libc.syscall(444, None, 0, 1))")  # the version of Landlock, or -1
    if sys.platform != "linux" or int(known) < 1:
        pytest.skip("this kernel has no Landlock")
    layer = f"{LIBC}; confined._write_below(libc, {str(inside)!r})"
    assert by_itself(layer, f"open({str(tmp_path / 'new')!r}, 'w')").startswith("PermissionError")
    assert by_itself(layer, f"open({str(inside / 'new')!r}, 'w'); print('written')") == "written"


def test_the_interpreter_alone_refuses_all_of_it(tmp_path: Path):
    layer = f"import sys; sys.addaudithook(confined._auditor({str(tmp_path)!r}))"
    for code in ("socket.socket()", "os.fork()", "os.system('true')", "open('/tmp/rotquant-no', 'w')", "os.kill(1, 0)"):
        assert by_itself(layer, code).startswith("PermissionError"), code
    assert by_itself(layer, f"open({str(tmp_path / 'new')!r}, 'w'); print('written')") == "written"


def test_programs_run_side_by_side():
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(passes("x = 1", "assert x"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
