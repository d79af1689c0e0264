"""Timing on a GPU: CUDA graphs of many calls, replayed; medians and spread; inputs rotated, so caches are cold.

A graph takes the host out of the measurement, as a deployment would. Every call of a graph reads the next of several
input sets, together larger than the L2 cache, so that weights come from memory as they do in a model.
"""

import subprocess
from collections.abc import Callable
from typing import Any

import torch

from reproduction.benchmarks.records import Measurement
from rotquant.foundation.errors import KernelError

#: Input sets together fill at least this multiple of the L2 cache.
_L2_MULTIPLE = 3
_MOST_SETS = 256
#: Replays whose times are sorted for the median.
REPLAYS = 11
#: Seconds of GPU work in one replay: long against the 1 us resolution of events, short enough for many replays.
_REPLAY_SECONDS = 3e-3
#: Seconds of all replays, and the fewest of them, where a single call takes long.
_SECONDS = 0.15
_FEWEST_REPLAYS = 5
#: Seconds for which large products run before they are timed. They are limited by power, and its regulation lags: one
#: measured within 50 ms after another inherits its clocks, and on an H200 reads up to 25 % slower or faster.
SETTLE = 0.3


def rotations(bytes_per_set: int, device: torch.device) -> int:
    """How many input sets of this size must take turns for none of them to be found in the L2 cache."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(_MOST_SETS, -(-_L2_MULTIPLE * l2 // max(1, bytes_per_set))))


def time_gpu(
    call: Callable[[int], Any], sets: int = 1, *, replays: int = REPLAYS, graph: bool = True, settle: float = 0.0
) -> Measurement:
    """Time `call(i)`, i being the number of the input set, 0 to sets - 1, in turn.

    Args:
        call: enqueues work on torch's current stream and does not synchronize.
        sets: how many input sets take turns (see `rotations`).
        replays: at most so many; fewer, but five, where they would take longer than 0.15 s.
        graph: replay a CUDA graph; without it the calls are launched one by one and launch gaps count.
        settle: seconds for which the call repeats before it is timed; `SETTLE` where power is the limit.

    Raises:
        KernelError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise KernelError("timing needs an NVIDIA GPU, and torch sees none.")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):  # compile, allocate, warm up
            call(index)
        estimate = elapsed(lambda: [call(index) for index in range(sets)]) / sets
        calls, run = _repeated(call, estimate, sets, stream if graph else None)
        run()
        estimate, launched = elapsed(run) / calls, estimate
        if graph and estimate < launched / 2:  # launching took longer than the work: a replay can hold more calls
            calls, run = _repeated(call, estimate, sets, stream)
            run()
        for _ in range(round(settle / (estimate * calls))):
            run()
        replays = min(replays, max(_FEWEST_REPLAYS, round(_SECONDS / (estimate * calls))))
        seconds = sorted(elapsed(run) / calls for _ in range(replays))
    torch.cuda.current_stream().wait_stream(stream)
    return Measurement.timed(seconds, calls)


def _repeated(
    call: Callable[[int], Any], estimate: float, sets: int, stream: torch.cuda.Stream | None
) -> tuple[int, Callable[[], Any]]:
    """How many calls of `estimate` seconds make a replay, and the replay: a graph captured on `stream`, or a loop."""
    calls = sets * max(1, round(_REPLAY_SECONDS / estimate / sets))
    if stream is None:
        return calls, lambda: [call(index % sets) for index in range(calls)]
    return calls, _graph(call, calls, sets, stream)


def _graph(call: Callable[[int], Any], calls: int, sets: int, stream: torch.cuda.Stream) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            call(index % sets)
    return graph.replay


def elapsed(run: Callable[[], Any]) -> float:
    """Seconds of GPU time between two events around `run`; waits for the second."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Name, driver, clocks, power and temperature of a GPU now, and the software that drives it, as plain data."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={device.index or 0}"]
    try:
        values = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        state: dict[str, Any] = dict(
            zip(fields.split(","), (value.strip() for value in values.split(",")), strict=True)
        )
    except (OSError, subprocess.SubprocessError):
        state = {"name": torch.cuda.get_device_name(device)}
    properties = torch.cuda.get_device_properties(device)
    return state | {
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
