"""A loss and its gradient, recorded once as a CUDA graph and launched as one from then on.

The host launches a step's kernels one by one, which for a small model takes several times as long as the GPU needs. A
graph holds the forward and the backward pass. Clipping, optimizers and schedules stay outside and run as ever.

Only a pure function of tensors can be recorded: it reads equal shapes and types at equal addresses each time. It waits
for nothing, copies nothing from the host, and no number of its tensors decides what it does next. A graph launches the
kernels that the host would, so a training's steps do not depend on when one was recorded.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Self

import torch
from torch import Tensor

from rotquant.tensors.devices import tensor_core_products

#: Parts that a training computes kernel by kernel first: kernels are compiled, and libraries make their workspaces.
WARM_UP = 3
#: Steps of the shortest training for which a graph is recorded, which takes as long as some steps.
LEAST_STEPS = 16

#: Computes the gradients of a part's loss, adds them to those that there are, and returns named scalars.
Compute = Callable[[tuple[Tensor, ...]], dict[str, Tensor]]

#: Why recording failed in this process, which tries no more then: torch keeps the memory of a recording that failed.
_failures: list[str] = []


class Recorded:
    """A computation for parts of one shape as a CUDA graph, recorded on the current stream, not the default one.

    It adds to the gradients that there are when it is recorded, else it makes new ones. Nothing is computed until it is
    called. A call overwrites the gradients that the one before made.

    Args:
        before: an earlier recording of the same training, which lends its memory: of it only gradients stay.
    """

    def __init__(
        self,
        compute: Compute,
        part: tuple[Tensor, ...],
        parameters: Iterable[Tensor],
        before: "Recorded | None" = None,
    ) -> None:
        self._parameters = list(parameters)
        self._inputs = tuple(tensor.clone() for tensor in part)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if before is None else before._graph.pool()
        with torch.cuda.graph(self._graph, pool, torch.cuda.current_stream()):
            self._scalars = compute(self._inputs)
        self.gradients = [parameter.grad for parameter in self._parameters]

    def __call__(self, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The part's scalars; its gradients become those of the parameters, or are added to them."""
        for own, given in zip(self._inputs, part, strict=True):
            own.copy_(given)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return {name: value.clone() for name, value in self._scalars.items()}


class Replay:
    """Computes the gradients of parts: by a graph where one pays, else kernel by kernel. Open it for one training.

    While it is open, products of float32 are those of tensor cores (`tensor_core_products`).

    On a GPU two graphs are recorded, for parts of the first one's shape, after some of them: one makes the gradients of
    a step's first part, the other adds those of a further part. Parts of other shapes, and what is added to their
    gradients, are computed kernel by kernel. A recording that fails ends no training: a warning says it, and the
    process records nothing more.

    Args:
        parameters: all leaves that get a gradient.
        steps: of the training.
        pure: whether the loss is a pure function of its part and of tensors that stay at their addresses.
    """

    def __init__(self, parameters: Iterable[Tensor], steps: int, *, pure: bool = True) -> None:
        self.parameters = list(parameters)
        self.wanted = pure and steps >= LEAST_STEPS
        self._first: Recorded | None = None
        self._further: Recorded | None = None
        self._shape: list[tuple[torch.Size, torch.dtype]] = []
        self._seen = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(tensor_core_products())
        return self

    def __exit__(self, *_: object) -> None:
        """Free the graphs and their memory, in which the last gradients lie."""
        self._open.close()
        self._first = self._further = None
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self, compute: Compute, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Compute a part's scalars and its gradients, which hold until the next step, or add these to earlier ones."""
        if not self.wanted or _failures or not _on_gpu(part):
            return compute(part)
        shape = [(tensor.shape, tensor.dtype) for tensor in part]
        self._shape = self._shape or shape
        if shape != self._shape:
            return compute(part)
        further = any(parameter.grad is not None for parameter in self.parameters)
        self._seen += 1
        if self._first is None and (further or self._seen <= WARM_UP):
            with _beside(part[0].device):
                return compute(part)
        if not further:
            self._first = self._first or self._record(compute, part)
            recorded = self._first
        elif self._first is not None and self._has_gradients_of(self._first):
            self._further = self._further or self._record(compute, part, self._first)
            recorded = self._further
        else:
            recorded = None
        return compute(part) if recorded is None else recorded(part)

    def _has_gradients_of(self, recorded: Recorded) -> bool:
        pairs = zip(self.parameters, recorded.gradients, strict=True)
        return all(parameter.grad is gradient for parameter, gradient in pairs)

    def _record(self, compute: Compute, part: tuple[Tensor, ...], before: Recorded | None = None) -> Recorded | None:
        """Record a graph, or say why there is none and leave everything as it was."""
        gradients = [parameter.grad for parameter in self.parameters]
        try:
            with _beside(part[0].device):
                return Recorded(compute, part, self.parameters, before)
        except RuntimeError as error:  # torch's and CuPy's; the same computation has just run without a graph
            reason = str(_first(error)).partition("\n")[0]
            _failures.append(reason)
            warnings.warn(
                f"a training's step could not be recorded as a CUDA graph ({reason}): steps are launched kernel by "
                "kernel, with the same results, and may take several times as long.",
                stacklevel=2,
            )
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            return None


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
