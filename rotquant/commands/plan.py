"""`rotquant plan`: memory, time and disk space that quantizing a model takes, before anything is computed."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Column, Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.formats import For, check_target
from rotquant.commands.models import recipe_for
from rotquant.commands.options import (
    Changes,
    Checkpoint,
    Dtype,
    Method,
    Samples,
    SequenceLength,
    named_recipe,
    with_options,
)
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import task

if TYPE_CHECKING:
    from rotquant.costs.memory import Part
    from rotquant.costs.plan import Fit, WorkCosts

#: What else there is where no smaller amount fits, by how a method works.
_OTHERWISE = {
    "network": "learning spreads over all GPUs of the host",
    "training": "torchrun shares the training among GPUs (`rotquant train-quantized`)",
}


@answers(
    {
        "model": "",
        "method": "",
        "parameters": "",
        "device": "cpu or cuda",
        "dtype": "",
        "recipe": "",
        "device_memory": "peak_bytes and the bytes of each phase",
        "host_memory": "bytes and their parts",
        "disk": "bytes and their parts",
        "time": "seconds, whether every part is known, the parts",
        "fits": "for each GPU whether it fits and in which way, bytes of the host there, and what makes it fit",
    }
)
def plan(
    model: Checkpoint,
    method: Method = "quarot",
    changes: Changes = None,
    samples: Samples = None,
    sequence_length: SequenceLength = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, which need not be here, or auto, a GPU where there is one.")
    ] = "auto",
    dtype: Dtype = "float32",
    target: For = None,
) -> CommandResult:
    """Print what `rotquant quantize` with the same options takes: memory, time, disk space. Nothing is computed.

    Of MODEL only config.json is read, so weights need not be here. `--device cuda` plans for a GPU that need not be
    here either. Time follows from recorded runs; where there are none, it is not known.

    Example: `rotquant plan meta-llama/Llama-2-7b-hf --method quarot --device cuda --dtype bfloat16`
    """
    if with_options(named_recipe(method), samples, sequence_length, changes).is_baseline:
        raise RecipeError("the baseline changes nothing, so there is nothing to plan; choose a method.")
    kind = _device_kind(device)
    with task("starting"):
        from rotquant.costs.plan import costs_of
        from rotquant.costs.work import Work, shapes_of
        from rotquant.models.checkpoints import load_config, settings_folder

        folder = settings_folder(model)
        recipe, note = recipe_for(folder, method, samples, sequence_length, changes)
        if target is not None:
            check_target(target, recipe, load_config(folder))
        here = _gpu_here()
        work = Work(shapes_of(load_config(folder)), recipe, dtype, kind, next(iter(here.values())))
        found = costs_of(work, folder, here)
    notes = (f"note: {note}",) if note else ()
    return CommandResult(_data(model, method, found), (*notes, *_shown(model, method, found)))


def _device_kind(device: str) -> Literal["cpu", "cuda"]:
    """cpu or cuda, of a device that need not be here.

    Raises:
        RecipeError: no such kind of device.
    """
    if device.partition(":")[0] not in ("cpu", "cuda", "auto"):
        raise RecipeError(f"unknown device {device!r}; use cpu, cuda, cuda:N or auto.")
    from rotquant.tensors.devices import has_driver

    gpu = device.startswith("cuda") or (device == "auto" and has_driver())
    return "cuda" if gpu else "cpu"


def _gpu_here() -> dict[str, int]:
    """Name and bytes of this machine's GPU; without one, of the larger card that plans are for."""
    import torch

    from rotquant.costs.plan import GPUS

    if not torch.cuda.is_available():
        return {"80 GB": GPUS["80 GB"]}
    properties = torch.cuda.get_device_properties(0)
    return {properties.name: properties.total_memory}


def _data(model: str, method: str, found: "WorkCosts") -> dict[str, Any]:
    """The plan as plain data."""
    work = found.work
    return {
        "model": model,
        "method": method,
        "parameters": work.shapes.parameters,
        "device": work.device,
        "dtype": work.dtype,
        "recipe": work.recipe.model_dump(mode="json"),
        "device_memory": {
            "peak_bytes": found.peak.bytes if work.device == "cuda" else 0,
            "phases": [{**asdict(phase), "bytes": phase.bytes} for phase in found.device],
        },
        "host_memory": _sum(found.host),
        "disk": _sum(found.disk),
        "time": {
            "seconds": found.seconds,
            "complete": found.timed,
            "parts": [one.model_dump(mode="json") for one in found.time],
        },
        "fits": [asdict(one) for one in found.fits],
    }


def _sum(parts: "list[Part]") -> dict[str, Any]:
    return {"bytes": sum(part.bytes for part in parts), "parts": [asdict(part) for part in parts]}


def _shown(model: str, method: str, found: "WorkCosts") -> "tuple[str | Table, ...]":
    """The plan as a table, and whether it fits in sentences below."""
    work, shapes = found.work, found.work.shapes
    title = (
        f"{model}: {shapes.architecture.family}, {shapes.parameters:,} parameters; {method} in {work.dtype} on "
        f"{'a GPU' if work.device == 'cuda' else 'the CPU'}"
    )
    table = Table("cost", Column("how much", justify="right", no_wrap=True), "follows from")
    if work.device == "cuda":
        _rows(table, "GPU memory", found.peak.parts, f"the largest phase is {found.peak.name}")
    _rows(table, "host memory", found.host, "at its fullest")
    known = any(one.seconds is not None for one in found.time)
    total = ("" if found.timed else "at least ") + _time(found.seconds) if known else "not known"
    table.add_row("time", total, "loading and saving apart")
    for one in found.time:
        table.add_row(f"  {one.name}", "not known" if one.seconds is None else _time(one.seconds), one.follows)
    _rows(table, "disk space", found.disk, "the folder that is written")
    return (title, table, *(_sentence(one, found) for one in found.fits))


def _rows(table: Table, name: str, parts: "tuple[Part, ...] | list[Part]", follows: str) -> None:
    table.add_section()
    table.add_row(name, _size(sum(part.bytes for part in parts)), follows)
    for part in parts:
        table.add_row(f"  {part.name}", _size(part.bytes), part.follows)
    table.add_section()


def _sentence(one: "Fit", found: "WorkCosts") -> str:
    """Whether it fits a GPU, and what to change."""
    from rotquant.costs.ways import way_of

    words = f"GPU of {one.gpu}" if one.gpu.endswith("GB") else one.gpu
    way = f": {one.way}; {_size(one.host)} of the host" if one.way else ""
    if one.fits:
        return f"{words}: fits, with {_size(one.peak)} of {_size(one.memory)}{way}."
    needed = f"{words}: does not fit, {_size(one.peak)} of {_size(one.memory)}"
    if one.then is not None:
        return f"{needed}; it does with {' '.join(one.changes)}: {_size(one.then)}{way}."
    recipe = found.work.recipe
    ways = [_OTHERWISE.get(way_of(method, recipe), "") for method in recipe.methods.values()]
    other = next(filter(None, ways), "take a GPU with more")
    return f"{needed}; smaller batches, texts and types leave {_size(one.least or one.peak)}: {other}."


def _size(count: float) -> str:
    """Bytes as GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    """Seconds, minutes or hours, two digits."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
