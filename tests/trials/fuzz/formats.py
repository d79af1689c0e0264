"""What a format is to the fuzzing trial: a valid example, which of its files are changed, and who reads them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath


@dataclass(frozen=True)
class Format:
    """A format that the project reads.

    name: as figures call it. files: a valid example, content by path below the folder of a case.
    changed: the files that cases change, each with its kind (`documents.KINDS`; else bytes alone).
    read: reads the example as commands do, in its folder, which is the working folder; returns or raises.
    share: of the cases, relative to others; slow readers have less.
    rewritten: whether reading may write the file anew, to where a link leads: its cases have no links that lead out.
    names_places: whether the file is its user's own word, which may name any place and the hub.
    """

    name: str
    files: Mapping[str, bytes]
    changed: Mapping[str, str]
    read: Callable[[Path], object]
    share: float = 1.0
    names_places: bool = False
    rewritten: bool = False


def kinds(*paths: str) -> dict[str, str]:
    """Files with the kind that their suffix says."""
    return {path: PurePath(path).suffix.removeprefix(".").replace("yml", "yaml") for path in paths}


def content_of(folder: Path, *patterns: str) -> dict[str, bytes]:
    """The files of a folder that match, by path."""
    found = {path for pattern in patterns or ("**/*",) for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(found)}
