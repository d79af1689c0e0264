"""A stand-in for CUDA graphs of trainings without a GPU, and what tests on a GPU share."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rotquant.training import replay
from tests.helpers.capturing import as_recorded


class Stand:
    """In place of a graph, without a GPU: computes each part anew from inputs of its own, as a graph does."""

    made: list["weakref.ref[Stand]"]
    calls: list[int]

    def __init__(
        self, compute: Any, part: tuple[Tensor, ...], parameters: Iterable[Tensor], before: "Stand | None" = None
    ) -> None:
        self.compute, self.inputs, self.parameters = compute, tuple(map(torch.clone, part)), list(parameters)
        self.before, self.gradients = before, list[Tensor | None]()
        self.made.append(weakref.ref(self))

    def __call__(self, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        for own, given in zip(self.inputs, part, strict=True):
            own.copy_(given)
        assert (self.before is None) == all(parameter.grad is None for parameter in self.parameters)
        self.calls.append(1)
        with as_recorded():
            found = self.compute(self.inputs)
        self.gradients = [parameter.grad for parameter in self.parameters]
        return found


def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    """`Stand` in place of graphs, and the CPU in place of a GPU."""
    monkeypatch.setattr(Stand, "made", [], raising=False)
    monkeypatch.setattr(Stand, "calls", [], raising=False)
    monkeypatch.setattr(replay, "_failures", [])
    monkeypatch.setattr(replay, "_on_gpu", lambda part: True)
    monkeypatch.setattr(replay, "Recorded", Stand)
    monkeypatch.setattr(replay, "_beside", lambda device: contextlib.nullcontext())
    return Stand


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each part that a graph computes; no recording may fail."""
    found: list[int] = []
    whole = replay.Recorded.__call__

    def call(recorded: replay.Recorded, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        found.append(1)
        return whole(recorded, part)

    monkeypatch.setattr(replay, "_failures", [])
    monkeypatch.setattr(replay.Recorded, "__call__", call)
    yield found
    assert replay._failures == []


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test that records CUDA graphs."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.mark.gpu(pytest.mark.captures(needs(test)))
