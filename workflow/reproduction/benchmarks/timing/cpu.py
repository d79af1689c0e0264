"""Timing on a CPU: medians and spread of repeated calls, in which several functions take turns.

The speed of memory on a shared machine drifts by tens of percent within minutes, so compared functions take turns.
Their order differs in each turn, since a function finds the caches as the one before left them.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from reproduction.benchmarks.cpu_kernels.operators import instructions
from reproduction.benchmarks.records import Measurement
from rotquant.foundation.environment import cpu_name

#: Tensors that are read take turns until they fill so many bytes: more than the caches of any processor.
COLD_BYTES = 2**28
#: Seconds that all repetitions of one function take at most, and how many there are at least and at most.
_SECONDS, _FEWEST, _MOST = 2.0, 7, 51
#: Seconds that a call takes at least, as far as this clock is concerned.
_RESOLUTION = 1e-6


def time_cpu(*functions: Callable[[], Any], seconds: float = _SECONDS) -> list[Measurement]:
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
