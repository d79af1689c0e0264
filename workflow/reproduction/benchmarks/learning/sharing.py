"""Cost of quantization-aware training that GPUs of one host share by FSDP2, a process each."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from reproduction.benchmarks.learning import SharedDistillArguments
from reproduction.benchmarks.learning.benchmarks import free_all, gpus
from reproduction.benchmarks.learning.distillation import of_steps, take_steps
from reproduction.benchmarks.learning.models import random_model_on, shape_config
from reproduction.benchmarks.timing.case import Measurements
from rotquant.foundation.files import read_json, write_json
from rotquant.qat.engine import make_engine

_SEED = 0


def distill_shared(arguments: SharedDistillArguments) -> Measurements:
    """Seconds and memory of training a whole model of bfloat16 on one or more GPUs; see `distillation.distill`.

    Returns:
        seconds, step_seconds: of the first process, which waits for the others in each step. peak_bytes: allocated by
        torch on the GPU that has most.

    Raises:
        ConfigError: an unknown shape.
        KernelError: there are not so many GPUs.
    """
    a, devices = arguments, gpus(arguments.gpus)
    free_all()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        start_processes(_share, (a, shape_config(a.shape), devices, place), len(devices), start_method="spawn")
        costs = [read_json(_found(place, rank), "costs of a process") for rank in range(len(devices))]
    return of_steps(a, costs[0]["times"], max(one["peak"] for one in costs))


def _share(rank: int, a: SharedDistillArguments, config: Any, devices: tuple[torch.device, ...], place: Path) -> None:
    """In each process: take part in the training's first steps. The model begins on the host, as a loaded one does."""
    device = devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    meeting = f"file://{place.absolute()}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=len(devices))
    try:
        model = random_model_on((device,), config, torch.bfloat16, _SEED, host=torch.device("cpu"))
        times, peak = take_steps(a, model, make_engine(device, a.at_once))
        write_json(_found(place, rank), {"times": times, "peak": peak})
    finally:
        dist.destroy_process_group()


def _found(place: Path, rank: int) -> Path:
    return place / f"{rank}.json"
