"""Speed tables on the page: their grids as the template prints them, and where they were measured."""

from rotquant.reporting.html.grid import Cell, Grid
from rotquant.reporting.speed.grids import Layout, layouts, part_layout, short
from rotquant.reporting.speed.numbers import collect, find_source
from rotquant.reporting.speed.provenance import facts
from rotquant.study.project import Project
from rotquant.study.speed.definitions import SpeedTable


def speed_grids(project: Project, table: SpeedTable) -> tuple[Grid, ...]:
    """All grids of a table, or of a figure what its panels show.

    Raises:
        ResultError: a record is damaged.
    """
    if table.grids:
        return tuple(map(_grid, layouts(table, collect(project, table, find_source(project, table)))))
    assert table.drawing is not None
    found = []
    for part in table.drawing.parts:
        origin = project.speed_table(part.table)
        found.append(_grid(part_layout(origin, part, collect(project, origin, find_source(project, origin)))))
    return tuple(found)


def speed_facts(project: Project, table: SpeedTable) -> tuple[tuple[str, str], ...]:
    """On which GPU, when, and by which code a table was measured; nothing for a figure, which names its tables."""
    source = find_source(project, table)
    return () if source is None else facts(source)


def _grid(layout: Layout) -> Grid:
    heads = tuple(text if gpu is None else f"published, {short(gpu)}" for text, gpu in layout.heads)
    lines = tuple(
        (
            labels,
            tuple(
                Cell(text, "ours" if gpu is None else "published")
                for text, (_, gpu) in zip(cells, layout.heads, strict=True)
            ),
        )
        for labels, cells in layout.lines
    )
    return Grid(f"{layout.grid}: {layout.caption}", layout.stub, (), heads, lines)
