"""The grids of a speed table: ratios next to ratios, then the numbers, ours beside the paper's on each of its GPUs."""

from collections.abc import Callable, Sequence

from rotquant.reporting.pages.model import Grid, GridColumn, beside
from rotquant.reporting.speed.claims import show
from rotquant.reporting.speed.limits import CEILING
from rotquant.reporting.speed.numbers import Number, Numbers, short_gpu, shown_ratio
from rotquant.reporting.words.numbers import SPACE
from rotquant.study.speed import definitions
from rotquant.study.speed.definitions import FACTORS, Part, Row, SpeedTable, matches, rows
from rotquant.study.speed.published import Reference

RATIOS = {"speedup": "Speedup", "saving": "Saving", "cost": "Time"}
_UNITS = {"ms": "Milliseconds", "us": "Microseconds", "min": "Minutes", "GiB": "GiB"}

Print = Callable[[definitions.Grid, Number, Reference | None], str]
"""What a cell prints: ours, or the paper's where its reference is given."""


def speed_grids(table: SpeedTable, numbers: Numbers) -> tuple[Grid, ...]:
    """Every grid of a table but ceilings (see `limits`): ratios of the same run, then the numbers with their spread."""
    shown = [grid for grid in table.grids if grid.benchmark != CEILING]
    return tuple(made for grid in shown for made in _ratios_and_amounts(table, grid, numbers))


def part_grid(table: SpeedTable, part: Part, numbers: Numbers) -> Grid:
    """The ratios that one panel of a figure shows."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    caption = f"{part.title}: {RATIOS[grid.ratio]} over {grid.baseline}"
    return _grid(table, grid, numbers, chosen, {part.column: part.column}, _ratio, ("", caption))


def digits(value: float) -> str:
    """Four significant digits without powers of ten."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, 4 - whole)}f}" if abs(value) >= 1e-3 else f"{value:.2g}"


def _ratios_and_amounts(table: SpeedTable, grid: definitions.Grid, numbers: Numbers) -> list[Grid]:
    compared = [column for column in grid.columns if grid.over(column) is not None]
    several = len({grid.over(column) for column in compared}) > 1
    over = "the column named in brackets" if several else grid.baseline
    ratio = f"{RATIOS[grid.ratio]} {'as a multiple of' if grid.ratio == 'cost' else 'over'} {over}, in the same run"
    heads = {column.name: f"{column.name} [{grid.over(column)}]" if several else column.name for column in compared}
    spread = "median ± half the distance between the 10th and 90th percentile of repeated runs"
    amount = f"{_UNITS[grid.unit]}{' at the peak' if grid.quantity == 'peak_bytes' else f': {spread}'}"
    names = {column.name: column.name for column in grid.columns}
    ratios = [_grid(table, grid, numbers, rows(grid), heads, _ratio, (grid.name, ratio))] if compared else []
    return [*ratios, _grid(table, grid, numbers, rows(grid), names, _amount, (grid.name, amount))]


def _grid(
    table: SpeedTable,
    grid: definitions.Grid,
    numbers: Numbers,
    chosen: Sequence[Row],
    columns: dict[str, str],
    text: Print,
    words: tuple[str, str],
) -> Grid:
    """Rows by columns; a column of ours is followed by one for each of the paper's GPUs with a number there."""
    made: list[GridColumn] = []
    for name, head in columns.items():
        several = [numbers[grid.name, row.name, name] for row in chosen]
        ours = GridColumn([text(grid, number, None) for number in several], head)
        papers = {gpu: [number.paper(gpu) for number in several] for gpu in table.gpus}
        made += beside(
            ours,
            *(
                GridColumn(
                    [
                        "-" if one is None else text(grid, number, one)
                        for number, one in zip(several, printed, strict=True)
                    ],
                    published=short_gpu(gpu),
                )
                for gpu, printed in papers.items()
            ),
        )
    part, caption = words
    return Grid(caption, [axis.name for axis in grid.axes], [row.labels for row in chosen], made, name=part)


def _ratio(grid: definitions.Grid, number: Number, paper: Reference | None = None) -> str:
    """Our ratio, or the paper's."""
    speedup = number.ratio if paper is None else paper.ratio
    return "-" if speedup is None else show(shown_ratio(grid, speedup))


def _amount(grid: definitions.Grid, number: Number, paper: Reference | None = None) -> str:
    """Our number with its spread, or the paper's as printed."""
    factor = FACTORS[grid.unit]
    if paper is not None:
        if paper.value is None or paper.unit == factor:
            return paper.text
        return f"{paper.value / factor:.6g}"
    if number.ours is None:
        return "-"
    spread = number.ours.spread
    text = digits(number.ours.value / factor)
    return text if spread is None else f"{text}{SPACE}±{SPACE}{100 * spread:.1f}{SPACE}%"
