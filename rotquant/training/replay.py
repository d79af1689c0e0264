"""A loss and its gradient, recorded once as a CUDA graph and launched as one from then on.

The host launches a step's kernels one by one, which for a small model takes several times as long as the GPU needs. A
graph holds the forward and the backward pass. Clipping, optimizers and schedules stay outside and run as ever.

Only a pure function of tensors can be recorded: it reads equal shapes and types at equal addresses each time. It waits
for nothing, copies nothing from the host, and no number of its tensors decides what it does next. A graph launches the
kernels that the host would, so a training's steps do not depend on when one was recorded.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Self

import torch
from torch import Tensor

#: Parts that a training computes kernel by kernel first: kernels are compiled, and libraries make their workspaces.
WARM_UP = 3
#: Steps of the shortest training for which a graph is recorded, which takes as long as some steps.
LEAST_STEPS = 16

#: Computes the gradients of a part's loss, where there are none yet, and returns named scalars.
Compute = Callable[[tuple[Tensor, ...]], dict[str, Tensor]]

#: Why recording failed in this process, which tries no more then: torch keeps the memory of a recording that failed.
_failures: list[str] = []


class Recorded:
    """A computation for parts of one shape as a CUDA graph, recorded on the current stream, not the default one.

    Nothing is computed until it is called. A call overwrites the scalars and gradients that the one before gave.
    """

    def __init__(self, compute: Compute, part: tuple[Tensor, ...], parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._inputs = tuple(tensor.clone() for tensor in part)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            self._scalars = compute(self._inputs)
        self._gradients = [parameter.grad for parameter in self._parameters]

    def __call__(self, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The part's scalars; its gradients become those of the parameters."""
        for own, given in zip(self._inputs, part, strict=True):
            own.copy_(given)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._scalars


class Replay:
    """Computes the gradients of parts: by a graph where one pays, else kernel by kernel. Open it for one training.

    A graph is recorded on a GPU, for parts of the first one's shape, after some of them. Parts of other shapes, and
    parts whose gradients are added to earlier ones, are computed kernel by kernel. A recording that fails ends no
    training: a warning says it, and the process records nothing more.

    Args:
        parameters: all leaves that get a gradient.
        steps: of the training.
        pure: whether the loss is a pure function of its part and of tensors that stay at their addresses.
    """

    def __init__(self, parameters: Iterable[Tensor], steps: int, *, pure: bool = True) -> None:
        self.parameters = list(parameters)
        self.wanted = pure and steps >= LEAST_STEPS
        self._recorded: Recorded | None = None
        self._shape: list[tuple[torch.Size, torch.dtype]] = []
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the graph and its memory, in which the last gradients lie."""
        self._recorded = None
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self, compute: Compute, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Compute a part's gradients and scalars; these hold until the next part."""
        if not self.wanted or _failures or not _on_gpu(part):
            return compute(part)
        shape = [(tensor.shape, tensor.dtype) for tensor in part]
        self._shape = self._shape or shape
        if shape != self._shape or any(parameter.grad is not None for parameter in self.parameters):
            return compute(part)
        if self._recorded is None:
            self._seen += 1
            if self._seen <= WARM_UP:
                with _beside(part[0].device):
                    return compute(part)
            self._try_to_record(compute, part)
        return compute(part) if self._recorded is None else self._recorded(part)

    def _try_to_record(self, compute: Compute, part: tuple[Tensor, ...]) -> None:
        """Record the graph, or say why there is none and leave everything as it was."""
        try:
            with _beside(part[0].device):
                self._recorded = Recorded(compute, part, self.parameters)
        except RuntimeError as error:  # torch's and CuPy's; the same computation has just run without a graph
            reason = str(_first(error)).partition("\n")[0]
            _failures.append(reason)
            warnings.warn(
                f"a training's step could not be recorded as a CUDA graph ({reason}): steps are launched kernel by "
                "kernel, with the same results, and may take several times as long.",
                stacklevel=2,
            )
            for parameter in self.parameters:
                parameter.grad = None


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """While open, work goes to a stream for recordings, in order with that of the current stream.

    Parts before a recording run there too, since autograd adds up a leaf's gradients on the stream that saw the leaf
    first. A recording that fails leaves torch on its stream, and this leads back.
    """
    before, stream = torch.cuda.current_stream(device), _stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A GPU's stream for recordings, one for all trainings, since libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def _on_gpu(part: tuple[Tensor, ...]) -> bool:
    return all(tensor.is_cuda for tensor in part)


def _first(error: BaseException) -> BaseException:
    """The error that others followed, such as that of a recording that could not be ended."""
    return error if error.__context__ is None else _first(error.__context__)
