"""Every figure of the four papers' tables is drawn without a fault, up to a page's width."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reproduction.render.figures import draw as figures
from reproduction.render.figures import panels, speed
from reproduction.render.figures.style import PUBLISHED, PUBLISHED_MARK, styled
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.tables.tables import RunTable
from tests.helpers import drawings


@pytest.fixture(scope="module")
def project(project: Project) -> Iterator[Project]:
    """The project's own tables, of which nothing is computed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        drawings.replace_files(monkeypatch, project)
        yield project


def draw(project: Project, name: str) -> None:
    """Draw a figure of whichever kind of table; `panels.save` is replaced."""
    table = project.table(name)
    if isinstance(table, RunTable):
        figures.draw(project, table, drawings.numbers(project, table), Path(f"{name}.svg"))
    else:
        speed.draw(project, table, Path(f"{name}.svg"))


def drawn_tables(project: Project) -> list[RunTable]:
    """All with a figure, of those that are drawn from arrays one of each size."""
    found: dict[object, RunTable] = {}
    for table in project.of(RunTable).values():
        if table.figure is not None:
            arrays = table.figure.kind in ("magnitudes", "token_maxima")
            sites = [len(metric.get("sites", ())) for metric in table.metrics]
            size = table.figure.kind, str(sites), len(table.rows), len(project.columns(table))
            found.setdefault(size if arrays else table.id, table)
    return list(found.values())


def faults(project: Project, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[str]:
    """The faults of figures."""
    found: list[str] = []

    def check(figure: Any, path: Path) -> None:
        found.extend(f"{path.stem}: {fault}" for fault in drawings.faults(figure))

    monkeypatch.setattr(panels, "save", check)
    for name in names:
        draw(project, name)
    return found


def test_no_figure_has_a_fault(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [table.id for table in drawn_tables(project)]
    names += [name for name, table in project.of(SpeedTable).items() if table.drawing]
    assert len(names) > 70
    assert "\n".join(faults(project, monkeypatch, names)) == ""


def test_columns_of_bits_are_panels_and_epochs_the_axis(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    axes: list[Any] = []
    monkeypatch.setattr(panels, "save", lambda figure, _: axes.extend(figure.axes))
    draw(project, "prefixquant_table12")
    draw(project, "spinquant_budget")
    labels = [[label.get_text() for label in axis.get_xticklabels()] for axis in axes]
    assert labels == [["0", "5", "10", "20", "30"]] * 2 + [["0", "8", "24", "64", "128", "512"]]
    assert [axis.get_title().partition("\n")[0] for axis in axes] == ["W4A8KV4", "W4A4KV4", "Llama-2-7B"]


def test_a_picture_that_is_another_one_again_is_that_one(project: Project) -> None:
    pictures = {name: project.picture(table) for name, table in project.of(RunTable).items() if table.figure}
    again = {name: picture for name, picture in pictures.items() if name != picture}
    assert again == {
        "prefixquant_figure16": "prefixquant_figure10",
        "prefixquant_figure17": "prefixquant_figure11",
    }


def test_every_fault_is_found() -> None:
    """What the tests above look for can be missed by none of them."""
    with styled() as plt:
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2))
        left.plot([0, 1], [0, 1], color="#123456", label="one")
        left.set(xticks=[0, 1, 2], xticklabels=["8", "64", "0"])
        for place in (0.5, 0.52):
            right.text(place, 0.5, "words")
        right.text(1.0, 0.1, "outside" * 9, fontsize=7)
        right.text(0.1, 0.9, "tiny", fontsize=5)
        panels.legend(figure, [panels.entry("ghost", PUBLISHED, **PUBLISHED_MARK)])
        figure.draw_without_rendering()
        found = "\n".join(drawings.faults(figure))
    for fault in (
        "'words' and 'words' overlap",
        "outside' leaves the figure",
        "'tiny' is too small",
        "the legend's 'ghost' is drawn nowhere",
        "do not ascend: [8.0, 64.0, 0.0]",
        "{'#123456'} are not of the style",
        "is 8.0 in wide",
    ):
        assert fault in found
