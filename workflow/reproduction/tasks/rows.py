"""Rows of data files, JSON or parquet, and schemas to check them by; an error names the file and the row."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator

from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import check_regular
from rotquant.foundation.parsing import parse_json

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The file types of data, and the builder of the `datasets` library that reads each."""


def schema(check: Callable[[Any], str | None] = lambda _: None, **fields: Any) -> type[BaseModel]:
    """A schema of rows: the type of each field, without conversions; other fields are ignored.

    Args:
        check: what is wrong with a row whose fields have these types; None where nothing is.
    """

    def checked(row: Any) -> Any:
        if problem := check(row):
            raise ValueError(problem)
        return row

    typed: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    validators: Any = {"checked": model_validator(mode="after")(checked)}
    config = ConfigDict(strict=True, extra="ignore")
    return create_model("Row", __config__=config, __validators__=validators, **typed)


def checked_rows(file: Path, row: type[BaseModel]) -> list[dict[str, Any]]:
    """All rows of a data file, each of which fits a schema.

    A .json file is one list of rows, or has one row in each line as a .jsonl file.

    Raises:
        TaskError: the file cannot be read, or a row is no JSON in UTF-8 or does not fit.
    """
    found = []
    for place, data in _rows(file):
        try:
            row.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            what = f"field {field!r}: " if field else ""
            raise TaskError(f"{file}, {place}, {what}{first['msg'].removeprefix('Value error, ')}.") from None
        found.append(data)
    return found


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each after its place: `line 3`, or `row 3` of a list."""
    check_regular(file, TaskError)
    try:
        content = _parquet(file) if file.suffix == ".parquet" else file.read_bytes()
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise TaskError(f"{file} cannot be read ({error}).") from None
    if isinstance(content, bytes) and not content.lstrip().startswith(b"["):
        # in JSON a string may hold every other mark that Python splits lines at
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                yield f"line {number}", _parsed(line, f"{file}, line {number}")
    else:
        rows = _parsed(content, str(file)) if isinstance(content, bytes) else content
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()


def _parsed(content: bytes, place: str) -> Any:
    try:
        return parse_json(content)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if b"\n" in content.strip() else f"column {error.colno}"
        raise TaskError(f"{place} is no JSON ({where}: {error.msg}).") from None
    except ValueError as error:  # not UTF-8, a number of too many digits, lists in lists in lists
        raise TaskError(f"{place} cannot be read ({error}).") from None
