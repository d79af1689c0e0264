"""A small speed table and records of it, made up, for tests of definitions, claims, pages and the workflow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproduction.benchmarks import registry
from reproduction.benchmarks.records import CellRecord, Measurement, Record, Sitting, write_record
from reproduction.identity.code import code_files, root
from reproduction.tables.speed.definitions import SpeedCell, SpeedTable

SPEED: dict[str, Any] = {
    "paper": "quarot",
    "title": "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    "tables": [
        {
            "id": "quarot_table14",
            "title": "Time of the 4-bit linear layer",
            "section": "A.10",
            "caption": "A small table.",
            "gpus": ["NVIDIA RTX 3090"],
            "published": "published/table14.csv",
            "grids": [
                {
                    "name": "Linear layer",
                    "benchmark": "linear",
                    "axes": [
                        {"name": "Layer", "values": {"4096x4096": {"in_features": 4096, "out_features": 4096}}},
                        {"name": "Batch", "values": {1: {"tokens": 2048}, 2: {"tokens": 4096}}},
                    ],
                    "rows": "{Layer} batch {Batch}",
                    "columns": [
                        {"name": "FP16", "arguments": {"implementation": "fp16"}},
                        {"name": "INT4", "arguments": {"implementation": "int4", "quantization": "dynamic"}},
                        {"name": "FP8", "arguments": {"implementation": "fp8"}},
                    ],
                    "baseline": "FP16",
                }
            ],
            "claims": [
                {
                    "text": "The 4-bit layer is twice as fast.",
                    "section": "A.10",
                    "mechanism": {"at_least": {"column": "INT4", "over": "FP16", "value": 2}},
                }
            ],
        },
        {
            "id": "quarot_figure7",
            "title": "Speedup of the 4-bit linear layer",
            "section": "A.10",
            "caption": "A small figure.",
            "gpus": ["NVIDIA RTX 3090"],
            "drawing": {
                "kind": "bars",
                "caption": "Speedups.",
                "parts": [
                    {
                        "table": "quarot_table14",
                        "title": "INT4",
                        "grid": "Linear layer",
                        "rows": ["4096x4096 batch 1"],
                        "column": "INT4",
                    }
                ],
            },
        },
    ],
}

STATE = {"name": "Some GPU", "driver_version": "580.1", "clocks.sm": "1980", "power.draw": "300", "cuda": "13.0"}
ENVIRONMENT = {
    "date": "2026-11-21T16:00:00+00:00",
    "git_commit": "a" * 40,
    "git_dirty": False,
    "versions": {"torch": "2"},
}


def seconds(cell: SpeedCell) -> float:
    """Made-up times: in proportion to the tokens, INT4 2.5 times and FP8 1.5 times as fast as FP16."""
    arguments = cell.arguments.model_dump()
    return 1e-7 * arguments["tokens"] / {"fp16": 1.0, "int4": 2.5, "fp8": 1.5}[arguments["implementation"]]


Answer = float | str | dict[str, Measurement]
"""Of a made-up benchmark: seconds, the reason why there are none, or all quantities."""


def kernel(cell: SpeedCell) -> dict[str, Measurement]:
    """Made-up quantities of a kernel that takes twice as long as moving its bytes at 4 TB/s; of a ceiling just that."""
    arguments = cell.arguments.model_dump()
    rows = arguments.get("tokens", arguments.get("rows", 1000))
    inner, outer = arguments.get("in_features", arguments.get("features", 1000)), arguments.get("out_features", 0)
    size = 4e9 if cell.benchmark == "ceiling" else 2.0 * (rows * inner + inner * outer)
    operations = 7e11 if cell.benchmark == "ceiling" else 2.0 * rows * inner * outer
    time = size / 4e12 * (1 if cell.benchmark == "ceiling" else 2)
    timed = Measurement(time, "s", time, time, 15, 10)
    return {"seconds": timed, "bytes": Measurement(size, "B"), "operations": Measurement(operations, "op")}


def cell_record(cell: SpeedCell, answer: Callable[[SpeedCell], Answer] = seconds) -> CellRecord:
    """A cell with made-up numbers, or with the reason why it has none."""
    value = answer(cell)
    fields: dict[str, Any] = {"missing": value}
    if isinstance(value, float):
        fields = {"quantities": {"seconds": Measurement(value, "s", 0.99 * value, 1.01 * value, 15, 10)}}
    if isinstance(value, dict):
        fields = {"quantities": value}
    arguments = cell.arguments.model_dump(mode="json")
    return CellRecord(benchmark=cell.benchmark, arguments=arguments, code="0" * 16, sitting=0, seconds=0.5, **fields)


def record(
    path: Path, table: SpeedTable, answer: Callable[[SpeedCell], Answer] = seconds, gpu: str = "Some GPU"
) -> Record:
    """Write the record of a table measured in one sitting."""
    sitting = Sitting(environment=ENVIRONMENT, gpu_before=STATE, gpu_after=STATE)
    cells = tuple(cell_record(cell, answer) for cell in table.cells)
    made = Record(table=table.id, gpu=gpu, sittings=(sitting,), cells=cells)
    write_record(path, made)
    return made


def files_timed(benchmark: str, patch: pytest.MonkeyPatch) -> set[str]:
    """The files whose content is in the digest of a benchmark, by their paths in the repository."""
    with patch.context() as patched:
        patched.setattr(registry, "code_digest", code_files)
        found = registry.benchmark_digest(benchmark)
    return {path.relative_to(root()).as_posix() for path in found}
