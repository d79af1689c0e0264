"""Rows of a data file of this machine, one after the other: JSON (a list, or a row on each line) and Parquet.

Read here and not by the `datasets` library, which tells the hub of each local file that it opens, and whose parser of
JSON a damaged file can crash with the process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rotquant.foundation.parsing import broken_line, parse_json

SUFFIXES = (".parquet", ".json", ".jsonl")


def data_rows(file: Path) -> Iterator[Any]:
    """The rows of a file that has one of `SUFFIXES`.

    Raises:
        ValueError: it is damaged; what is wrong, as the end of a sentence.
        OSError: it cannot be read.
    """
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    with file.open("rb") as lines:
        if lines.read(1 << 16).lstrip().startswith(b"["):
            lines.seek(0)
            yield from _list(parse_json(lines.read()))
            return
        lines.seek(0)
        for line in filter(bytes.strip, lines):
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(broken_line(file) or str(error)) from None
            yield row


def _list(rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise ValueError("it holds no list of rows")
    return rows


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())[:200].rstrip(".")) from None
