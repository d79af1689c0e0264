"""A speed table's numbers as a frame: one line per cell and GPU, ours and the paper's, in SI units."""

import pandas as pd
import pyarrow as pa

from reproduction.frame.values import COMPUTED, PUBLISHED, to_frame
from reproduction.render.speed.numbers import Measured

#: origin: computed on this machine, recorded on another, or published; none before anything was measured.
#: missing: why there is no value of ours.
FIELDS = pa.schema(
    [
        *((name, pa.string()) for name in ("grid", "row", "column", "gpu", "origin", "unit")),
        *((name, pa.float64()) for name in ("value", "low", "high", "ratio")),
        ("missing", pa.string()),
    ]
)


def speed_frame(measured: Measured) -> pd.DataFrame:
    """Every cell of a table, measured or not, and what the paper prints beside it."""
    source, numbers = measured
    gpu = None if source is None else source.record.gpu
    origin = None if source is None else "recorded" if source.recorded else COMPUTED
    lines = []
    for place, number in numbers.items():
        one = number.ours
        unit = None if one is None else one.unit
        ours = (None, None, None) if one is None else (one.value, one.low, one.high)
        lines.append((*place, gpu, origin, unit, *ours, number.ratio, number.missing))
        for paper in number.papers:
            lines.append((*place, paper.gpu, PUBLISHED, unit, paper.value, None, None, paper.ratio, None))
    return to_frame(lines, FIELDS)
