"""Figures of every kind are drawn from a table's numbers, whatever these are."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from reproduction.frame import values as collected
from reproduction.render.figures import draw as figures
from reproduction.render.figures.axes import PercentAxis, fit_labels
from reproduction.render.figures.changes import Change
from reproduction.render.figures.style import styled
from reproduction.tables.project import Project
from rotquant.commands.root import cli
from tests.helpers.reports import changed, every_kind


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
            for place in [place for place in values if broken and place[0] == last]:
                values = changed(values, place, broken)
            figures.draw(kinds, chosen, values, tmp_path / f"{name}.svg")
            assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")


def test_a_figure_that_needs_what_is_not_possible_says_why(
    kinds: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kinds.table("quarot_table9")
    values, _ = collected.collect(kinds, chosen)
    expanded = kinds.expanded(chosen.id)
    monkeypatch.setattr(Project, "expanded", lambda *_: replace(expanded, impossible=dict(lacking)))

    def drawn(*_: object) -> None:
        raise KeyError(("RTN INT4", "Llama-2-7B", "perplexity"))

    monkeypatch.setitem(figures.KINDS, chosen.figure.kind, drawn)
    lacking = {("RTN INT4", "Llama-2-7B"): "it is not computed, and its checkpoint is not here."}
    figures.draw(kinds, chosen, values, tmp_path / "a.svg")
    said = "No figure without RTN INT4, Llama-2-7B, perplexity: it is not computed, and its checkpoint is not here."
    assert said in (tmp_path / "a.svg").read_text()
    lacking.clear()
    with pytest.raises(KeyError):  # an error of ours stays one
        figures.draw(kinds, chosen, values, tmp_path / "a.svg")


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


def changes(*ours: float, papers: tuple[float, ...] = ()) -> list[Change]:
    """Ours without deviation, and numbers that a paper alone prints."""
    return [*(Change(number, None, 0.0) for number in ours), *(Change(None, number, 0.0) for number in papers)]


NUMBER = st.floats(min_value=-50, max_value=1e9) | st.sampled_from([math.inf, -math.inf, math.nan])


@given(st.lists(NUMBER, min_size=1), st.lists(NUMBER))
def test_every_change_has_a_place_on_the_axis_and_what_is_beyond_it_is_last(ours: list[float], papers: list[float]):
    axis = PercentAxis(changes(*ours, papers=tuple(papers)))
    low, high = axis.limits
    numbers = [*ours, *papers]
    assert all(low <= axis.place(number) <= high for number in numbers)
    inside = [number for number in numbers if not axis.beyond(number)]
    for number in set(numbers) - set(inside):
        assert all(axis.place(number) < other if number < 0 else axis.place(number) > other for other in [*inside, 0.0])
    assert all(axis.place(number) == number for number in inside)


def share(axis: PercentAxis, one: float, other: float) -> float:
    """The distance of two changes on the drawn axis, as a share of its length."""
    with styled() as plt:
        drawn = plt.subplots()[1]
        axis.apply(drawn, "x")
        ends = drawn.transAxes.inverted().transform(drawn.transData.transform([(one, 0), (other, 0)]))
        return abs(ends[0][0] - ends[1][0])


def test_changes_of_one_size_lie_apart() -> None:
    """QuaRot's switches: all about ten percent, but for a few rows of a tenth."""
    axis = PercentAxis(changes(11, 12, 13, 10, 12.5, 18, 11.5, 0.2, 0.8, 4.5))
    assert axis.linear
    assert share(axis, 10, 13) > 0.12


def test_changes_of_different_sizes_lie_apart() -> None:
    axis = PercentAxis(changes(0.5, 1, 2, 3, 8, 40, 300))
    assert not axis.linear
    assert share(axis, 1, 3) > 0.1
    assert share(axis, 100, 300) > 0.1


@pytest.mark.parametrize("broken", [2e4, 3e7, math.inf])
def test_a_network_that_broke_down_does_not_squeeze_the_others(broken: float) -> None:
    ours = (3.0, 5.0, 8.0, 20.0, 60.0)
    for axis in (PercentAxis(changes(*ours, papers=(10, 90, broken))), PercentAxis(changes(*ours, broken))):
        assert axis.beyond(broken)
        assert not any(axis.beyond(number) for number in (*ours, 90))
        assert share(axis, 3, 60) > 0.25
        assert axis.limits[1] < 1e4
        with styled() as plt:
            drawn = plt.subplots()[1]
            axis.apply(drawn, "x")
            assert max(drawn.get_xticks()) <= 200  # none where what is far lies


def test_what_lies_beyond_an_axis_is_in_the_legend(kinds: Project, tmp_path: Path) -> None:
    for name in ("quarot_table1", "quarot_table9"):
        chosen = kinds.table(name)
        values, _ = collected.collect(kinds, chosen)
        last = [place for place in values if place[0] == chosen.rows[-1].name][-1]
        for number, there in ((values[last].mean, False), (57_000.0, True), (math.nan, True)):
            figures.draw(kinds, chosen, changed(values, last, number), tmp_path / "a.svg")
            assert ("<!-- beyond the axis, Inf or NaN -->" in (tmp_path / "a.svg").read_text()) == there


def test_a_paper_gets_a_pdf_with_its_fonts(kinds: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kinds.root)
    command = ["report", "figure", "quarot_table1", "--format", "pdf"]
    outcome = CliRunner().invoke(cli, command)
    path = "reports/figures/quarot_table1.pdf"
    assert outcome.stdout.strip() == path
    pdf = (kinds.root / path).read_bytes()
    assert b"/FontFile2" in pdf  # TrueType, embedded
    assert b"/Type3" not in pdf
    CliRunner().invoke(cli, command)
    assert (kinds.root / path).read_bytes() == pdf  # equal data give equal files


def test_accuracies_that_are_not_finite_are_named(kinds: Project, tmp_path: Path) -> None:
    chosen = kinds.table("quarot_table3")
    values, _ = collected.collect(kinds, chosen)
    place = ("QuaRot", "Llama-2-7B", "grammar")
    figures.draw(kinds, chosen, changed(values, place, math.nan, 50.0), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count("<!-- NaN -->") == 1


def test_a_long_label_stays_beside_its_own_panel() -> None:
    with styled() as plt:
        figure, axes = plt.subplots(2, 2, figsize=(5, 4), layout="constrained")
        for axis in axes.flat:
            axis.set(xlabel="words " * 12, ylabel="words " * 12)
        for _ in range(2):  # what fits is left alone
            fit_labels(figure)
            figure.draw_without_rendering()
            texts = [axis.xaxis.label.get_text() for axis in axes.flat]
        for axis in axes.flat:
            for label in (axis.xaxis.label, axis.yaxis.label):
                box = label.get_window_extent()
                assert not any(box.overlaps(other.bbox) for other in axes.flat)
        assert all("\n" in text and text.split() == ["words"] * 12 for text in texts)
