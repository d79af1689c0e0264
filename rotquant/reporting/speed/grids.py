"""The grids of a speed table laid out: ratios next to ratios, then the numbers, ours beside the paper's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rotquant.reporting.speed.claims import show
from rotquant.reporting.speed.limits import CEILING
from rotquant.reporting.speed.numbers import Number, Numbers, shown_ratio
from rotquant.reporting.words.markdown import markdown_table
from rotquant.reporting.words.numbers import SPACE, italic
from rotquant.study.speed.definitions import FACTORS, Grid, Part, Row, SpeedTable, matches, rows
from rotquant.study.speed.published import Reference

RATIOS = {"speedup": "Speedup", "saving": "Saving", "cost": "Time"}
_UNITS = {"ms": "Milliseconds", "us": "Microseconds", "min": "Minutes", "GiB": "GiB"}

Print = Callable[[Grid, Number, Reference | None], str]
"""What a cell prints: ours, or the paper's where its reference is given."""


@dataclass(frozen=True)
class Layout:
    """A table of texts. grid: what it belongs to, in words; caption: what its numbers are.

    heads: of each column, with whose it is: the paper's GPU, None for ours. lines: labels and cells.
    """

    grid: str
    caption: str
    stub: tuple[str, ...]
    heads: tuple[tuple[str, str | None], ...]
    lines: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    def markdown(self) -> str:
        """As Markdown: the paper's columns are headed by its GPU, in italics like their numbers."""
        heads = [text if gpu is None else f"*{short(gpu)}*" for text, gpu in self.heads]
        lines = [
            [
                *labels,
                *(text if gpu is None else italic(text) for text, (_, gpu) in zip(cells, self.heads, strict=True)),
            ]
            for labels, cells in self.lines
        ]
        return markdown_table([*self.stub, *heads], lines, "l" * len(self.stub) + "r" * len(heads))


def layouts(table: SpeedTable, numbers: Numbers) -> list[Layout]:
    """Every grid of a table but ceilings (see `limits`): ratios of the same run, then the numbers with their spread."""
    shown = [grid for grid in table.grids if grid.benchmark != CEILING]
    return [layout for grid in shown for layout in _grid_layouts(table, grid, numbers)]


def part_layout(table: SpeedTable, part: Part, numbers: Numbers) -> Layout:
    """The ratios that one panel of a figure shows."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    caption = f"{RATIOS[grid.ratio]} over {grid.baseline}"
    return _layout(table, grid, numbers, chosen, {part.column: part.column}, _ratio, (part.title, caption))


def short(gpu: str) -> str:
    """A GPU's name for the head of a column."""
    return gpu.removeprefix("NVIDIA ")


def digits(value: float) -> str:
    """Four significant digits without powers of ten."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, 4 - whole)}f}" if abs(value) >= 1e-3 else f"{value:.2g}"


def _grid_layouts(table: SpeedTable, grid: Grid, numbers: Numbers) -> list[Layout]:
    compared = [column for column in grid.columns if grid.over(column) is not None]
    several = len({grid.over(column) for column in compared}) > 1
    over = "the column named in brackets" if several else grid.baseline
    ratio = f"{RATIOS[grid.ratio]} {'as a multiple of' if grid.ratio == 'cost' else 'over'} {over}, in the same run"
    heads = {column.name: f"{column.name} [{grid.over(column)}]" if several else column.name for column in compared}
    spread = "median ± half the distance between the 10th and 90th percentile of repeated runs"
    amount = f"{_UNITS[grid.unit]}{' at the peak' if grid.quantity == 'peak_bytes' else f': {spread}'}"
    names = {column.name: column.name for column in grid.columns}
    ratios = [_layout(table, grid, numbers, rows(grid), heads, _ratio, (grid.name, ratio))] if compared else []
    return [*ratios, _layout(table, grid, numbers, rows(grid), names, _amount, (grid.name, amount))]


def _layout(
    table: SpeedTable,
    grid: Grid,
    numbers: Numbers,
    chosen: Sequence[Row],
    columns: dict[str, str],
    text: Print,
    words: tuple[str, str],
) -> Layout:
    """Rows by columns; a column of ours is followed by one for each of the paper's GPUs with a number there."""
    heads: list[tuple[str, str | None]] = []
    cells: list[list[str]] = [[] for _ in chosen]
    for name, head in columns.items():
        several = [numbers[grid.name, row.name, name] for row in chosen]
        printed = [gpu for gpu in table.gpus if any(_printed(grid, one, gpu, text) != "-" for one in several)]
        heads += [(head, None), *((head, gpu) for gpu in printed)]
        for line, number in zip(cells, several, strict=True):
            line += [text(grid, number, None), *(_printed(grid, number, gpu, text) for gpu in printed)]
    lines = tuple((row.labels, tuple(line)) for row, line in zip(chosen, cells, strict=True))
    return Layout(*words, tuple(axis.name for axis in grid.axes), tuple(heads), lines)


def _printed(grid: Grid, number: Number, gpu: str, text: Print) -> str:
    """What the paper printed for a cell on one GPU."""
    reference = next((paper for paper in number.papers if paper.gpu == gpu), None)
    return "-" if reference is None else text(grid, number, reference)


def _ratio(grid: Grid, number: Number, paper: Reference | None = None) -> str:
    """Our ratio, or the paper's."""
    speedup = number.ratio if paper is None else paper.ratio
    return "-" if speedup is None else show(shown_ratio(grid, speedup))


def _amount(grid: Grid, number: Number, paper: Reference | None = None) -> str:
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
