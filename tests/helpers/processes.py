"""Processes of one test that share work, by gloo: each is forked from a server that has imported what they need.

To start each from nothing takes seconds, and the process of the tests cannot be forked once it has used a GPU.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import rotquant.commands.distil
import rotquant.qat.training  # noqa: F401 - both, and the models, for what is forked
import tests.helpers.models  # noqa: F401


def run_together(folder: Path, body: Callable[[int, Path], None], processes: int = 2) -> None:
    """Call `body(rank, folder)` in several processes that have joined; raise what one of them raises."""
    folder.mkdir(exist_ok=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as place:
        start_processes(_together, (folder, body, processes, place), processes, start_method="forkserver")


def _together(rank: int, folder: Path, body: Callable[[int, Path], None], processes: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=processes)
    try:
        body(rank, folder)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
