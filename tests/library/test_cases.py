"""Fewer cases of a parametrized test still have every value among them, and none is lost."""

from itertools import product
from typing import Any

import pytest

from rotquant.recipes.presets import all_presets, preset
from tests.helpers.cases import each_once, one_in, one_of_each, only


def kept(cases: list[Any]) -> list[tuple[Any, ...]]:
    """The values of the cases that are not `long`."""
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 5), (5, 2), (3, 3), (2, 3, 4)])
def test_each_value_is_in_a_case_that_is_kept_and_all_combinations_are_there(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in zip("abc", sizes, strict=False)]
    cases = each_once(*axes)
    assert [case.values for case in cases] == [*product(*axes)]
    assert len(kept(cases)) == max(sizes)
    assert {value for values in kept(cases) for value in values} == {value for axis in axes for value in axis}


def test_tuples_are_cases_of_several_values() -> None:
    assert kept(each_once([("a", 1), ("b", 2)], ["c"])) == [("a", 1, "c"), ("b", 2, "c")]
    assert kept(one_in(2, [("a", 1), ("b", 2), ("c", 3)])) == [("a", 1), ("c", 3)]
    assert kept(only(["b"], ["a", "b"])) == [("b",)]
    assert len(only(["b"], ["a", "b"])) == 2


def test_presets_that_are_kept_have_the_methods_of_all() -> None:
    cases = one_of_each(all_presets(), ["nvfp4"])
    assert [case.values for case in cases] == [(name,) for name in all_presets()]
    assert {tuple(preset(name).methods) for (name,) in kept(cases)} == {
        tuple(preset(name).methods) for name in all_presets()
    }
    assert ("nvfp4",) in kept(cases)
