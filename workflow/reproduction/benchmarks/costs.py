"""Recorded times of methods, from the records of benchmarks, for the library's plans (`rotquant/costs/records.json`).

The library knows no record, so what it needs of them is a file of its own, which `rotquant bench costs` writes and a
test compares with the records.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reproduction.benchmarks.records import BENCH, CellRecord, Record, read_record
from reproduction.benchmarks.shapes import shape_config
from rotquant.costs.time import ROTATION, TimeRecord
from rotquant.costs.work import shapes_of
from rotquant.foundation.files import read_object
from rotquant.methods.gptq import GPTQ

#: What the records of models that lie on the GPU leave out of a method that streams layers from the host.
_STREAMING = "moving layers from the host and back"
_TRAINING = "the text that the teacher writes, its confidence, the search for clips, validation"
_DISTILLED = {
    "BitDistiller": ("bitdistiller", False),
    "BitDistiller rotated": ("bitdistiller", True),
    "RCP": ("rcp", True),
}
_PREFIXQUANT = {"prefix": ("prefixed_outliers",), "grid": ("grid_weights", "grid_scales"), "tuning": ("block_ap",)}
_TUNED_BATCH = 4


def time_records(root: Path = Path()) -> list[TimeRecord]:
    """Times of methods in the records below results/bench, of each method and model as it was measured."""
    found = [*_of_weights_stage(root)]
    for table in ("spinquant_table15", "prefixquant_table10", "rcp_table8"):
        for path in sorted((root / BENCH).glob(f"*/{table}.json")):
            record = read_record(path, table)
            found += [_of_cell(cell, record, path.relative_to(root)) for cell in record.cells if cell.quantities]
    return found


def _of_weights_stage(root: Path) -> Iterator[TimeRecord]:
    """The newest record of the weights stage for each shape: the rotation and GPTQ of layers on the host."""
    paths = [(read_object(path, "record"), path) for path in sorted((root / BENCH).glob("*/quantize-*.json"))]
    newest = {
        data["shape"]: (data, path) for data, path in sorted(paths, key=lambda one: one[0]["environment"]["date"])
    }
    for data, path in newest.values():
        text = data["recipe"]["calibration"]
        about = _about(data["shape"], data["gpu"], data["environment"], path.relative_to(root))
        tokens = text["samples"] * text["sequence_length"]
        yield TimeRecord(methods=(ROTATION,), seconds=data["seconds"]["rotation"], **about)
        yield TimeRecord(methods=(GPTQ.name,), tokens=tokens, seconds=data["seconds"][GPTQ.title], **about)


def _of_cell(cell: CellRecord, record: Record, source: Path) -> TimeRecord:
    """The time of one cell, with the amount of work that it is of."""
    a, seconds = cell.arguments, cell.quantities["seconds"].value
    gpus = f"{a['gpus']} x " if a.get("gpus", 1) > 1 else ""
    about = _about(a["shape"], f"{gpus}{record.gpu}", record.sittings[cell.sitting].environment, source)
    if cell.benchmark == "gptq":
        work: dict[str, Any] = {"methods": (GPTQ.name,), "tokens": a["samples"] * a["tokens"], "without": _STREAMING}
    elif cell.benchmark == "learn":
        fixed = cell.quantities["setup_seconds"].value
        work = {"methods": ("spinquant",), "steps": a["steps"], "seen": a["batch_size"] * a["tokens"], "fixed": fixed}
        seconds -= fixed
    elif cell.benchmark == "distill":
        method, rotated = _DISTILLED[a["method"]]
        steps = a["epochs"] * (a["samples"] // a["batch_size"])
        work = {"methods": (method,), "rotated": rotated, "without": _TRAINING}
        work |= {"steps": steps, "seen": a["batch_size"] * a["tokens"]}
    else:
        work = {"methods": _PREFIXQUANT[a["part"]], "without": _STREAMING}
        tuned = {"steps": a["epochs"] * (a["samples"] // _TUNED_BATCH), "seen": _TUNED_BATCH * a["tokens"]}
        work |= tuned if a["part"] == "tuning" else {"tokens": a["samples"] * a["tokens"]}
    return TimeRecord(seconds=seconds, **work, **about)


def _about(shape: str, machine: str, environment: dict[str, Any], source: Path) -> dict[str, Any]:
    """Model, machine and origin of a record."""
    return {
        "shape": shape,
        "quantized": shapes_of(shape_config(shape)).quantized_parameters,
        "machine": machine,
        "commit": environment["git_commit"],
        "date": environment["date"],
        "source": source.as_posix(),
    }
