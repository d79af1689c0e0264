"""A table of settings as a frame: one line per cell, what the recipe here says and what the paper prints."""

import pandas as pd
import pyarrow as pa

from reproduction.frame.values import to_frame
from reproduction.tables.settings import Settings

#: same: whether the two agree, and nothing where the paper prints nothing. reason: why they do not.
FIELDS = pa.schema(
    [
        *((name, pa.string()) for name in ("row", "column", "here", "published")),
        ("same", pa.bool_()),
        ("reason", pa.string()),
    ]
)


def settings_frame(settings: Settings) -> pd.DataFrame:
    """Every cell of a table."""
    lines = [(one.row, one.column, one.here, one.published, one.same, one.reason) for one in settings.cells]
    return to_frame(lines, FIELDS)
