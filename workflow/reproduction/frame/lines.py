"""A table's numbers as a frame with the same columns for every source, written as CSV and Parquet.

inf and nan are results; an empty field means no number.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rotquant.foundation.files import atomic_path, write_text

#: Origin of a line's number: `COMPUTED` here, recorded on another machine's device, or `PUBLISHED` by the paper alone.
COMPUTED, RECORDED, PUBLISHED = "computed", "recorded", "published"

#: Fields of a line. text, published_text: non-numeric results; same: whether the two agree. deviation: over seeds;
#: low, high: percentiles of replays; ratio: to the grid's baseline. device: where it was measured; run: run key.
#: note: why there is no number, why it is not as printed, or where it was found.
FIELDS = {
    **dict.fromkeys(("grid", "row", "column", "quantity", "device", "origin", "unit"), pa.string()),
    "seed": pa.int64(),
    **dict.fromkeys(("value", "mean", "deviation", "standard_error", "low", "high", "ratio"), pa.float64()),
    **dict.fromkeys(("published", "published_deviation"), pa.float64()),
    **dict.fromkeys(("run", "text", "published_text", "note"), pa.string()),
    "same": pa.bool_(),
}


#: Texts that a spreadsheet would calculate, with the apostrophes that keep it from that; a number or a dash is none.
_FORMULA = re.compile(r"'*([=@\t\r]|[+-](?!$|[0-9.]+(e[+-]?[0-9]+)?$))")


def to_frame(lines: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pd.DataFrame:
    """Convert lines to a frame with these of `FIELDS`; nan is a number, None means no number."""
    fields = pa.schema([(name, FIELDS[name]) for name in names])
    columns = zip(*lines, strict=True) if lines else [[] for _ in fields]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.Table.from_arrays(arrays, schema=fields).to_pandas(types_mapper=pd.ArrowDtype)


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as CSV, numbers with all digits, and as Parquet next to it; each file is whole or absent."""
    with atomic_path(path.with_suffix(".parquet")) as temporary:
        frame.to_parquet(temporary, index=False)
    write_text(path.with_suffix(".csv"), as_csv(frame))


def as_csv(frame: pd.DataFrame) -> str:
    """A frame as CSV, numbers with all digits.

    A spreadsheet takes a text that begins with =, +, - or @ for a formula, so an apostrophe stands before it.
    """
    texts = {
        name: frame[name].map(_literal, na_action="ignore").astype(frame[name].dtype)
        for name in frame
        if pd.api.types.is_string_dtype(frame[name])
    }
    return frame.assign(**texts).to_csv(index=False)


def _literal(text: str) -> str:
    return f"'{text}" if _FORMULA.match(text) else text
