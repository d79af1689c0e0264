"""What runs a program that a model wrote, inside a process of its own; `sandbox` starts it as a script by its path.

It reads a job from standard input, gives up what the program must not have, and runs it; only when program and test
have come to their end does it write the job's token back. Kernel and interpreter each refuse what they can: a system
call filter (Linux, seccomp) sockets, processes and other programs; Landlock, where the kernel has it, writing outside
the working folder; an audit hook of Python all of it, everywhere. Nothing here is imported from rotquant.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

#: Of an architecture the audit number, then the numbers of: system calls that are refused; clone; clone3.
_CALLS = {
    "x86_64": (
        0xC000003E,
        # socket to socketpair, fork, vfork, execve, kill, ptrace, mount, umount2, setns, unshare, tkill, tgkill, bpf,
        # io_uring_setup, execveat, process_vm_writev, pidfd_send_signal, pidfd_getfd, userfaultfd, keyctl
        (*range(41, 56), 57, 58, 59, 62, 101, 165, 166, 308, 272, 200, 234, 321, 425, 322, 311, 424, 438, 323, 250),
        56,
        435,
    ),
    "aarch64": (
        0xC00000B7,
        (*range(198, 213), 221, 129, 117, 40, 39, 268, 97, 130, 131, 280, 425, 281, 271, 424, 438, 282, 219),
        220,
        435,
    ),
}
_CLONE_THREAD = 0x00010000
_LOAD, _EQUAL, _AT_LEAST, _MASKED, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
#: From here on x86_64 has its calls of 32 bits once more.
_X32 = 0x40000000
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2

#: Landlock (since Linux 5.13): its calls on every architecture, and the rights of its first version.
_CREATE_RULESET, _ADD_RULE, _RESTRICT = 444, 445, 446
_WRITES = 0b1111111110010  # write a file, and make or remove anything; not execute, read a file or list a folder

#: Beginnings of the names of events.
_FORBIDDEN = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "syslog.", "webbrowser.", "signal.pthread_kill"),
    *("os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.system", "os.startfile"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Events about paths to be changed, and how many of their arguments are such.
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), 1),
    **dict.fromkeys(("os.setxattr", "os.removexattr", "os.chflags", "os.chdir", "os.fchdir"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}


def main() -> None:
    """Run the job: a program, then a test, in one namespace; write the token if both came to their end."""
    job = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    _limit(job["cpu_seconds"], job["memory_bytes"], job["file_bytes"])
    token = job.pop("token").encode()
    _confine(os.getcwd())
    if _ends([job["program"], job["test"]]):
        os.write(answer, token)
    os._exit(0)  # nothing that the program has left behind runs on


def _ends(parts: list[str]) -> bool:
    """Whether pieces of a program come to their end, one after the other; leaving early by SystemExit is none."""
    space: dict[str, object] = {"__name__": "program"}
    try:
        for part in parts:
            exec(compile(part, "<program>", "exec"), space)
    except BaseException:
        return False
    return True


def _limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits of the kernel, which none of it may raise again."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))


def _confine(folder: str) -> None:
    """Give up sockets, processes and writing outside a folder, by all means that this machine has."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _write_below(libc, folder)
        filtered = _filter_calls(libc)
    else:
        filtered = False
    if not filtered:  # threads count too, which the filter lets be
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    sys.addaudithook(_auditor(folder))


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Have the kernel refuse system calls; False where it cannot."""
    if platform.machine() not in _CALLS:
        return False
    architecture, refused, clone, clone3 = _CALLS[platform.machine()]
    # clone is for threads alone; without clone3, whose flags lie in memory, the C library takes clone
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _REFUSE | _ENOSYS),
        *(line for call in refused for line in ((_EQUAL, 0, 1, call), (_RETURN, 0, 0, _REFUSE | _EPERM))),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_MASKED, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(lines)))
    return libc.prctl(_SECCOMP, _FILTER, program, 0, 0) == 0


def _write_below(libc: ctypes.CDLL, folder: str) -> None:
    """Have the kernel refuse writing anywhere but below a folder, where it has Landlock."""
    rights = struct.pack("=Q", _WRITES)
    libc.syscall.restype = ctypes.c_long
    ruleset = libc.syscall(ctypes.c_long(_CREATE_RULESET), rights, ctypes.c_size_t(len(rights)), 0)
    if ruleset < 0:
        return
    place = os.open(folder, os.O_RDONLY)
    libc.syscall(ctypes.c_long(_ADD_RULE), ruleset, 1, struct.pack("=Qi", _WRITES, place), 0)
    libc.syscall(ctypes.c_long(_RESTRICT), ruleset, 0)
    os.close(place)
    os.close(ruleset)


def _auditor(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Python's own refusals, which nothing can take away again."""
    inside = os.path.realpath(folder)

    def is_inside(path: Any) -> bool:
        return not isinstance(path, int) and os.path.realpath(os.fsdecode(path)).startswith(inside + os.sep)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"a program that a model wrote may not do {event}")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and not is_inside(path):
                raise PermissionError("a program that a model wrote may not write outside its folder")
        elif not all(is_inside(path) for path in arguments[: _CHANGES.get(event, 0)]):
            raise PermissionError(f"a program that a model wrote may not do {event} outside its folder")

    return audit


if __name__ == "__main__":
    main()
