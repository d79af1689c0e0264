"""What runs a program that a model wrote, inside a process of its own; `sandbox` starts it as a script by its path.

It reads a job from standard input, imports the modules of the standard library that the program names, and gives up all
other access to the machine: a filter of system calls (Linux, seccomp) lets it compute, ask for memory within its limit,
read clocks and write to files that are open already, and refuses every other call with EPERM. It can then open no file,
start no process or thread, and reach no other process. Only when program and test have come to their end does it write
the job's token back. Nothing here is imported from rotquant.
"""

import ctypes
import importlib
import json
import os
import re
import resource
import struct
import sys
from contextlib import suppress

#: Numbers of the system calls that a program may make: on x86_64, on aarch64 (-1: it has no such call).
# fmt: off
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62),
    "brk": (12, 214), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "futex": (202, 98), "sched_yield": (24, 124), "getrandom": (318, 278),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "alarm": (37, -1), "getitimer": (36, 102), "setitimer": (38, 103), "restart_syscall": (219, 128),
    "time": (201, -1), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "times": (100, 153), "getrusage": (98, 165),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "uname": (63, 160), "getcwd": (79, 17),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "exit": (60, 93), "exit_group": (231, 94),
}
# fmt: on
#: Of an architecture the number that audit has for it, and its column above.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# instructions of the filter's language (BPF): load a word, jump if equal, return; and where the words lie
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_CALL_WORD, _ARCHITECTURE_WORD = 0, 4
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # with EPERM
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38
_FILTER, _SIGKILL = 2, 9

#: Modules that a program may import. None of them does more than define something when it is imported.
_MODULES = """
    abc argparse array ast atexit base64 binascii bisect builtins bz2 calendar cmath codecs collections colorsys
    concurrent.futures.thread contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib
    dis enum errno fnmatch fractions functools gc getopt glob graphlib gzip hashlib heapq hmac html.entities
    html.parser importlib.util inspect io ipaddress itertools json keyword linecache locale logging lzma marshal
    math multiprocessing.pool numbers operator os.path pathlib pickle platform pprint queue random re reprlib
    resource secrets select shlex shutil signal socket sqlite3 statistics string stringprep struct subprocess
    symtable sys sysconfig tempfile textwrap threading time timeit token tokenize traceback tracemalloc types typing
    unicodedata unittest.mock urllib.parse uuid warnings weakref xml.etree.ElementTree zipfile zlib
"""
#: What the standard library imports only when a function runs: always, and by a word that the program has.
_ALWAYS = ("copy", "functools", "heapq", "operator", "types", "typing", "unicodedata", "weakref")
_CODECS = """
    ascii base64_codec cp1252 cp437 hex_codec idna latin_1 punycode raw_unicode_escape rot_13 unicode_escape utf_16
    utf_16_be utf_16_le utf_32 utf_7 utf_8_sig
"""
_LATE = {
    **dict.fromkeys(("bytes", "codecs", "decode", "encode"), tuple(f"encodings.{name}" for name in _CODECS.split())),
    **dict.fromkeys(("datetime", "time"), ("_strptime",)),
    "Protocol": ("inspect",),
    **dict.fromkeys(("logging", "traceback"), ("ast", "tokenize")),
}


def main() -> None:
    """Run the job: a program, then a test, in one namespace; write the token if both came to their end."""
    job = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    _redirect()
    _limit(job["cpu_seconds"], job["memory_bytes"], job["output_bytes"])
    token = job.pop("token").encode()
    parts = [job["program"], job["test"]]
    _import("\n".join(parts))
    if _confine() and _ends(parts):
        os.write(answer, token)
    os._exit(0)  # nothing that the program has left behind runs on


def _redirect() -> None:
    """Read nothing, and write into memory that ends with the process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = ctypes.CDLL(None).memfd_create(b"output", 0)  # which Python has only where it was built with a new glibc
    for stream in (1, 2):
        os.dup2(output, stream)


def _limit(cpu_seconds: int, memory_bytes: int, output_bytes: int) -> None:
    """Limits of the kernel, which none of it may raise again."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: output_bytes,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))


def _import(text: str) -> None:
    """Import what a program could ask for by the words that it has: once it is confined, no file can be read."""
    words = set(re.findall(r"\w+", text))
    wanted = [name for name in _MODULES.split() if name.split(".")[0] in words]
    for name in (*_ALWAYS, *wanted, *(late for word in words for late in _LATE.get(word, ()))):
        with suppress(ImportError):  # of a Python without it
            importlib.import_module(name)


def _confine() -> bool:
    """Have the kernel refuse all calls but the allowed ones, for good; False where it cannot."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        return False
    architecture, column = _ARCHITECTURES[machine]
    calls = sorted({numbers[column] for numbers in _ALLOWED.values()} - {-1})
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_WORD),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _CALL_WORD),
        *((_EQUAL, left, 0, call) for left, call in zip(range(len(calls), 0, -1), calls, strict=True)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    settings = (
        (_SET_DEATH_SIGNAL, _SIGKILL),  # whoever waits for it may be killed first
        (_SET_DUMPABLE, 0),  # no core file
        (_SET_NO_NEW_PRIVILEGES, 1),
    )
    done = [libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) for option, value in settings]
    return not any(done) and libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), program, 0, 0) == 0


def _ends(parts: list[str]) -> bool:
    """Whether pieces of a program come to their end, one after the other; leaving early by SystemExit is none."""
    space: dict[str, object] = {"__name__": "program"}
    try:
        for part in parts:
            exec(compile(part, "<program>", "exec"), space)
    except BaseException:
        return False
    return True


if __name__ == "__main__":
    main()
