"""Every figure of the four papers' tables is drawn without a fault, at a page's width and at a column's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import short_hash
from rotquant.reporting.figures import draw as figures
from rotquant.reporting.figures import panels
from rotquant.reporting.speed import figures as speed
from rotquant.study import project as projects
from rotquant.study.project import Project, load_project
from tests import drawings
from tests.project import REPOSITORY


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    """The project's own tables, of which nothing is computed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(projects, "checkpoint_digest", lambda path: short_hash(Path(path).name))
        loaded = load_project(root=REPOSITORY)
        drawings.replace_files(monkeypatch, loaded)
        yield loaded


def draw(project: Project, name: str, width: str | None, broken: bool = True) -> None:
    if name in project.tables:
        table = project.table(name)
        figures.draw(project, table, drawings.numbers(project, table, broken), Path(f"{name}.svg"), width)
    else:
        speed.draw(project, project.speed_table(name), Path(f"{name}.svg"), width)


def named(project: Project) -> list[str]:
    return [name for name, table in project.tables.items() if table.figure] + [
        name for name, table in project.speed.items() if table.drawing
    ]


@pytest.mark.parametrize("width", [None, "column"])
def test_no_figure_has_a_fault(project: Project, monkeypatch: pytest.MonkeyPatch, width: str | None) -> None:
    found: list[str] = []
    drawn: list[Any] = []

    def check(figure: Any, path: Path) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)
        found.extend(f"{path.stem}: {fault}" for fault in drawings.faults(figure))

    monkeypatch.setattr(panels, "save", check)
    refused = []
    for name in named(project):
        try:
            draw(project, name, width)
        except ResultError as error:
            refused.append(str(error))
    print("\n".join(refused))
    assert not found, "\n".join(found)
