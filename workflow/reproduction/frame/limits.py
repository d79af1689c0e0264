"""Distance of kernels from their limits: bytes and operations over time, and the GPU's measured ceilings.

The floor of a kernel is the larger of two times: its fewest bytes at the speed of a large copy, and its operations at
the rate of the number format that it multiplies in (Williams et al. 2009, the roofline). It is shown for tables that
measured their own ceilings.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reproduction.benchmarks.records import CellRecord
from reproduction.frame.speed import SpeedNumbers, SpeedPlace
from reproduction.tables.speed.definitions import SpeedTable

CEILING = "ceiling"

#: Ceilings in bytes per second, and the benchmarks that mostly read.
MEMORY = ("copy", "read")
_READING = ("linear", "decode_attention")

#: The number format of an implementation's multiplications; others are bound by memory alone.
FORMATS = {
    **dict.fromkeys(("fp16", "w16a4", "w2a16", "w4a16", "int4pack"), "fp16"),
    **dict.fromkeys(("marlin", "machete", "humming-w4a16", "humming-w2a16"), "fp16"),
    "bf16": "bf16",
    **dict.fromkeys(("fp8", "fp8-tensor", "cutlass-fp8"), "fp8"),
    **dict.fromkeys(("int8", "int4", "int4-grouped", "int4-a8", "w2a4"), "int8"),
    **dict.fromkeys(("cutlass-int8", "humming-w4a8", "humming-w4a4"), "int8"),
}


@dataclass(frozen=True)
class Point:
    """A measured kernel on the roofline: seconds, fewest bytes, operations, the number format of its
    arithmetic, and the memory ceiling that it is held against."""

    place: SpeedPlace
    seconds: float
    bytes: float
    operations: float
    arithmetic: str | None
    memory: str = "copy"

    def floor(self, ceilings: Mapping[str, float]) -> tuple[float, str]:
        """The least time, and its limit: "memory" or "arithmetic"."""
        memory = self.bytes / ceilings.get(self.memory, ceilings["copy"])
        rate = ceilings.get(self.arithmetic or "")
        multiplying = self.operations / rate if rate else 0.0
        return (memory, "memory") if memory >= multiplying else (multiplying, "arithmetic")


def ceilings(table: SpeedTable, numbers: SpeedNumbers) -> dict[str, float]:
    """Measured rates of the GPU: bytes per second (copy, read), operations per second by format; empty without any."""
    found: dict[str, float] = {}
    for number in numbers.values():
        record = number.record
        if record is not None and record.benchmark == CEILING and record.missing is None:
            what = str(record.arguments["what"])
            amount = record.quantities["bytes" if what in MEMORY else "operations"].value
            found[what] = amount / record.quantities["seconds"].value
    return found | {name: max(rate, found[name]) for name, rate in table.ceilings.items() if name in found}


def points(table: SpeedTable, numbers: SpeedNumbers) -> list[Point]:
    """Every measured cell with known bytes, of calls that follow each other."""
    timed = {grid.name for grid in table.grids if not grid.timeless}
    several = ((place, number.record) for place, number in numbers.items() if place[0] in timed)
    return [
        _point(place, record)
        for place, record in several
        if record is not None
        and record.benchmark != CEILING
        and {"seconds", "bytes"} <= set(record.quantities)
        and "regime" not in record.arguments
    ]


def _point(place: SpeedPlace, record: CellRecord) -> Point:
    quantities = record.quantities
    operations = quantities["operations"].value if "operations" in quantities else 0.0
    attends = record.benchmark == "decode_attention"  # on dequantized keys and values
    which = "fp16" if attends else FORMATS.get(str(record.arguments.get("implementation")))
    memory = "read" if record.benchmark in _READING else "copy"
    return Point(place, quantities["seconds"].value, quantities["bytes"].value, operations, which, memory)
