"""Rows of data in files of JSON, each with where it stands, so that whoever finds it wrong can say so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import check_regular
from rotquant.foundation.parsing import parse_json


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file with one per line, each after the line that it stands in, as `line 3`.

    Raises:
        TaskError: the file cannot be read; a line is not UTF-8 or no JSON. It names the file and the line.
    """
    check_regular(file, TaskError)
    try:
        lines = file.read_bytes().split(b"\n")  # in JSON a string may hold every other mark that Python splits at
    except OSError as error:
        raise TaskError(f"{file} cannot be read ({error.strerror}).") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"line {number}", _parsed(line, f"{file}, line {number}")


def json_list(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file that is one list, each after its place in it, as `row 3`. Raises as `json_lines` does."""
    rows = _parsed(file.read_bytes(), str(file))
    if not isinstance(rows, list):
        raise TaskError(f"{file} holds no list of rows.")
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def _parsed(content: bytes, place: str) -> Any:
    try:
        content.decode("utf-8")
        return parse_json(content)
    except UnicodeDecodeError as error:
        raise TaskError(f"{place} is not UTF-8 (byte {error.start + 1}).") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if b"\n" in content.strip() else f"column {error.colno}"
        raise TaskError(f"{place} is no JSON ({where}: {error.msg}).") from None
    except ValueError as error:  # a number of too many digits, lists in lists in lists
        raise TaskError(f"{place} cannot be read ({error}).") from None
