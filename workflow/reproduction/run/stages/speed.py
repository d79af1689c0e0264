"""Measurement of a speed table on this machine's GPU or CPU, cell by cell, into a record that grows.

A process that is killed keeps the cells it has finished; started again, it measures the rest. A cell measured by other
code is measured anew. The functions of `registry` do the work; nothing here knows what they time.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from reproduction.benchmarks.records import CellRecord, Measurement, Record, Sitting, read_record, write_record
from reproduction.benchmarks.registry import benchmark_digest, find
from reproduction.benchmarks.timing import cpu_label, cpu_state, gpu_state
from reproduction.tables.speed.definitions import SpeedCell, SpeedTable, matches
from rotquant.foundation.data import Frozen
from rotquant.foundation.environment import environment
from rotquant.foundation.errors import KernelError, ResultError, RotquantError
from rotquant.foundation.progress import tell

Progress = Callable[[int, int, SpeedCell, str], None]
"""Callback after each cell: its number, the number of cells, the cell, and its outcome in words."""


def measure(
    table: SpeedTable,
    output: Path,
    *,
    root: Path = Path(),
    patterns: tuple[str, ...] = ("*",),
    quick: bool = False,
    note: str = "",
    progress: Progress = lambda *_: None,
) -> Record:
    """Measure a table's cells that `output`, or an interrupted attempt next to it, lacks; write the record.

    Args:
        patterns: rows to measure, with *. quick: only the first of these rows of each grid, for a trial.
        note: what else the machine does, in a sentence.

    Raises:
        KernelError: torch sees no GPU, or there is no C++ compiler for a CPU. ResultError: an earlier record is
            damaged, or a benchmark broke down.
    """
    (device, state), partial = _device(table), output.with_suffix(".partial.json")
    earlier = _earlier(table, device, partial) or _earlier(table, device, output, without_gaps=True)
    circumstances = environment(root) | ({"note": note} if note else {})
    sitting = Sitting(environment=circumstances, gpu_before=state())
    empty = Record(table=table.id, gpu=device, sittings=(), cells=())
    attempt = _Attempt(table, partial, earlier or empty, sitting)
    wanted = _wanted(table, patterns, quick)
    for number, cell in enumerate(wanted, 1):
        progress(number, len(wanted), cell, attempt.measure(cell))
    record = attempt.finished(state())
    write_record(output, record)
    partial.unlink(missing_ok=True)
    return record


def _device(table: SpeedTable) -> tuple[str, Callable[[], dict[str, Any]]]:
    """The name of this machine's GPU or CPU, a record's `gpu`, and what says its state.

    Raises:
        KernelError: torch sees no GPU.
    """
    if table.device == "cpu":
        return cpu_label(), cpu_state
    if not torch.cuda.is_available():
        raise KernelError("measuring speed needs an NVIDIA GPU, and torch sees none.")
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_name(device), lambda: gpu_state(device)


class _Attempt:
    """A record that grows: cells measured so far, kept in a file after each, and what broke down on the way."""

    def __init__(self, table: SpeedTable, path: Path, earlier: Record, sitting: Sitting) -> None:
        self.table, self.path = table, path
        self.record = earlier.model_copy(update={"sittings": (*earlier.sittings, sitting)})
        self.failures: list[str] = []

    def measure(self, cell: SpeedCell) -> str:
        """Measure a cell unless it is known, and return the outcome in words.

        Raises:
            ResultError: the GPU failed, so that every further call would; a new attempt continues after this cell.
        """
        known, sitting = self.record.by_key, len(self.record.sittings) - 1
        if cell.key not in known:
            try:
                self._keep(_measure(cell, sitting))
                grid = self.table.grid(cell.grid)
                found = self.record.by_key[cell.key].quantities.get(grid.quantity_of(grid.column(cell.column)))
                if found is not None:
                    tell(f"{cell.grid}/{cell.row}", {"step": 0, cell.column: found.value})
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if _gpu_failed(error):
                    self._keep(_record(cell, sitting, 0.0, missing=f"the GPU failed ({reason})"))
                    place = f"{cell.row}, {cell.column}"
                    raise ResultError(f"the GPU failed at {place} ({reason}); what was measured is kept.") from error
                self.failures.append(f"{cell.row}, {cell.column}: {reason}")
                return f"failed: {reason}"
        return _words(self.record.by_key[cell.key])

    def finished(self, state: dict[str, Any]) -> Record:
        """The record with the state of the GPU at the end.

        Raises:
            ResultError: cells broke down in a way that is a defect; the others are kept.
        """
        last = self.record.sittings[-1].model_copy(update={"gpu_after": state})
        self.record = self.record.model_copy(update={"sittings": (*self.record.sittings[:-1], last)})
        if self.failures:
            write_record(self.path, self.record)
            raise ResultError(f"{len(self.failures)} cells of {self.table.id} broke down, first {self.failures[0]}.")
        return self.record

    def _keep(self, cell: CellRecord) -> None:
        """Add a cell, in the order of the table; cells that the table no longer has are dropped."""
        known = self.record.by_key | {cell.key: cell}
        keys = dict.fromkeys(one.key for one in self.table.cells)
        self.record = self.record.model_copy(update={"cells": tuple(known[key] for key in keys if key in known)})
        write_record(self.path, self.record)


def _gpu_failed(error: Exception) -> bool:
    """Whether an error has left the GPU unusable for this process, such as an illegal access in a kernel."""
    if not torch.cuda.is_available():
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _earlier(table: SpeedTable, gpu: str, path: Path, without_gaps: bool = False) -> Record | None:
    """The cells of a file that were measured with the current code on such a GPU.

    Args:
        without_gaps: leave out the cells that have no number, which are tried again.
    """
    if not path.exists() or (record := read_record(path, table.id)).gpu != gpu:
        return None
    current = (cell for cell in record.cells if cell.code == benchmark_digest(cell.benchmark))
    return record.model_copy(update={"cells": tuple(cell for cell in current if not (without_gaps and cell.missing))})


def _wanted(table: SpeedTable, patterns: tuple[str, ...], quick: bool) -> list[SpeedCell]:
    """The cells to measure, each measurement once."""
    cells = [cell for cell in table.cells if matches(cell.row, *patterns)]
    first = {cell.grid: cell.row for cell in reversed(cells)}
    chosen = [cell for cell in cells if not quick or cell.row == first[cell.grid]]
    return list({cell.key: cell for cell in chosen}.values())


def _measure(cell: SpeedCell, sitting: int) -> CellRecord:
    """Measure one cell: its quantities, or the reason why it has none."""
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
    return _record(cell, sitting, time.perf_counter() - start, quantities=quantities, missing=missing)


def _record(cell: SpeedCell, sitting: int, seconds: float, **outcome: Any) -> CellRecord:
    return CellRecord(
        benchmark=cell.benchmark,
        arguments=cell.arguments.model_dump(mode="json"),
        code=benchmark_digest(cell.benchmark),
        sitting=sitting,
        seconds=round(seconds, 3),
        **outcome,
    )


def _once_more(function: Callable[[Frozen], dict[str, Measurement]], arguments: Frozen) -> dict[str, Measurement]:
    """Call a benchmark; if memory runs out, once more after freeing torch's cache of earlier cells."""
    try:
        return function(arguments)
    except torch.OutOfMemoryError:
        pass
    gc.collect()
    torch.cuda.empty_cache()
    return function(arguments)


def _words(cell: CellRecord) -> str:
    if cell.missing is not None:
        return f"no number: {cell.missing}"
    return (
        ", ".join(f"{name} {_show(one)}" for name, one in cell.quantities.items() if one.low is not None) or "counted"
    )


def _show(measurement: Measurement) -> str:
    value = f"{measurement.value * 1e6:.2f} us" if measurement.unit == "s" else f"{measurement.value:.4g}"
    return f"{value} ± {100 * (measurement.spread or 0):.1f} %"
