"""Records: the measurements of a speed table on a named GPU, with everything needed to judge and repeat them.

A record is one JSON file per table, rewritten after each cell; results/bench/<gpu>/ holds the committed ones. A cell
holds numbers or the reason why it has none. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, read_json, short_hash, write_json

BENCH = Path("results/bench")
SPEED = Path("results/speed")


@dataclass(frozen=True)
class Measurement:
    """One number with its unit (SI: s, B, op) and, if it was timed, its spread.

    value: the median. low, high: 10th and 90th percentile of the replays, None for numbers without spread.
    """

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    unit: str
    low: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    high: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    replays: int | None = None
    calls_per_replay: int | None = None

    @classmethod
    def timed(cls, ordered: Sequence[float], calls: int) -> "Measurement":
        """Seconds of a call from the sorted seconds of replays, each already divided by the replay's `calls`."""
        tenth = (len(ordered) - 1) // 10
        return cls(ordered[len(ordered) // 2], "s", ordered[tenth], ordered[-1 - tenth], len(ordered), calls)

    def over(self, parts: int) -> "Measurement":
        """A timing of one of the equal parts of a call, such as the tokens that it processes."""
        low, high = (end and end / parts for end in (self.low, self.high))
        return replace(self, value=self.value / parts, low=low, high=high)

    @property
    def spread(self) -> float | None:
        """Half the distance between the percentiles, relative to the median."""
        if self.low is None or self.high is None or not self.value:
            return None
        return (self.high - self.low) / 2 / self.value


class CellRecord(Frozen):
    """One cell: a benchmark with its arguments, and either quantities or the reason why there are none.

    code: digest of the kernels and modules that were measured. sitting: number of the sitting in the record.
    seconds: wall time of the measurement, set-up included.
    """

    benchmark: str
    arguments: dict[str, Any]
    code: str
    sitting: int = Field(ge=0)
    seconds: float
    quantities: dict[str, Measurement] = Field(default_factory=dict)
    missing: str | None = None

    @model_validator(mode="after")
    def _numbers_or_a_reason(self) -> "CellRecord":
        if bool(self.quantities) == bool(self.missing):
            raise ValueError("a cell holds either quantities or the reason why it has none")
        if "seconds" in self.quantities and not self.quantities["seconds"].value:
            raise ValueError("nothing takes no time")
        cell_key(self.benchmark, self.arguments)  # raises ValueError for nan and inf
        return self

    @property
    def key(self) -> str:
        """The key of the measurement, see `cell_key`."""
        return cell_key(self.benchmark, self.arguments)


class _Environment(Frozen):
    """What pages print of a sitting's environment."""

    model_config = ConfigDict(extra="ignore")

    versions: dict[str, str | None] = Field(default_factory=dict)
    git_commit: str | None = None
    identified: dict[str, str] | None = None


def _printable(environment: Any) -> Any:
    _Environment.model_validate(environment)
    return environment


class Sitting(Frozen):
    """One uninterrupted series of measurements: the conditions, and the state of the GPU before and after."""

    environment: Annotated[dict[str, Any], BeforeValidator(_printable)]
    gpu_before: dict[str, Any]
    gpu_after: dict[str, Any] | None = None


class Record(Frozen):
    """All measured cells of one table on one GPU."""

    table: str
    gpu: str
    sittings: tuple[Sitting, ...]
    cells: tuple[CellRecord, ...]

    @model_validator(mode="after")
    def _cells_have_sittings(self) -> "Record":
        if any(cell.sitting >= len(self.sittings) for cell in self.cells):
            raise ValueError("a cell is of a sitting that is not there")
        return self

    @property
    def by_key(self) -> dict[str, CellRecord]:
        """The cells by key."""
        return {cell.key: cell for cell in self.cells}


def cell_key(benchmark: str, arguments: dict[str, Any]) -> str:
    """The key of a measurement on one machine: benchmark and complete arguments."""
    return short_hash(canonical_json([benchmark, arguments]))


def gpu_folder(name: str) -> str:
    """The folder of a GPU's records: nvidia-h200 for "NVIDIA H200"."""
    return "-".join(name.lower().split())


def write_record(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_json(path, record.model_dump(mode="json", exclude_none=True))


def read_record(path: Path, table: str) -> Record:
    """Read the record of a table.

    Raises:
        ResultError: it is missing, damaged or for another table.
    """
    data = read_json(path, "record")
    try:
        record = Record.model_validate(data)
    except ValidationError as error:
        raise ResultError(f"record {path} is damaged ({first_problem(error)}); measure it again.") from None
    if record.table != table:
        raise ResultError(f"record {path} is of {record.table}, not of {table}.")
    return record


def record_path(root: Path, table: str) -> Path | None:
    """The path of a table's record, relative to the project; None when it was never measured.

    Raises:
        ResultError: a committed record is damaged.
    """
    own = SPEED / f"{table}.json"
    return own if (root / own).exists() else committed_path(root, table)


def committed_path(root: Path, table: str) -> Path | None:
    """The newest committed record of a table, relative to the project; None when there is none.

    Raises:
        ResultError: one of several is damaged.
    """
    found = list(committed(root, table).values())
    if not found:
        return None
    return max(found, key=lambda path: _date(read_record(path, table))).relative_to(root)


def _date(record: Record) -> str:
    return max((str(sitting.environment.get("date", "")) for sitting in record.sittings), default="")


def committed(root: Path, table: str) -> dict[str, Path]:
    """The committed records of a table by their GPU's folder."""
    return {path.parent.name: path for path in sorted((root / BENCH).glob(f"*/{table}.json"))}
