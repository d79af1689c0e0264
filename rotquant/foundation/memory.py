"""Bounded in-memory stores of computed values: steps that need the same share it."""

from collections.abc import Hashable
from typing import Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=_Sized)


def keep(store: dict[K, V], key: K, value: V, most: int) -> V:
    """Put a value into a store of at most so many bytes and return it; a full store is emptied first.

    A value that is larger than all of the store is kept alone.
    """
    if sum(other.nbytes for other in store.values()) + value.nbytes > most:
        store.clear()
    store[key] = value
    return value
