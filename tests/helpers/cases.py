"""Cases of parametrized tests that run without `--long`: fewer than all, and with every value among them."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from rotquant.recipes.presets import preset


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of some values. Each value is in one that is not `long`; longer axes take turns with others."""
    turns = range(max(map(len, axes)))
    kept = {tuple(turn % len(axis) for axis in axes) for turn in turns}
    combined = zip(product(*map(range, map(len, axes))), product(*axes), strict=True)
    return [_case(flat(values), numbers in kept) for numbers, values in combined]


def only(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, `long` but for those that are named."""
    kept = list(kept)
    return [_case(case if isinstance(case, tuple) else (case,), case in kept) for case in cases]


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, `long` but for the first in each `step`."""
    return [_case(one if isinstance(one, tuple) else (one,), not place % step) for place, one in enumerate(cases)]


def one_of_each(names: Iterable[str], kept: Iterable[str] = ()) -> list[Any]:
    """Presets by name, `long` but for the first of those with the same methods, with and without a rotation, and for
    further ones that are named."""
    names, first = list(names), dict[tuple[str, ...], str]()
    for name in names:
        recipe = preset(name)
        first.setdefault((*recipe.methods, *["rotation"] * (recipe.rotation is not None)), name)
    return only({*first.values(), *kept}, names)


def flat(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values with those of tuples in their places."""
    return tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,)))


def _case(values: tuple[Any, ...], kept: bool) -> Any:
    return pytest.param(*values, marks=() if kept else pytest.mark.long)
