"""Device and dtype names as users write them, and the torch objects they mean, and what differs between devices."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rotquant.foundation.errors import RecipeError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")

#: Elements of a matrix that a CPU works on at once: intermediate results stay in its cache and take no new pages, which
#: cost more than the arithmetic.
_BLOCK = 2**17
#: Threads beyond these wait for memory, and each has a result of its own there.
_MOST_THREADS = 8


#: Floating-point types of networks.
DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_device(name: str) -> None:
    """Refuse a device's name that means none, or a GPU where no driver of one is, without torch, which takes seconds.

    Raises:
        RecipeError: it says what to write instead.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise RecipeError(f"unknown device {name!r}; use cpu, cuda, cuda:N or auto.")
    if name.startswith("cuda") and not has_driver():
        raise RecipeError(f"device {name!r} is not available: this machine has no NVIDIA GPU.")


def check_dtype(name: str) -> None:
    """Refuse the name of a type that no network has, without torch; raises `RecipeError`."""
    if name not in DTYPES:
        raise RecipeError(f"unknown dtype {name!r}; use float32, bfloat16, float16 or float64.")


def torch_device(name: str) -> "torch.device":
    """The torch device of a `--device` option.

    Raises:
        RecipeError: for an unknown device or a GPU that is not there.
    """
    check_device(name)
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device {name!r} is not available: torch sees {torch.cuda.device_count()} GPUs.")
    return device


def check_gpu(name: str) -> None:
    """Refuse a device's name that asks for a GPU where no driver of one is, without torch, which takes seconds to load.

    Raises:
        RecipeError: it says what to change.
    """
    if name.startswith("cuda") and not has_driver():
        raise RecipeError(
            f"the device is {name!r}, and this machine has no NVIDIA GPU: take one that has, or another device "
            "(`device: cpu` in the configuration, `--config device=cpu` of Snakemake, `--device cpu` of rotquant)."
        )


def has_driver() -> bool:
    """Whether NVIDIA's driver is here: its tool, a GPU's file, or that of Windows' subsystem for Linux."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a `--dtype` option.

    Raises:
        RecipeError: for a type other than float32, bfloat16, float16 and float64.
    """
    check_dtype(name)
    import torch

    return getattr(torch, name)


def learning_dtype(dtype: "torch.dtype") -> "torch.dtype":
    """The type in which a network of `dtype` is trained through: bfloat16 for float16, whose gradients underflow."""
    import torch

    return torch.bfloat16 if dtype == torch.float16 else dtype


def of_device(bounds: Mapping[str, int], device: "torch.device") -> int:
    """The bound for a kind of device, of one for `cpu` and one for `cuda`, which any accelerator takes."""
    return bounds["cpu" if device.type == "cpu" else "cuda"]


def row_blocks(matrix: "torch.Tensor") -> list[slice]:
    """Slices of the rows of a matrix that a CPU handles one after the other in its caches; elsewhere one of all.

    For element by element arithmetic of several steps, whose result does not depend on the blocks.
    """
    rows, features = matrix.shape
    size = max(1, _BLOCK // max(1, features)) if matrix.device.type == "cpu" else max(1, rows)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What a function gives for each item, computed in as many threads as torch may use, each of which computes alone.

    For many short operations: threads that share each of these would spend their time waiting for each other.
    """
    import torch

    threads = torch.get_num_threads()
    if threads == 1:
        return [function(item) for item in items]
    try:
        with ThreadPoolExecutor(min(threads, _MOST_THREADS), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)  # what threads set for themselves, later ones would begin with


def gpu_name(device: "torch.device") -> str | None:
    """The name of a CUDA device, None for the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """While open, a GPU's matrix products of float32 round their factors to 11 bits (TF32), eight times as fast.

    For sums of many terms of which candidates are chosen, and for gradients. Elsewhere, and for other types, nothing
    changes.
    """
    import torch

    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before
