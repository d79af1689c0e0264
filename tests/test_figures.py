"""Figures of every kind are drawn from a table's numbers, whatever these are."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotquant.project import Project
from rotquant.reporting import figures
from rotquant.reporting import tables as collected
from rotquant.reporting.style import PercentAxis
from tests.reports import every_kind


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One table of each kind, computed; tests leave its run files as they are."""
    with every_kind(tmp_path_factory.mktemp("kinds")) as loaded:
        yield loaded


@pytest.mark.parametrize("broken", [None, math.inf, math.nan])
def test_every_figure_is_drawn(kinds: Project, tmp_path: Path, broken: float | None) -> None:
    for name, chosen in kinds.tables.items():
        if chosen.figure:
            values, _ = collected.collect(kinds, chosen)
            last = chosen.rows[-1].name
            changed = {
                place: replace(value, values=(broken,)) if broken and place[0] == last else value
                for place, value in values.items()
            }
            figures.draw(kinds, chosen, changed, tmp_path / f"{name}.svg")
            assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")


def test_a_figure_of_tasks_may_draw_some_rows(kinds: Project, tmp_path: Path) -> None:
    chosen = kinds.table("quarot_table3")
    values, _ = collected.collect(kinds, chosen)
    figure = chosen.figure.model_copy(update={"rows": ("Baseline",)})
    for name, drawn in (("all", chosen), ("one", chosen.model_copy(update={"figure": figure}))):
        figures.draw(kinds, drawn, values, tmp_path / f"{name}.svg")
    assert "QuaRot" in (tmp_path / "all.svg").read_text()
    assert "QuaRot" not in (tmp_path / "one.svg").read_text()


def test_equal_numbers_give_the_same_figure(kinds: Project, tmp_path: Path) -> None:
    chosen = kinds.table("quarot_table1")
    values, _ = collected.collect(kinds, chosen)
    for name in ("a.svg", "b.svg"):
        figures.draw(kinds, chosen, values, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_figure_may_draw_some_rows_against_another_than_the_baseline(kinds: Project, tmp_path: Path) -> None:
    chosen = kinds.table("quarot_table1")
    values, _ = collected.collect(kinds, chosen)
    drawn = chosen.model_copy(
        update={"figure": chosen.figure.model_copy(update={"over": "QuaRot", "rows": ("QuaRot",)})}
    )
    figures.draw(kinds, drawn, values, tmp_path / "over.svg")
    text = (tmp_path / "over.svg").read_text()
    assert "<!-- relative to QuaRot -->" in text
    assert "<!-- Baseline -->" not in text
    assert "<!-- published -->" not in text  # a number compared with itself


@given(st.lists(st.floats(min_value=-50, max_value=1e6) | st.just(math.inf) | st.just(math.nan), min_size=1))
def test_every_change_has_a_place_on_the_axis_and_what_broke_down_is_last(changes: list[float]) -> None:
    axis = PercentAxis(changes)
    low, high = axis.limits
    places = [axis.place(change) for change in changes]
    assert all(low < place < high for place in places)
    finite = [place for change, place in zip(changes, places, strict=True) if math.isfinite(change)]
    for change, place in zip(changes, places, strict=True):
        assert math.isfinite(change) or all(place > other for other in finite)
