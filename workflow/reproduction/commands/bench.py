"""`rotquant bench`: time and memory at the papers' real shapes, written as records under results/bench/."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from reproduction.commands.runs import table_names
from reproduction.tables.speed.definitions import SpeedCell, SpeedTable
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Changes, Device, Dtype, changed, method_names
from rotquant.commands.outputs import Arguments, Writes
from rotquant.foundation.files import OutputKind, has_keys
from rotquant.foundation.progress import ProgressTask, task
from rotquant.tensors.devices import torch_device, torch_dtype

bench_app = typer.Typer(help="Measure time and memory at the papers' shapes.", no_args_is_help=True)


@bench_app.command()
@answers({"every key of the record": "seconds by stage, peak_gpu_bytes, gpu, layers, recipe, environment"}, file=True)
def quantize(
    shape: Annotated[str, typer.Option(help="llama-2-7b, llama-2-13b or llama-2-70b.")] = "llama-2-7b",
    method: Annotated[
        str, typer.Option(autocompletion=method_names, help="A method of `rotquant quantize`.")
    ] = "quarot",
    changes: Changes = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Only so many decoder layers: a quick trial.")] = None,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
) -> CommandResult:
    """Rotate and quantize a random-weight model of a paper's shape; print and record time and peak GPU memory.

    Example: `rotquant bench quantize --shape llama-2-7b -o results/bench/nvidia-h200/quantize-llama-2-7b.json`
    """
    from reproduction.benchmarks.learning import benchmark_quantization
    from rotquant.recipes.presets import preset

    recipe = changed(preset(method), changes)
    record = benchmark_quantization(
        shape, recipe, device=torch_device(device), dtype=torch_dtype(dtype), num_layers=layers
    )
    stages = ", ".join(f"{name} {value:.1f} s" for name, value in record["seconds"].items())
    peak = f"peak GPU memory {record['peak_gpu_bytes'] / 2**30:.2f} GiB ({record['gpu'] or 'no GPU'})"
    return CommandResult(record, (f"{shape}, {record['layers']} layers, {method}: {stages}", peak))


def _records(output: Path, arguments: Arguments) -> list[Path]:
    """The record of each table: the file that is named, of one table, or one of the table's name in the folder."""
    tables = arguments["tables"]
    return [output] if len(tables) == 1 and output.suffix == ".json" else [output / f"{one}.json" for one in tables]


@bench_app.command()
@answers(
    {"every key of the record": "its cells, the GPU, the environment"} | {"records": "of several tables instead, by id"}
)
def measure(
    tables: Annotated[
        list[str], typer.Argument(autocompletion=table_names, help="Ids of speed tables, e.g. quarot_table14.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The record (JSON) of one table, or the folder of all; what is there is continued."
        ),
        Writes(OutputKind("a record of times", has_keys("table", "gpu", "sittings", "cells")), files=_records),
    ],
    row: Annotated[list[str] | None, typer.Option(help="Only rows that match this pattern with *. Repeatable.")] = None,
    quick: Annotated[bool, typer.Option(help="The first row of each grid alone, to try a table out.")] = False,
    note: Annotated[str, typer.Option(help="A sentence for the record: what else the machine does.")] = "",
) -> CommandResult:
    """Measure speed tables on this machine's GPU or CPU. Started again after an interruption, it measures the rest.

    Example: `rotquant bench measure quarot_table14 kernels_h200 -o results/bench/nvidia-h200`
    """
    from reproduction.run.stages.speed import measure as measure_table
    from reproduction.run.tracking.job import timed
    from reproduction.sources import load_tables
    from reproduction.tables.configuration import find_root
    from rotquant.foundation.errors import lookup

    root, patterns = find_root(), tuple(row or ("*",))
    found = {name: one for name, one in load_tables(root).items() if isinstance(one, SpeedTable)}
    chosen = [lookup(found, table, "unknown speed table") for table in tables]
    records, said = dict[str, Any](), list[str]()
    for table, path in zip(chosen, _records(output, {"tables": tables}), strict=True):
        with task(f"measuring {table.id}", "cell") as under_way, timed(table.id):
            record = measure_table(
                table, path, root=root, patterns=patterns, quick=quick, note=note, progress=_shown(under_way)
            )
        missing = sum(cell.missing is not None for cell in record.cells)
        count = f"{len(record.cells)} cells on {record.gpu}, {missing} of them without a number"
        said.append(f"{table.id}: {count}, in {path}")
        records[table.id] = record.model_dump(mode="json")
    return CommandResult(records[tables[0]] if len(tables) == 1 else {"records": records}, tuple(said))


def _shown(under_way: ProgressTask) -> Callable[[int, int, SpeedCell, str], None]:
    """What is told of each cell as it is measured, counted by a task."""

    def progress(number: int, count: int, cell: SpeedCell, outcome: str) -> None:
        under_way.total = count
        under_way.advance(number - under_way.done)
        print(f"{cell.grid}, {cell.row}, {cell.column}: {outcome}", file=sys.stderr, flush=True)

    return progress


@bench_app.command()
def costs(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The file that the library reads."),
        Writes(OutputKind("a file of times", has_keys("records"))),
    ] = Path("rotquant/costs/records.json"),
) -> None:
    """Write the times that `rotquant plan` scales, from the records below results/bench/.

    Example: `rotquant bench costs`, after a new record of spinquant_table15, prefixquant_table10 or rcp_table8
    """
    from reproduction.benchmarks.costs import time_records
    from reproduction.tables.configuration import find_root
    from rotquant.foundation.files import check_output_file, write_json

    check_output_file(output)
    found = time_records(find_root())
    write_json(output, {"records": [record.model_dump(mode="json", exclude_defaults=True) for record in found]})
    typer.echo(f"{len(found)} times in {output}")
