"""Header of a GGUF file, versions 2 and 3: its settings, and name, shape, type and place of each tensor.

The package gguf reads headers too, number by number: seconds for a large vocabulary, and longer than anybody waits for
a damaged length. Here no length is believed beyond the file's end. No tensor's data is read, and
neither torch nor numpy loaded, before somebody asks for numbers.
"""

import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation.contents import stamp
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import check_regular

if TYPE_CHECKING:
    import numpy as np

MAGIC, SUFFIX = b"GGUF", ".gguf"
_COPY = "copy it again"
#: struct's letters of GGUF's scalar types, by their numbers; 8 is text, 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
#: Most dimensions of a tensor.
_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file.

    shape: torch's order, rows before columns. kind: gguf's name of its type. start, size: its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors.

    fields: settings by key; a number of float32 is the shortest decimal that it rounds.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def values(self, name: str) -> "np.ndarray":
        """A tensor as float32, by its rows as `shape` has them."""
        gguf, stored = library(), self.tensors[name]
        return gguf.quants.dequantize(self.rows(name), gguf.GGMLQuantizationType[stored.kind]).reshape(stored.shape)

    def rows(self, name: str) -> "np.ndarray":
        """The bytes of a tensor, uint8 [rows, bytes of a row], not read before they are used."""
        import numpy as np

        stored = self.tensors[name]
        data = np.memmap(self.path, np.uint8, "r", stored.start, (stored.size,))
        return data.reshape(prod(stored.shape[:-1]), -1)


def library() -> Any:
    """The package gguf.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return import_module("gguf")
    except ImportError:
        raise CheckpointError("GGUF files take the package gguf: pip install 'rotquant[serve]'.") from None


def is_gguf(path: str | Path) -> bool:
    """Whether a path is a file that is named or begins as a GGUF file."""
    place = Path(path)
    if not place.is_file():
        return False
    with suppress(OSError), place.open("rb") as file:
        return place.suffix.lower() == SUFFIX or file.read(len(MAGIC)) == MAGIC
    return False


def read_header(path: str | Path) -> Header:
    """The header of a GGUF file, whose tensors all lie within the file.

    Raises:
        CheckpointError: it is no GGUF file, truncated, damaged, of another version or byte order, or has a tensor of a
            type that the package gguf does not know.
    """
    place = Path(path)
    check_regular(place, CheckpointError)
    if not place.is_file():
        raise CheckpointError(f"GGUF file {path} does not exist.")
    return _read(place, str(stamp(place)))


@lru_cache(4)
def _read(path: Path, _stamp: str) -> Header:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path} is no GGUF file: it does not begin with GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _parse(path, _Cursor(content))
            except (ValueError, OverflowError, MemoryError, struct.error) as error:
                raise CheckpointError(f"{path} is truncated or damaged ({error}); {_COPY}.") from None


class _Cursor:
    """A place in a file that reads on from it."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.place = content, len(MAGIC)

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.place:
            raise ValueError("it ends within its header")
        self.place += size
        return self.content[self.place - size : self.place]

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self.take(struct.calcsize(letter)))
        return _shortest(value) if letter == "f" else value

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            return self._list()
        if kind not in _SCALARS:
            raise ValueError(f"a setting of type {kind}, which GGUF has not")
        return self.number(_SCALARS[kind])

    def _list(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            letter = f"<{count}{_SCALARS[kind]}"
            return [*struct.unpack(letter, self.take(count * struct.calcsize(f"<{_SCALARS[kind]}")))]
        if kind != _TEXT:
            raise ValueError("a list of lists, which no language model has")
        return [self.text() for _ in range(count)]


def _shortest(value: float) -> float:
    """The number of the fewest decimal digits that float32 rounds to a value of its own."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next((float(text) for text in texts if struct.pack("f", float(text)) == struct.pack("f", value)), value)


def _parse(path: Path, at: _Cursor) -> Header:
    version = at.number("I")
    if version not in (2, 3):
        other = "of the other byte order" if version & 0xFFFF == 0 else f"of version {version}"
        raise CheckpointError(f"{path} is a GGUF file {other}, and versions 2 and 3 are read: convert it anew.")
    tensors, settings = at.number("Q"), at.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(settings):
        key = at.text()
        if key in fields:
            raise ValueError(f"the setting {key[:100]!r} twice")
        fields[key] = at.value(at.number("I"))
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, dimensions = at.text(), at.number("I")
        if name in found or not 1 <= dimensions <= _DIMENSIONS:
            raise ValueError(f"the tensor {name} twice, or of {dimensions} dimensions")
        shape = tuple(at.number("Q") for _ in range(dimensions))[::-1]
        found[name] = (shape, at.number("I"), at.number("Q"))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"an alignment of {alignment}")
    begin = -(-at.place // alignment) * alignment
    stored = {name: _stored(name, *entry, begin) for name, entry in found.items()}
    end = max((one.start + one.size for one in stored.values()), default=begin)
    if end > len(at.content):
        raise CheckpointError(
            f"{path} is truncated: {len(at.content):,} bytes where its header promises {end:,}; {_COPY}."
        )
    return Header(path, fields, stored)


def _stored(name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int) -> StoredTensor:
    gguf = library()
    try:
        known = gguf.GGMLQuantizationType(kind)
        weights, size = gguf.GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"the tensor {name} is of type {kind}, which this version of the package gguf does not know: update it."
        ) from None
    if not all(shape) or shape[-1] % weights:
        raise ValueError(f"the tensor {name} of {list(shape)} weights, in blocks of {weights}")
    return StoredTensor(shape, known.name, begin + offset, prod(shape) // weights * size)
