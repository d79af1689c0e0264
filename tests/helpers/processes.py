"""Processes of one test, which may share work by gloo: each is forked from a server that has imported what they need.

To start each from nothing takes seconds, and the process of the tests cannot be forked once it has used a GPU. What is
to be killed is started by torchrun, as a user starts it.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import rotquant.commands.distil
import rotquant.qat.training  # noqa: F401 - both, and the models, for what is forked
import tests.helpers.models  # noqa: F401
from rotquant.weights.build import quantized_forward
from rotquant.weights.storage import load_quantized


def run_together(folder: Path, body: Callable[[int, Path], None], processes: int = 2) -> None:
    """Call `body(rank, folder)` in several processes that have joined; raise what one of them raises."""
    folder.mkdir(exist_ok=True)
    _server()
    with tempfile.TemporaryDirectory() as place:
        start_processes(_together, (folder, body, processes, place), processes, start_method="forkserver")


def run_elsewhere(body: Callable[..., None], *arguments: object) -> int:
    """Call `body(*arguments)` in another process; its exit status, or minus the signal that ended it."""
    process = _server().Process(target=body, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def logits_elsewhere(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits that another process has of a stored quantized model, which it loads."""
    place = folder.with_name("logits")
    assert run_elsewhere(_save_logits, folder, tokens.tolist(), place) == 0
    return torch.load(place, weights_only=True)


def _save_logits(folder: Path, tokens: list[list[int]], place: Path) -> None:
    model, _, state = load_quantized(folder)
    with torch.no_grad(), quantized_forward(model, state.recipe, state):
        torch.save(model(torch.tensor(tokens), use_cache=False).logits, place)


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _together(rank: int, folder: Path, body: Callable[[int, Path], None], processes: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=processes)
    try:
        body(rank, folder)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def start(command: list[str], processes: int, **options: object) -> subprocess.Popen:
    """Start `python -m rotquant.cli` with a command, by torchrun where several processes are to share it.

    Args:
        options: of `subprocess.Popen`.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    together = launcher if processes > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *together, "-m", "rotquant.cli", *command]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, **options)


def end(process: subprocess.Popen) -> None:
    """Kill a process and those that it has started, which torchrun puts into sessions of their own."""
    every = [*psutil.Process(process.pid).children(recursive=True), process]
    for one in every:
        one.kill()
    process.communicate()
    psutil.wait_procs(every[:-1])
