"""Files that are either whole or absent: every result is written under a temporary name and renamed.

A process killed at any point leaves at most a stray `.tmp-*` entry next to an intact earlier result, which the next one
that writes the same path removes.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from rotquant.foundation.errors import ResultError, RotquantError
from rotquant.foundation.parsing import parse_json

#: What a file system answers when nothing more can be written, whoever asks.
_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
#: What Linux's file systems bear, in bytes; a path is below another folder.
_LONGEST_NAME, _LONGEST_PATH = 255, 2048
#: Bytes of JSON that is written here, at most: what is larger is of another kind.
_LARGEST_RESULT = 2**28
_RECOMPUTE = "delete it and run again to recompute it"


@dataclass(frozen=True)
class OutputKind:
    """What a writer writes; of what stands in its place it replaces no other thing.

    what: in words, for sentences: "a quantized model". is_one: whether a file or folder is one, by its content.
    """

    what: str
    is_one: Callable[[Path], bool] = lambda _: False


def has_keys(*keys: str, marker: str | None = None) -> Callable[[Path], bool]:
    """Whether a file, or the file `marker` of a folder, is a JSON object with these keys."""

    def is_one(path: Path) -> bool:
        file = path if marker is None else path / marker
        with contextlib.suppress(ResultError):
            found = read_json(file) if file.is_file() and file.stat().st_size < _LARGEST_RESULT else None
            return isinstance(found, dict) and found.keys() >= {*keys}
        return False

    return is_one


#: What may be replaced whatever it is, since somebody said so: where paths lead, links followed.
_replaceable: ContextVar[frozenset[Path]] = ContextVar("replaceable", default=frozenset())


@contextlib.contextmanager
def replacing(*paths: str | Path) -> Iterator[None]:
    """Let writers replace files and folders that are not of their kind, as `--force` does; never what is in use."""
    token = _replaceable.set(_replaceable.get() | {_target(path) for path in paths})
    try:
        yield
    finally:
        _replaceable.reset(token)


def check_output_file(path: str | Path, kind: OutputKind | None = None, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse a path that a file cannot be written to, before the work whose result it is to hold.

    Args:
        kind: what is written, where a file of another kind is not replaced.
        inputs: files and folders that the same work reads.

    Raises:
        ResultError: a folder, a device, a place that is read-only, full or below a file, an input or a part of one, or
            a file of another kind that is not `replacing`.
    """
    target = _target(path)
    if _is_special(path):
        raise ResultError(f"{path} is a device or pipe, which a file would replace; name a file.")
    if target.is_dir():
        raise ResultError(f"{path} is a folder; name a file.")
    alike = kind is None or not target.exists() or kind.is_one(target)
    for given, source in _read_places(inputs):
        if target == source:
            raise ResultError(f"{path} is {given}, which this command reads; name another file.")
        if source in target.parents and not alike:
            raise ResultError(f"{path} is a part of {given}, which this command reads; name another file.")
    if kind is not None and not alike:
        _check_replaceable(path, target, kind)
    _check_writable(target.parent, path)


def check_output_folder(
    path: str | Path, kind: OutputKind = OutputKind("empty"), needed: int = 0, inputs: Iterable[str | Path] = ()
) -> None:
    """Refuse a path that a folder cannot be written to, before the work whose result it is to hold.

    Args:
        path: a folder that is not there, is empty, or is of the kind that is written and is to be replaced.
        needed: bytes that will be written at least.
        inputs: files and folders that the same work reads.

    Raises:
        ResultError: a file, a folder with other content that is not `replacing`, an input, a folder in or around one,
            or a place that is read-only, full, below a file, or that cannot be replaced.
    """
    target = _target(path)
    if _is_special(path) or (target.exists() and not target.is_dir()):
        raise ResultError(f"{path} is a file, where a folder is to be written; name a folder.")
    if target in (Path.cwd(), *Path.cwd().parents):
        raise ResultError(f"{path} is the working folder or around it, and would be replaced; name a folder in it.")
    if os.path.ismount(target):
        raise ResultError(f"{path} is a mount point, which cannot be replaced; name a folder in it.")
    for given, source in _read_places(inputs):
        if target == source or target in source.parents or source in target.parents:
            where = "is" if target == source else "is around" if target in source.parents else "is in"
            raise ResultError(f"{path} {where} {given}, which this command reads; name another folder.")
    if target.exists() and any(target.iterdir()) and not kind.is_one(target):
        _check_replaceable(path, target, kind)
    existing = _check_writable(target.parent, path)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ResultError(
            f"{path} needs at least {needed / 1e6:,.1f} MB, and {existing} has {free / 1e6:,.1f} MB left; "
            "make room or name another place."
        )


def check_regular(path: str | Path, error: type[RotquantError] = ResultError) -> None:
    """Refuse to read what is there and is no regular file: a pipe waits for a writer, a device may never end.

    Symbolic links are followed. What is not there is left to whoever opens it.

    Raises:
        error: a folder, pipe, socket or device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a pipe, socket or device"
        raise error(f"{path} is {what}, where a file is to be read; only regular files are read.")


def check_regular_files(folder: str | Path, error: type[RotquantError] = ResultError) -> None:
    """`check_regular` of everything in a folder but folders, for libraries that open what they find there."""
    if os.path.isdir(folder):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_dir():
                check_regular(entry.path, error)


def file_inside(folder: str | Path, name: object, where: object, error: type[RotquantError] = ResultError) -> Path:
    """The path of a file that another file names, which must lie in a folder by its name; links there may lead out.

    Args:
        where: the file, or the key of one, that names it, for the sentence.

    Raises:
        error: the name is no text, is absolute, or goes up with `..`.
    """
    parts = PurePath(name).parts if isinstance(name, str) and name.isprintable() else ()
    if not parts or PurePath(str(name)).is_absolute() or ".." in parts:
        raise error(f"{where} names the file {str(name)[:100]!r}: write a relative path below {folder}, without '..'.")
    if max(map(len, parts)) > _LONGEST_NAME or len(str(name)) > _LONGEST_PATH:
        raise error(f"{where} names the file {str(name)[:100]!r}...: no file has so long a name.")
    return Path(folder) / str(name)


def folder_size(folder: str | Path, pattern: str = "*") -> int:
    """Bytes of the files in a folder; 0 where it is not there."""
    return sum(file.stat().st_size for file in Path(folder).glob(pattern) if file.is_file())


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of the file `path`; it replaces `path` when the block ends without an exception.

    A symbolic link is followed: what it leads to is written. The file's mode is that of any new file.

    Raises:
        ResultError: the block or the replacing failed because the disk is full or cannot be written.
    """
    with _sibling(path) as (target, temporary), _claimed(temporary, _new_file) as handle:
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            yield temporary
            temporary.chmod(mode)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling folder; it takes the place of the folder `path` when the block ends well.

    An existing folder is moved aside first and removed last, so an interruption never leaves a half-written one. A
    symbolic link is followed. The modes of the folder and its files are those of new ones.

    Raises:
        ResultError: the block or the replacing failed because the disk is full or cannot be written.
    """
    with _sibling(path) as (target, temporary), _claimed(temporary, _new_folder) as handle:
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            yield temporary
            for inside in temporary.rglob("*"):
                inside.chmod(mode if inside.is_dir() else mode & 0o666)
            if target.exists():
                aside = _temporary(target)
                target.replace(aside)
                temporary.replace(target)
                shutil.rmtree(aside, ignore_errors=True)
            else:
                temporary.replace(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def folder_beside(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, on the same disk, and remove it: for what is moved to `path` from there.

    Raises:
        ResultError: the block failed because the disk is full or cannot be written.
    """
    with _sibling(path) as (_, temporary), _claimed(temporary, _new_folder):
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(path: str | Path, target: Path, kind: OutputKind) -> None:
    """Refuse to replace what is of another kind, saying what it is, unless it is `replacing`."""
    if target in _replaceable.get():
        return
    files = [file for file in target.rglob("*") if file.is_file()] if target.is_dir() else [target]
    size = sum(file.stat().st_size for file in files)
    there = f"{len(files)} files of {size:,} bytes" if target.is_dir() else f"a file of {size:,} bytes"
    raise ResultError(
        f"{path} exists and is not {kind.what}; name another place, or pass --force to replace what is there, {there}."
    )


def _read_places(inputs: Iterable[str | Path]) -> Iterator[tuple[Path, Path]]:
    """Yield what is read, as it is named and where it leads: files, folders, and what links in these lead to."""
    for given in map(Path, inputs):
        yield given, _target(given)
        links = given.iterdir() if given.is_dir() else ()
        yield from ((link, _target(link)) for link in links if link.is_symlink())


def _target(path: str | Path) -> Path:
    """Where a path leads, through symbolic links."""
    return Path(os.path.realpath(path))


def _is_special(path: str | Path) -> bool:
    """Whether a path names a device, a pipe or a stream of a process, redirected or not, or what is no file at all."""
    place = Path(path)
    if place.absolute().parts[:2] in (("/", "dev"), ("/", "proc")) and place.absolute().parts[2:3] != ("shm",):
        return True
    return place.exists() and not (place.is_file() or place.is_dir())


def _check_writable(folder: Path, path: str | Path) -> Path:
    """The folder, or the nearest one around it that exists, after a trial that leaves nothing there."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        raise ResultError(f"{path} cannot be written: {existing} is a file; name another place.")
    try:
        with tempfile.TemporaryFile(dir=existing) as trial:
            trial.write(bytes(4096))
    except OSError as error:
        raise ResultError(f"{path} cannot be written ({existing}: {error.strerror}); name another place.") from None
    return existing


@contextlib.contextmanager
def _sibling(path: str | Path) -> Iterator[tuple[Path, Path]]:
    """Return the file to write, links followed, and a free name in the same folder; a full disk becomes a sentence."""
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_strays(target)
        yield target, _temporary(target)
    except Exception as error:
        number = _error_number(error) or (error.__cause__ and _error_number(error.__cause__))
        if number not in _FAILURES:
            raise
        sentence = f"{path} could not be written: {os.strerror(number)}; make room or name another place."
        raise ResultError(sentence) from error


def _temporary(target: Path) -> Path:
    return target.with_name(f"{_prefix(target)}{uuid.uuid4().hex[:12]}")


def _prefix(target: Path) -> str:
    return f".tmp-{target.name[:100]}-"


def _new_file(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less what the umask takes


def _new_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY)


@contextlib.contextmanager
def _claimed(temporary: Path, make: Callable[[Path], int]) -> Iterator[int]:
    """Make a temporary file or folder, locked for as long as the block runs: what is not locked is a stray."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # taken for a stray before it was locked, and removed
            handle = make(temporary)
            with contextlib.suppress(OSError):  # a file system without locks, where no stray is removed
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)
    try:
        yield handle
    finally:
        os.close(handle)


def _remove_strays(target: Path) -> None:
    """Remove what processes that were killed have left of writing `target`: the system has dropped their locks."""
    for stray in target.parent.glob(f"{glob.escape(_prefix(target))}*"):
        with contextlib.suppress(OSError):
            handle = os.open(stray, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
            finally:
                os.close(handle)


def _error_number(error: BaseException) -> int | None:
    """The system's number of an error; safetensors has it in its text, and numpy means a full disk by its text."""
    match = re.search(r"\(os error (\d+)\)|\d+ requested and \d+ written", str(error))
    if match:
        return int(match[1]) if match[1] else errno.ENOSPC
    return getattr(error, "errno", None)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """A block that one process at a time is in, of all that name this lock file; each where it cannot be made.

    The lock goes with the process.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a full disk only costs time
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def cache_folder(name: str) -> Path:
    """A folder for what can be made again, in $ROTQUANT_CACHE, $XDG_CACHE_HOME/rotquant or ~/.cache/rotquant.

    Where that cannot be written, as in a container without a home, it is a temporary folder of this process.
    """
    try:
        chosen = os.environ.get("ROTQUANT_CACHE")
        root = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotquant"
        (root / name).mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter where there is no home
        return _temporary_cache() / name
    return root / name if os.access(root / name, os.W_OK) else _temporary_cache() / name


@functools.cache
def _temporary_cache() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rotquant-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_text(path: str | Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically; NaN and infinities become their names as strings."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented JSON; NaN and infinities become their names as strings."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(
    path: str | Path, what: str = "file", error: type[RotquantError] = ResultError, remedy: str | None = None
) -> Any:
    """Read JSON that this project or another wrote.

    Args:
        what: it is, and `remedy`: what to do where it is damaged, for the sentence. By default results are to be
            deleted and computed again, and all else, which somebody brought, is to be copied again.

    Raises:
        error: the file is missing, damaged or no regular file.
    """
    path = Path(path)
    check_regular(path, error)
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise error(f"{what} {path} does not exist.") from None
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}.") from None
    except ValueError as problem:
        raise error(f"{what} {path} is damaged ({problem}); {remedy or _remedy(error)}.") from None


def _remedy(error: type[RotquantError]) -> str:
    """What to do with a damaged file: results are ours, and can be computed again."""
    return _RECOMPUTE if issubclass(error, ResultError) else "copy it again"


def read_text(path: str | Path, what: str = "file", remedy: str = _RECOMPUTE) -> str:
    """Read a text in UTF-8.

    Raises:
        ResultError: it is missing, damaged or no regular file.
    """
    check_regular(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultError(f"{what} {path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise ResultError(f"{what} {path} is damaged ({error}); {remedy}.") from None


def read_object(
    path: str | Path, what: str = "file", error: type[RotquantError] = ResultError, remedy: str | None = None
) -> dict[str, Any]:
    """`read_json` of a file that holds an object; anything else is damage too."""
    data = read_json(path, what, error, remedy)
    if not isinstance(data, dict):
        raise error(f"{what} {path} is damaged (it is no JSON object); {remedy or _remedy(error)}.")
    return data


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN. Equal values have equal texts, hence equal keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def short_hash(text: str, length: int = 16) -> str:
    """The first `length` hexadecimal digits of the SHA-256 of `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: str | Path) -> str | None:
    """The first 16 hexadecimal digits of a file's SHA-256; None where there is no file."""
    path = Path(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def _finite(value: Any) -> Any:
    """Replace non-finite floats by "inf", "-inf", "nan" so that the file stays standard JSON."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
