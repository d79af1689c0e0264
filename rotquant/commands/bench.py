"""`rotquant bench`: time and memory at the papers' real shapes, written as records under results/bench/."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rotquant.commands.options import Changes, Device, Dtype, changed
from rotquant.devices import torch_device, torch_dtype

bench_app = typer.Typer(help="Measure time and memory at the papers' shapes.", no_args_is_help=True)


@bench_app.callback()
def _group() -> None:
    """Keep `quantize` a named sub-command while it is the only one."""


@bench_app.command()
def quantize(
    shape: Annotated[str, typer.Option(help="llama-2-7b, llama-2-13b or llama-2-70b.")] = "llama-2-7b",
    method: Annotated[str, typer.Option(help="A method of `rotquant quantize`.")] = "quarot",
    changes: Changes = None,
    layers: Annotated[int | None, typer.Option(help="Only so many decoder layers: a quick trial.")] = None,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the record (JSON) here.")] = None,
) -> None:
    """Rotate and quantize a random-weight model of a paper's shape; print and record time and peak GPU memory.

    Example: `rotquant bench quantize --shape llama-2-7b -o results/bench/nvidia-h200/quantize-llama-2-7b.json`
    """
    from rotquant.bench.quantization import benchmark_quantization
    from rotquant.files import write_json
    from rotquant.presets import preset

    recipe = changed(preset(method), changes)
    record = benchmark_quantization(
        shape, recipe, device=torch_device(device), dtype=torch_dtype(dtype), num_layers=layers
    )
    if output:
        write_json(output, record)
    stages = ", ".join(f"{name} {value:.1f} s" for name, value in record["seconds"].items())
    Console().print(f"{shape}, {record['layers']} layers, {method}: {stages}")
    Console().print(f"peak GPU memory {record['peak_gpu_bytes'] / 2**30:.2f} GiB ({record['gpu'] or 'no GPU'})")
