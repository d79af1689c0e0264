"""`rotquant doctor`: what this machine and environment have, what is broken or slow, and what to do about each.

A check looks at one thing and never raises: what it cannot find out is a finding. Nothing is changed but for caches
that any command fills.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Column, Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.foundation.environment import cpu_name
from rotquant.foundation.errors import KernelError, one_line
from rotquant.foundation.progress import task

State = Literal["ok", "absent", "slow", "broken"]

#: Packages beyond those that the library requires, and what each is for.
OPTIONAL = {
    "compressed-tensors": "exports to compressed-tensors, and folders of it: pip install 'rotquant[serve]'",
    "gguf": "GGUF files, as models and from `rotquant export`: pip install 'rotquant[serve]'",
    "rotquant-reproduction": "the papers' tables: pip install ./workflow in a checkout",
    "matplotlib": "figures, of examples too: pip install 'rotquant[study]'",
    "fast-hadamard-transform": "a peer that benchmarks compare with, nothing else",
}
#: Bytes that a cache should have left: a 7B checkpoint in 16 bits.
_ROOM = 15e9


@dataclass(frozen=True)
class CheckResult:
    """A finding.

    state: ok; absent: works without; slow: works, and slower than it could; broken: something needed does not work.
    advice: what to do; empty where all is well.
    """

    name: str
    state: State
    found: str
    advice: str = ""


@answers(
    {
        "checks": "each with name, state (ok, absent, slow or broken), found, and advice, empty where all is well",
        "broken": "how many: the exit status is 1 where there are any",
    }
)
def doctor() -> CommandResult:
    """Check this machine and environment: packages, GPU, kernels, caches, threads; what is slow or broken, and why.

    Exit status 1 where something that is needed is broken. Without a GPU everything works but for its speed.

    Example: `rotquant doctor`
    """
    with task("looking"):
        found = examine()
    table = Table(Column("what", no_wrap=True), "state", "found", "what to do")
    for check in found:
        table.add_row(check.name, check.state, check.found, check.advice)
    broken = sum(check.state == "broken" for check in found)
    last = f"{broken} broken: see what to do" if broken else "all that is needed works"
    data = {"checks": [asdict(check) for check in found], "broken": broken}
    return CommandResult(data, (table, last), status=int(broken > 0))


def examine() -> list[CheckResult]:
    """All findings, in the order in which one depends on those before."""
    checks: list[Callable[[], Iterator[CheckResult]]] = [
        _python,
        _packages,
        _optional,
        _gpu,
        _kernels,
        _cpu,
        _caches,
        _places,
    ]
    return [found for check in checks for found in _guarded(check)]


def _guarded(check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    """The findings of a check; an exception that it meets is a finding too."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.strip("_")
        yield CheckResult(
            name, "broken", one_line(f"{type(error).__name__}: {error}"), "reinstall: pip install rotquant"
        )


def _python() -> Iterator[CheckResult]:
    old = sys.version_info < (3, 11)
    advice = "rotquant needs Python 3.11 or newer" if old else ""
    yield CheckResult("Python", "broken" if old else "ok", f"{platform.python_version()}, {sys.executable}", advice)
    yield CheckResult("system", "ok", platform.platform())


def _packages() -> Iterator[CheckResult]:
    """Required packages and whether their versions are those that rotquant asks for."""
    from packaging.requirements import Requirement

    yield CheckResult("rotquant", "ok", f"{_version('rotquant')}, {Path(__file__).parents[1]}")
    for line in importlib.metadata.requires("rotquant") or ():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = _version(needed.name)
        if version is None:
            yield CheckResult(needed.name, "broken", "not installed", f"pip install '{needed.name}{needed.specifier}'")
        elif not needed.specifier.contains(version, prereleases=True):
            advice = f"pip install '{needed.name}{needed.specifier}'"
            yield CheckResult(needed.name, "broken", f"{version}, outside of {needed.specifier}", advice)
        else:
            yield CheckResult(needed.name, "ok", version)


def _optional() -> Iterator[CheckResult]:
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        yield (
            CheckResult(name, "absent", "not installed", purpose)
            if version is None
            else CheckResult(name, "ok", version)
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> Iterator[CheckResult]:
    """Every GPU that torch sees; why it sees none where there is a driver."""
    import torch

    from rotquant.tensors.devices import has_driver

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _of_gpu(torch.cuda.get_device_properties(index), index)
    elif not has_driver():
        advice = "all commands work on the CPU; models of a billion parameters and more want an NVIDIA GPU"
        yield CheckResult("GPU", "absent", "no NVIDIA GPU or driver", advice)
    elif torch.version.cuda is None:
        advice = "install torch's CUDA build, e.g. pip install torch --index-url of CUDA wheels"
        yield CheckResult("GPU", "slow", f"a driver, and torch {torch.__version__} built without CUDA", advice)
    else:
        advice = f"torch needs a driver for CUDA {torch.version.cuda}: update it, and see CUDA_VISIBLE_DEVICES"
        yield CheckResult("GPU", "slow", "a driver, and torch sees no GPU", advice)


def _of_gpu(gpu: Any, index: int) -> CheckResult:
    found = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
    if gpu.major < 8:
        advice = "the CUDA kernels need 8.0 (A100, RTX 30) or newer: simulations run, decoders do not"
        return CheckResult(f"GPU {index}", "slow", found, advice)
    return CheckResult(f"GPU {index}", "ok", found)


def _kernels() -> Iterator[CheckResult]:
    """Whether the sources are here, and whether NVRTC compiles for, and the driver runs, the GPU's architecture."""
    import torch

    from rotquant.kernels.hadamard import launch
    from rotquant.kernels.launch.loading import SOURCES, architecture_of_device, compile_source

    files = len(list(SOURCES.glob("*.cu")))
    if not files:
        yield CheckResult(
            "CUDA sources", "broken", f"none in {SOURCES}", "install the wheel, or keep the link in a checkout"
        )
        return
    yield CheckResult("CUDA sources", "ok", f"{files} files in {SOURCES}")
    there, gpu = "sm_90a", torch.cuda.is_available()
    needed: State = "broken" if gpu else "absent"  # without a GPU nothing compiles them
    try:
        there = architecture_of_device(torch.device("cuda", 0)) if gpu else there
        compile_source(launch.sources(there)[0], there)
        yield CheckResult(
            "NVRTC", "ok", f"{_compiler()} compiles for {there}" + ("" if gpu else ", tried without a GPU")
        )
    except KernelError as error:
        yield CheckResult(
            "NVRTC", needed, str(error).splitlines()[0], "pip install cupy-cuda13x 'cuda-toolkit[nvrtc,cccl]'"
        )
    driver = _driver()
    if gpu and driver is not None:
        yield _driver_check(driver, _compiler())


def _compiler() -> str:
    """NVRTC's version: "CUDA 13.0"."""
    from cupy_backends.cuda.libs import nvrtc

    return "CUDA {}.{}".format(*nvrtc.getVersion())


def _driver() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs; None where it does not say."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

        status, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError, OSError):
        return None
    return None if int(status) else (version // 1000, version % 1000 // 10)


def _driver_check(driver: tuple[int, int], compiler: str) -> CheckResult:
    """Machine code of a CUDA runs on drivers of its major version or a newer one."""
    found = "driver of CUDA {}.{}, kernels of {}".format(*driver, compiler)
    major = int(re.findall(r"\d+", compiler)[0])
    if driver[0] < major:
        return CheckResult("driver", "broken", found, f"update the driver to one of CUDA {major}")
    return CheckResult("driver", "ok", found)


def _cpu() -> Iterator[CheckResult]:
    """Threads that compute, next to cores that may be used."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, setting = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    found = f"{cpu_name()}, {cores} cores, {threads} threads" + (f" (OMP_NUM_THREADS={setting})" if setting else "")
    if threads > cores:
        yield CheckResult("CPU", "slow", found, f"threads wait for each other: export OMP_NUM_THREADS={cores}")
    elif threads < cores:
        yield CheckResult("CPU", "slow", found, f"cores are idle in a single command: export OMP_NUM_THREADS={cores}")
    else:
        yield CheckResult("CPU", "ok", found)


def _caches() -> Iterator[CheckResult]:
    from huggingface_hub import constants

    from rotquant.foundation.files import cache_folder

    for name in ("kernels", "gguf"):
        folder = cache_folder(name)
        lost = folder.is_relative_to(tempfile.gettempdir()) and not os.environ.get("ROTQUANT_CACHE")
        advice = "it is lost when a command ends, and made again: set ROTQUANT_CACHE to a folder that can be written"
        found = f"{folder}, {sum(1 for _ in folder.glob('*')):,} files" if folder.is_dir() else f"{folder}"
        yield CheckResult(f"cache of {name}", "slow" if lost else "ok", found, advice if lost else "")
    hub = Path(constants.HF_HUB_CACHE)
    models = sum(1 for _ in hub.glob("models--*"))
    offline = ", offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    there = next(folder for folder in (hub, *hub.parents) if folder.exists())
    found = f"{hub}, {models} models, {shutil.disk_usage(there).free / 1e9:,.0f} GB free{offline}"
    if not os.access(there, os.W_OK):
        yield CheckResult("hub cache", "slow", found, "it cannot be written: set HF_HOME to a folder that can")
    elif shutil.disk_usage(there).free < _ROOM:
        yield CheckResult("hub cache", "slow", found, "room for no 7B model: make room, or set HF_HOME to another disk")
    else:
        yield CheckResult("hub cache", "ok", found)


def _places() -> Iterator[CheckResult]:
    """Whether results can be written here, and temporary files."""
    for name, folder in (("working folder", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        free = f"{folder}, {shutil.disk_usage(folder).free / 1e9:,.0f} GB free"
        if os.access(folder, os.W_OK):
            yield CheckResult(name, "ok", free)
        else:
            advice = (
                "name outputs elsewhere" if name == "working folder" else "set TMPDIR to a folder that can be written"
            )
            state: State = "absent" if name == "working folder" else "broken"
            yield CheckResult(name, state, f"{free}, cannot be written", advice)
