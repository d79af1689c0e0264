"""A speed table measured on the GPU of this machine, cell by cell, into a record that grows as cells are finished.

A process that is killed keeps the cells it has finished; started again, it measures the rest. A cell measured by other
code is measured anew. The functions of `registry` do the work; nothing here knows what they time.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rotquant.bench.records import CellRecord, Measurement, Record, Sitting, read_record, write_record
from rotquant.bench.registry import find
from rotquant.bench.timing import gpu_state
from rotquant.errors import KernelError, ResultError, RotquantError
from rotquant.provenance import environment, kernels_digest
from rotquant.schemes import Frozen
from rotquant.speed.definitions import Cell, SpeedTable, matches

Progress = Callable[[int, int, Cell, str], None]
"""Called after each cell with its number, how many there are, the cell, and its outcome in words."""


def measure(
    table: SpeedTable,
    output: Path,
    *,
    root: Path = Path(),
    patterns: tuple[str, ...] = ("*",),
    quick: bool = False,
    progress: Progress = lambda *_: None,
) -> Record:
    """Measure a table's cells that `output`, or an interrupted attempt beside it, does not hold yet; write the record.

    Args:
        patterns: rows to measure, with *. quick: of each grid the first of these rows alone, to try a table out.

    Raises:
        KernelError: torch sees no GPU. ResultError: an earlier record is damaged, or a benchmark broke down.
    """
    if not torch.cuda.is_available():
        raise KernelError("measuring speed needs an NVIDIA GPU, and torch sees none.")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu, partial = torch.cuda.get_device_name(device), output.with_suffix(".partial.json")
    earlier = _earlier(table, gpu, [partial, output])
    sitting = Sitting(environment=environment(root), gpu_before=gpu_state(device))
    record = Record(table=table.id, gpu=gpu, sittings=(*earlier.sittings, sitting), cells=earlier.cells)
    wanted = _wanted(table, patterns, quick)
    known = {key: cell for key, cell in record.by_key.items() if cell.missing is None}
    failures: list[str] = []
    for number, cell in enumerate(wanted, 1):
        if cell.key not in known:
            with _defects(failures, cell):
                known[cell.key] = _measure(cell, len(record.sittings) - 1)
                record = record.model_copy(update={"cells": _ordered(table, record.by_key | known)})
                write_record(partial, record)
        outcome = _words(known[cell.key]) if cell.key in known else f"failed: {failures[-1]}"
        progress(number, len(wanted), cell, outcome)
    sitting = sitting.model_copy(update={"gpu_after": gpu_state(device)})
    record = record.model_copy(update={"sittings": (*record.sittings[:-1], sitting)})
    if failures:
        write_record(partial, record)
        raise ResultError(f"{len(failures)} cells of {table.id} broke down, first {failures[0]}.")
    write_record(output, record)
    partial.unlink(missing_ok=True)
    return record


def _earlier(table: SpeedTable, gpu: str, paths: list[Path]) -> Record:
    """What was measured before with the code of today on such a GPU, from the first of these files that exists."""
    for path in paths:
        if path.exists():
            record = read_record(path, table.id)
            if record.gpu == gpu:
                return record.model_copy(update={"cells": tuple(cell for cell in record.cells if _is_current(cell))})
    return Record(table=table.id, gpu=gpu, sittings=(), cells=())


def _is_current(cell: CellRecord) -> bool:
    return cell.code == kernels_digest(find(cell.benchmark, "record").module)


def _wanted(table: SpeedTable, patterns: tuple[str, ...], quick: bool) -> list[Cell]:
    """The cells to measure, each measurement once."""
    cells = [cell for cell in table.cells if matches(cell.row, *patterns)]
    first = {cell.grid: cell.row for cell in reversed(cells)}
    chosen = [cell for cell in cells if not quick or cell.row == first[cell.grid]]
    return list({cell.key: cell for cell in chosen}.values())


def _measure(cell: Cell, sitting: int) -> CellRecord:
    """One cell: its quantities, or why it has none."""
    benchmark = find(cell.benchmark, "cell")
    start = time.perf_counter()
    quantities: dict[str, Measurement] = {}
    missing = None
    try:
        quantities = _once_more(benchmark.function(), cell.arguments)
    except torch.OutOfMemoryError:
        missing = "out of GPU memory"
    except RotquantError as error:
        missing = str(error)
    return CellRecord(
        benchmark=cell.benchmark,
        arguments=cell.arguments.model_dump(mode="json"),
        code=kernels_digest(benchmark.module),
        sitting=sitting,
        seconds=round(time.perf_counter() - start, 3),
        quantities=quantities,
        missing=missing,
    )


def _once_more(function: Callable[[Frozen], dict[str, Measurement]], arguments: Frozen) -> dict[str, Measurement]:
    """Call a benchmark; where memory runs out, once more without what torch keeps of the cells before."""
    try:
        return function(arguments)
    except torch.OutOfMemoryError:
        pass
    gc.collect()
    torch.cuda.empty_cache()
    return function(arguments)


@contextlib.contextmanager
def _defects(failures: list[str], cell: Cell) -> Iterator[None]:
    """Note what a benchmark should not raise and go on; after a fault of the GPU every further call would fail."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        failures.append(f"{cell.row}, {cell.column}: {type(error).__name__}: {reason}")
        if isinstance(error, torch.AcceleratorError):
            raise ResultError(f"the GPU failed at {failures[-1]}; what was measured before is kept.") from error


def _ordered(table: SpeedTable, known: dict[str, CellRecord]) -> tuple[CellRecord, ...]:
    """Records in the order of the table; those of cells that it no longer has are dropped."""
    keys = dict.fromkeys(cell.key for cell in table.cells)
    return tuple(known[key] for key in keys if key in known)


def _words(cell: CellRecord) -> str:
    if cell.missing is not None:
        return f"no number: {cell.missing}"
    return (
        ", ".join(f"{name} {_show(one)}" for name, one in cell.quantities.items() if one.low is not None) or "counted"
    )


def _show(measurement: Measurement) -> str:
    value = f"{measurement.value * 1e6:.2f} us" if measurement.unit == "s" else f"{measurement.value:.4g}"
    return f"{value} ± {100 * (measurement.spread or 0):.1f} %"
