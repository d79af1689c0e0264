"""The grids of a speed table: ratios, then the numbers, ours next to the paper's on each of its GPUs."""

from collections.abc import Callable, Mapping, Sequence

from reproduction.frame.speed import SpeedNumbers, SpeedPlace, short_gpu, shown_ratio
from reproduction.render.pages import cells
from reproduction.render.pages.model import Grid, GridColumn, beside
from reproduction.render.speed.limits import CEILING, points
from reproduction.tables.speed.definitions import FACTORS, DrawnPart, SpeedGrid, SpeedRow, SpeedTable, matches, rows

RATIOS = {"speedup": "Speedup", "saving": "Saving", "cost": "Time"}
_UNITS = {"ms": "Milliseconds", "us": "Microseconds", "min": "Minutes", "h": "Hours", "GiB": "GiB", "GB": "10^9 bytes"}

Print = Callable[[SpeedPlace, str], str]
"""What a place prints: of the paper's on the GPU that is named, of ours without one."""


def speed_grids(table: SpeedTable, numbers: SpeedNumbers) -> tuple[Grid, ...]:
    """Every grid of a table except ceilings: ratios of the same run, then the numbers with their spread."""
    return tuple(made for grid in _kernels(table) for made in _ratios_and_amounts(table, grid, numbers))


def part_grid(table: SpeedTable, part: DrawnPart, numbers: SpeedNumbers) -> Grid:
    """The ratios in one panel of a figure."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    caption = f"{part.title}: {RATIOS[grid.ratio]} over {grid.baseline}"
    return _grid(grid, caption, _ratio(grid, numbers), {part.column: part.column}, table.gpus, chosen=chosen)


def share_grids(table: SpeedTable, numbers: SpeedNumbers, ceilings: Mapping[str, float]) -> list[Grid]:
    """The share of its floor that each kernel reaches, grid by grid; ceilings: including that of copying."""
    by_place = {point.place: point for point in points(numbers)}

    def share(place: SpeedPlace, _: str) -> str:
        if place not in by_place:
            return "-"
        floor, bound = by_place[place].floor(ceilings)
        return f"{100 * floor / by_place[place].seconds:.0f} % {bound[0]}"

    return [_grid(grid, grid.name, share, _names(grid)) for grid in _kernels(table)]


def _kernels(table: SpeedTable) -> list[SpeedGrid]:
    return [grid for grid in table.grids if grid.benchmark != CEILING]


def _names(grid: SpeedGrid) -> dict[str, str]:
    return {column.name: column.name for column in grid.columns}


def _ratios_and_amounts(table: SpeedTable, grid: SpeedGrid, numbers: SpeedNumbers) -> list[Grid]:
    over = {column.name: grid.over(column) for column in grid.columns if grid.over(column) is not None}
    several = len(set(over.values())) > 1
    heads = {name: f"{name} [{other}]" if several else name for name, other in over.items()}
    compared = f"{'as a multiple of' if grid.ratio == 'cost' else 'over'} "
    compared += "the column named in brackets" if several else grid.baseline
    ratio = f"{RATIOS[grid.ratio]} {compared}, in the same run"
    spread = "median ± half the distance between the 10th and 90th percentile of repeated runs"
    amount = f"{_UNITS[grid.unit]}{' at the peak' if grid.quantity == 'peak_bytes' else f': {spread}'}"
    ratios = [_grid(grid, ratio, _ratio(grid, numbers), heads, table.gpus, name=grid.name)] if over else []
    return [*ratios, _grid(grid, amount, _amount(grid, numbers), _names(grid), table.gpus, name=grid.name)]


def _grid(
    grid: SpeedGrid,
    caption: str,
    text: Print,
    heads: Mapping[str, str],
    gpus: Sequence[str] = (),
    *,
    chosen: Sequence[SpeedRow] | None = None,
    name: str = "",
) -> Grid:
    """Rows by columns; a column of ours is followed by one for each of the paper's GPUs with a number there."""
    chosen = rows(grid) if chosen is None else chosen
    columns: list[GridColumn] = []
    for column, head in heads.items():
        places = [(grid.name, row.name, column) for row in chosen]
        papers = (GridColumn([text(place, gpu) for place in places], published=short_gpu(gpu)) for gpu in gpus)
        columns += beside(GridColumn([text(place, "") for place in places], head), *papers)
    return Grid(caption, [axis.name for axis in grid.axes], [row.labels for row in chosen], columns, name=name)


def _ratio(grid: SpeedGrid, numbers: SpeedNumbers) -> Print:
    """Our ratio, or the paper's."""

    def text(place: SpeedPlace, gpu: str) -> str:
        one = numbers[place].paper(gpu) if gpu else numbers[place]
        return cells.ratio(None if one is None or one.ratio is None else shown_ratio(grid, one.ratio))

    return text


def _amount(grid: SpeedGrid, numbers: SpeedNumbers) -> Print:
    """Our number with its spread, or the paper's as printed."""
    factor = FACTORS[grid.unit]

    def text(place: SpeedPlace, gpu: str) -> str:
        paper = numbers[place].paper(gpu)
        if paper is not None:
            return paper.text if paper.value is None or paper.unit == factor else f"{paper.value / factor:.6g}"
        return "-" if gpu else cells.amount(numbers[place].ours, factor)

    return text
