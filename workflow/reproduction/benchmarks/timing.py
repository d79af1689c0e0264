"""Timing on a GPU and on a CPU: medians and spread of repeated calls, with cold caches.

On a GPU, CUDA graphs of many calls are replayed, which takes the host out of the measurement, as a deployment would.
Every call of a graph reads the next of several input sets, together larger than the L2 cache, so that weights come from
memory as they do in a model. The other regime is a single call after a pause (`time_single`). A benchmark only defines
the computation and its tensors (`Case`). Nothing here falls back: a case that cannot run raises.

On a CPU, compared functions take turns: the speed of memory on a shared machine drifts by tens of percent within
minutes. Their order differs in each turn, since a function finds the caches as the one before left them.
"""

import functools
import importlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.arguments import Regime
from reproduction.benchmarks.cpu_kernels.operators import instructions
from reproduction.benchmarks.records import Measurement
from rotquant.foundation.environment import cpu_name
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
    with _beside() as stream:
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
    return Measurement.timed(seconds, calls)


@contextmanager
def _beside() -> Iterator[torch.cuda.Stream]:
    """A stream of its own, as capturing needs, on which work runs in order with that of the current stream."""
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield stream
    before.wait_stream(stream)


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


#: Seconds without work before a single call, and how many of them are timed.
_PAUSE, _SINGLE_CALLS = 0.02, 21
#: Cycles for which the GPU waits before a single call, so that the host has launched its graph by then: half a
#: millisecond. Launched without a graph, a call of Python takes longer after a pause, 0.8 ms on an H200's host.
_WAITED_CYCLES = 1_000_000


def time_single(call: Callable[[], Any], *, dirty: bool) -> Measurement:
    """Time single calls, each a CUDA graph of its own, after a pause of 20 ms and with a cold L2 cache.

    Args:
        call: enqueues work on torch's current stream and does not synchronize.
        dirty: the cache is full of what must be written back; else of what was read.
    """
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    other = torch.zeros(2 * _L2_MULTIPLE * l2 // 4, device="cuda")
    found = []
    with _beside() as stream:
        for _ in range(3):  # compile, allocate, warm up
            call()
        run = _graph(lambda _: call(), 1, 1, stream)
        for _ in range(_SINGLE_CALLS):
            _ = other.add_(1) if dirty else other.sum()
            torch.cuda.synchronize()
            time.sleep(_PAUSE)
            torch.cuda._sleep(_WAITED_CYCLES)  # pyright: ignore[reportPrivateUsage]  # no public name
            found.append(elapsed(run))
    return Measurement.timed(sorted(found), 1)


#: Seconds of work whose energy is measured: NVML counts it some ten times a second.
_ENERGY_SECONDS = 0.5


def power(call: Callable[[int], Any], sets: int, seconds: float) -> dict[str, Measurement]:
    """Joules of a call of `seconds`, and the clock of the multiprocessors, while `time_gpu`'s graph of it is replayed.

    Nothing where NVML's package is not installed.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    clocks = list[int]()
    with _beside() as stream:
        calls, run = _repeated(call, seconds, sets, stream)
        replays = max(1, round(_ENERGY_SECONDS / (seconds * calls)))
        run()
        torch.cuda.synchronize()
        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
        for index in range(replays):
            run()
            if index % max(1, replays // 8) == replays // 16:
                stream.synchronize()
                run()
                clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
        torch.cuda.synchronize()
        spent = (pynvml.nvmlDeviceGetTotalEnergyConsumption(device) - before) / 1e3 / (replays + len(clocks)) / calls
    return {"joules": Measurement(spent, "J"), "clock": Measurement(sorted(clocks)[len(clocks) // 2] * 1e6, "Hz")}


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
    properties = torch.cuda.get_device_properties(device)
    # By its name in the machine: torch's number counts what CUDA_VISIBLE_DEVICES leaves.
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id=GPU-{properties.uuid}"]
    try:
        values = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        state: dict[str, Any] = dict(
            zip(fields.split(","), (value.strip() for value in values.split(",")), strict=True)
        )
    except (OSError, subprocess.SubprocessError):
        state = {"name": torch.cuda.get_device_name(device)}
    return state | {
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }


Measurements = dict[str, Measurement]

#: Operations per byte beyond which the multipliers and their power are the limit, not memory.
_DENSE = 200


@dataclass(frozen=True)
class Case:
    """A function of tensors and one set of them, all that it reads.

    operations: multiplications and additions it must do; 0 where bytes alone matter.
    """

    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    operations: float = 0.0

    def __call__(self) -> Any:
        """Run once."""
        return self.run(*self.inputs)


def measure(case: Case, *, replays: int = REPLAYS, regime: Regime = "sustained") -> Measurements:
    """Time a case; in the sustained regime on input sets that take turns, so that every call finds the L2 cache cold.

    Returns:
        seconds; bytes, all inputs read once and all outputs written once; operations, where there are any. Of sustained
        work that is limited by power also joules of a call, and clock, of the multiprocessors.

    Raises:
        KernelError: there is no GPU, or a kernel refuses.
    """
    size = nbytes(case.inputs)
    copies = rotations(size, case.inputs[0].device) - 1 if regime == "sustained" else 0
    sets = [case.inputs, *(tuple(tensor.clone() for tensor in case.inputs) for _ in range(copies))]
    written = nbytes(case())
    dense = case.operations > _DENSE * (size + written)
    found: Measurements = {}
    if regime == "sustained":
        settle = SETTLE if dense else 0.0
        found["seconds"] = time_gpu(lambda index: case.run(*sets[index]), len(sets), replays=replays, settle=settle)
        if dense and replays == REPLAYS:
            found |= power(lambda index: case.run(*sets[index]), len(sets), found["seconds"].value)
    else:
        found["seconds"] = time_single(case, dirty=regime == "single-dirty")
    counted = {"bytes": Measurement(size + written, "B"), "operations": Measurement(case.operations, "op")}
    return found | {name: exact for name, exact in counted.items() if exact.value}


def fastest(cases: Iterable[Case]) -> Case:
    """The case that takes least time; those that torch refuses to run are left out.

    Raises:
        KernelError: there is no GPU, or none of them runs.
    """
    seconds: list[tuple[float, Case]] = []
    for case in cases:
        try:
            seconds.append((measure(case, replays=3)["seconds"].value, case))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
    if not seconds:
        raise KernelError("torch runs none of the calls that would do this.")
    return min(seconds, key=lambda timed: timed[0])[1]


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors of a tuple or list."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(nbytes, value)) if isinstance(value, tuple | list) else 0


def gpu() -> torch.device:
    """The GPU that benchmarks run on.

    Raises:
        KernelError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise KernelError("benchmarks need an NVIDIA GPU, and torch sees none.")
    _wake()
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def _wake() -> None:
    """Work for a tenth of a second: an idle GPU has lowered its clocks and takes a while to raise them."""
    x = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    for _ in range(500):
        x @ x  # pyright: ignore[reportUnusedExpression]  # for its time
    torch.cuda.synchronize()


#: Tensors that are read take turns until they fill so many bytes: more than the caches of any processor.
COLD_BYTES = 2**28
#: Seconds that all repetitions of one function take at most, and how many there are at least and at most.
_CPU_SECONDS, _FEWEST, _MOST = 2.0, 7, 51
#: Seconds that a call takes at least, as far as this clock is concerned.
_RESOLUTION = 1e-6


def time_cpu(*functions: Callable[[], Any], seconds: float = _CPU_SECONDS) -> list[Measurement]:
    """Time functions in turns. In each, every one is repeated for about as long as the slowest takes for one call.

    Args:
        seconds: that each may take in all, unless seven turns take longer.
    """
    once = [_elapsed(function) for function in functions for _ in range(2)][1::2]
    calls = [round(max(once) / max(one, _RESOLUTION)) or 1 for one in once]
    replays = min(_MOST, max(_FEWEST, round(seconds / max(once))))
    order, shuffle = list(range(len(functions))), random.Random(0).shuffle
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(replays):
        shuffle(order)
        for index in order:
            found[index].append(_elapsed(functions[index], calls[index]))
    return [
        Measurement.timed([one / several for one in sorted(times)], several)
        for times, several in zip(found, calls, strict=True)
    ]


def cpu_label() -> str:
    """The processor's name and the number of its cores that are used, such as "AMD EPYC with 2 cores"."""
    cores = torch.get_num_threads()
    return f"{cpu_name()} with {cores} core{'s' if cores > 1 else ''}"


def cpu_state() -> dict[str, Any]:
    """Processor, caches, instructions, threads, load and priority now, as plain data; what the system does not tell is
    left out."""
    state: dict[str, Any] = {
        "name": cpu_name(),
        "instructions": instructions(),
        "threads": torch.get_num_threads(),
        "l3_bytes": _l3_bytes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "scheduling": _scheduling(),
    }
    return {name: value for name, value in state.items() if value is not None}


def _elapsed(function: Callable[[], Any], calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def _l3_bytes() -> int | None:
    """Bytes of the last cache that cores share; None where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return None
    return int(text.removesuffix("K")) * 1024


def _scheduling() -> str | None:
    """Whether this process goes before others: "real time" or its niceness."""
    if not hasattr(os, "sched_getscheduler"):
        return None
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return "real time"
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
