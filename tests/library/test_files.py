"""Files are whole or absent, and JSON keys are canonical."""

import errno
import math
import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rotquant.foundation.errors import ConfigError, ResultError
from rotquant.foundation.files import (
    OutputKind,
    atomic_directory,
    atomic_path,
    cache_folder,
    canonical_json,
    check_output_file,
    check_output_folder,
    check_regular,
    check_regular_files,
    file_inside,
    folder_beside,
    has_keys,
    read_json,
    write_json,
    write_text,
)

MODEL = OutputKind("a model", has_keys("kind", marker="marker"))


def fail_halfway(context, name: str | None, failure: Exception | None = None):
    with context as path:
        (path / name if name else path).write_text("half")
        raise failure or RuntimeError("killed")


def test_a_failed_write_leaves_the_earlier_file_and_no_litter(tmp_path):
    file = tmp_path / "result.json"
    write_json(file, {"value": 1})
    with pytest.raises(RuntimeError):
        fail_halfway(atomic_path(file), None)
    assert read_json(file) == {"value": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_failed_directory_leaves_the_earlier_one_and_no_litter(tmp_path):
    folder = tmp_path / "weights"
    with atomic_directory(folder) as path:
        (path / "a").write_text("whole")
    with pytest.raises(RuntimeError):
        fail_halfway(atomic_directory(folder), "b")
    assert [entry.name for entry in folder.iterdir()] == ["a"]
    with atomic_directory(folder) as path:
        (path / "c").write_text("new")
    assert [entry.name for entry in folder.iterdir()] == ["c"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("write", [atomic_path, atomic_directory, folder_beside])
def test_what_a_killed_process_left_is_removed_and_what_is_being_written_stays(tmp_path, write):
    target = tmp_path / "result"
    child = os.fork()
    if child == 0:
        with write(target):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [entry.name[:12] for entry in tmp_path.iterdir()] == [".tmp-result-"]
    with write(target) as first:
        assert [*tmp_path.iterdir()] == [first]
        with atomic_path(target) as second:
            assert {*tmp_path.iterdir()} == {first, second}
        target.unlink()
    assert [entry for entry in tmp_path.iterdir() if entry != target] == []


def test_a_link_is_followed_to_the_file_that_it_means(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/result.txt")
    write_text(tmp_path / "link", "first")  # the link dangles
    write_text(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "result.txt").read_text() == "second"


def test_a_link_is_followed_to_the_folder_that_it_means(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/model")
    with atomic_directory(tmp_path / "link") as folder:
        (folder / "weights").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "model" / "weights").read_text() == "new"
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_what_is_written_has_the_modes_that_the_umask_leaves(tmp_path, umask, file, folder):
    earlier = os.umask(umask)
    try:
        with atomic_path(tmp_path / "weights.safetensors") as temporary:
            save_file({"weight": torch.zeros(2)}, temporary)  # which makes its files 0600
        with atomic_directory(tmp_path / "model") as temporary:
            (temporary / "inside").mkdir()
            save_file({"weight": torch.zeros(2)}, temporary / "inside" / "weights.safetensors")
    finally:
        os.umask(earlier)
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.rglob("*")}
    assert modes == {"weights.safetensors": file, "model": folder, "inside": folder}
    assert (tmp_path / "model/inside/weights.safetensors").stat().st_mode & 0o777 == file


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError("1048576 requested and 4096 written"),  # numpy's
    ],
)
def test_a_disk_that_is_full_halfway_is_a_sentence_and_leaves_the_earlier_files(tmp_path, failure):
    with atomic_directory(tmp_path / "model") as folder:
        (folder / "weights").write_text("earlier")
    sentence = "model could not be written: No space left on device; make room or name another place."
    with pytest.raises(ResultError, match=sentence):
        fail_halfway(atomic_directory(tmp_path / "model"), "weights", failure)
    sentence = "weights could not be written: No space left on device"
    with pytest.raises(ResultError, match=sentence):
        fail_halfway(atomic_path(tmp_path / "model" / "weights"), None, failure)
    assert [entry.relative_to(tmp_path).as_posix() for entry in tmp_path.rglob("*")] == ["model", "model/weights"]
    assert (tmp_path / "model" / "weights").read_text() == "earlier"


def test_a_file_cannot_take_the_place_of_a_folder_a_stream_or_a_pipe(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)
        server.bind("socket")
    for path, problem in [
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "file" / "below", "file is a file; name another place"),
        (tmp_path / "pipe", "is a device or pipe"),
        (tmp_path / "socket", "is a device or pipe"),
        (Path("/dev/stdout"), "is a device or pipe"),
        (Path("/dev/null"), "is a device or pipe"),
        (Path("/proc/self/fd/1"), "is a device or pipe"),
    ]:
        with pytest.raises(ResultError, match=problem):
            check_output_file(path)
    check_output_file(tmp_path / "file")
    check_output_file(tmp_path / "new" / "folders" / "file")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "pipe", "socket"]


def test_a_folder_cannot_take_the_place_of_what_is_not_its_like(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "model" / "inside").mkdir(parents=True)
    (tmp_path / "model" / "marker").write_text('{"kind": 1}')
    (tmp_path / "loop").symlink_to("loop")
    for path, problem in [
        (tmp_path / "file", "is a file, where a folder is to be written"),
        (tmp_path / "file" / "below", "file is a file; name another place"),
        (tmp_path, "is not a model; name another place, or pass --force"),
        (Path("/"), "is the working folder or around it"),
        (Path("/dev/null"), "is a file"),
    ]:
        with pytest.raises(ResultError, match=problem):
            check_output_folder(path, MODEL)
    with pytest.raises(ResultError, match="exists and is not empty"):
        check_output_folder(tmp_path / "model")
    for name in ("model", "empty", "new/folders"):
        check_output_folder(tmp_path / name, MODEL)
    monkeypatch.chdir(tmp_path / "model" / "inside")
    for path in (Path(), Path(".."), tmp_path / "model"):
        with pytest.raises(ResultError, match="is the working folder or around it"):
            check_output_folder(path, MODEL)


def test_a_place_that_is_read_only_or_too_small_is_refused(tmp_path, monkeypatch):
    check_output_folder(tmp_path / "new", needed=1000)
    with pytest.raises(ResultError, match=r"needs at least 1,000,000,000,000.0 MB, and .* has .* MB left"):
        check_output_folder(tmp_path / "new", needed=10**18)

    def refused(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("rotquant.foundation.files.tempfile.TemporaryFile", refused)
    for check in (check_output_file, check_output_folder):
        with pytest.raises(ResultError, match=r"new/x cannot be written \(.*: Read-only file system\)"):
            check(tmp_path / "new" / "x")


def test_non_finite_numbers_stay_standard_json(tmp_path):
    write_json(tmp_path / "x.json", {"perplexity": math.inf, "list": [math.nan, -math.inf]})
    assert read_json(tmp_path / "x.json") == {"perplexity": "inf", "list": ["nan", "-inf"]}


def test_a_damaged_file_is_named_with_the_remedy(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"metrics": ')
    with pytest.raises(ResultError, match=r"run file .*run\.json is damaged .*delete it"):
        read_json(file, "run file")
    with pytest.raises(ResultError, match="does not exist"):
        read_json(tmp_path / "absent.json", "run file")


def test_canonical_json_does_not_depend_on_order():
    assert canonical_json({"b": 1, "a": [1.0, None]}) == canonical_json({"a": [1.0, None], "b": 1})


def test_the_cache_is_where_the_user_says_and_temporary_where_it_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ROTQUANT_CACHE", raising=False)
    assert cache_folder("corpora") == tmp_path / "xdg" / "rotquant" / "corpora"
    monkeypatch.setenv("ROTQUANT_CACHE", str(tmp_path / "mine"))
    assert cache_folder("corpora") == tmp_path / "mine" / "corpora"
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROTQUANT_CACHE", str(tmp_path / "file"))
    assert cache_folder("corpora").is_relative_to(tempfile.gettempdir())
    assert cache_folder("corpora") == cache_folder("corpora")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to("pipe.json")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    write_json(tmp_path / "good.json", {})
    check_regular(tmp_path / "good.json")
    check_regular(tmp_path / "absent.json")
    for name, what in (("pipe.json", "a pipe"), ("link.json", "a pipe"), ("folder", "a folder")):
        with pytest.raises(ConfigError, match=f"{name} is {what}.*, where a file is to be read"):
            check_regular(tmp_path / name, ConfigError)
    with pytest.raises(ResultError, match="only regular files are read"):
        read_json(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match=r"link\.json is a pipe"):
        check_regular_files(tmp_path, ConfigError)
    for name in ("pipe.json", "link.json"):
        (tmp_path / name).unlink()
    check_regular_files(tmp_path, ConfigError)
    check_regular_files(tmp_path / "absent", ConfigError)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "..", ".", "", "a\0b", 3, None, ["a"]])
def test_a_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(ConfigError, match=r"index\.json names the file .*: write a relative path below inside"):
        file_inside("inside", name, "index.json", ConfigError)


@pytest.mark.parametrize("name", ["model.safetensors", "published/table 1.csv", "..dots", "a..b"])
def test_a_plain_name_lies_in_its_folder(name):
    assert file_inside("inside", name, "index.json") == Path("inside") / name
