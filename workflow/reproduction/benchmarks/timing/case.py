"""Measurement of a function of tensors: cold caches, fewest bytes, operations.

A benchmark only defines the computation and its tensors; timing is the same for all of them. Nothing here falls back: a
case that cannot run raises.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.timing.gpu import REPLAYS, SETTLE, rotations, time_gpu
from rotquant.foundation.errors import KernelError

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


def measure(case: Case, *, replays: int = REPLAYS) -> Measurements:
    """Time a case on input sets that take turns, so that every call finds the L2 cache cold.

    Returns:
        seconds; bytes, all inputs read once and all outputs written once; operations, where there are any.

    Raises:
        KernelError: there is no GPU, or a kernel refuses.
    """
    size = nbytes(case.inputs)
    copies = rotations(size, case.inputs[0].device) - 1
    sets = [case.inputs, *(tuple(tensor.clone() for tensor in case.inputs) for _ in range(copies))]
    written = nbytes(case())
    settle = SETTLE if case.operations > _DENSE * (size + written) else 0.0
    timing = time_gpu(lambda index: case.run(*sets[index]), len(sets), replays=replays, settle=settle)
    counted = {"bytes": Measurement(size + written, "B"), "operations": Measurement(case.operations, "op")}
    return {"seconds": timing} | {name: exact for name, exact in counted.items() if exact.value}


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
