"""Layers on the host, watched on a machine without a GPU, where the host and the device are one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rotquant.models import placement


@contextmanager
def only_what_is_fetched() -> Iterator[list[int]]:
    """While open, matrices of a layer that was not fetched hold NaN, as with a GPU they would be elsewhere.

    Yields:
        How many layers were there together, each time that one ran.
    """
    there: list[int] = []

    class Watched(placement._Fetching):
        def __call__(self, index: int, *more: Any) -> None:
            super().__call__(index, *more)
            there.append(len(self._copies))
            for absent in set(range(len(self.layers))) - {index}:
                for matrix in self.layers[absent]:
                    matrix.data = torch.full_like(matrix, torch.nan)

        def release(self, but: tuple[int, ...] = ()) -> None:
            super().release(but)
            for hosts, layer in zip(self._hosts, self.layers, strict=True):
                for matrix, host in zip(layer, hosts, strict=True):
                    matrix.data = host if not but else matrix.data  # at the end all is as it was

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_Fetching", Watched)
        yield there
