"""Time as tests want it, for what `rotquant.foundation.progress` says of long work."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rotquant.foundation import progress


class Clock:
    """Seconds that pass when a test says so, and `each` seconds at every look."""

    def __init__(self, each: float = 0.0) -> None:
        self.now, self.each = 1000.0, each

    def __call__(self) -> float:
        self.now += self.each
        return self.now


@contextmanager
def long_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block in which all work is long: half a minute passes at every look at the clock."""
    with monkeypatch.context() as patch:
        patch.delenv("ROTQUANT_QUIET", raising=False)
        with progress.shown_on(progress.Display(Clock(each=30.0), thread=False)):
            yield
