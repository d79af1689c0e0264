"""The grids of a speed table as Markdown: ratios next to ratios, then the numbers, ours beside the paper's."""

from collections.abc import Callable, Iterable

from rotquant.reporting.numbers import SPACE, italic
from rotquant.reporting.speed.claims import show
from rotquant.reporting.speed.numbers import Number, Numbers, shown_ratio
from rotquant.reporting.tables import markdown_table
from rotquant.speed.definitions import FACTORS, Column, Grid, Part, Row, SpeedTable, matches, rows
from rotquant.speed.published import Reference

RATIOS = {"speedup": "Speedup", "saving": "Saving", "cost": "Time"}
_UNITS = {"ms": "Milliseconds", "us": "Microseconds", "GiB": "GiB"}


Print = Callable[[Grid, Number, Reference | None], str]
"""What a cell prints: ours, or the paper's where its reference is given."""


def grid_sections(table: SpeedTable, grid: Grid, numbers: Numbers) -> list[str]:
    """A grid: ratios next to ratios, then the numbers with their spread."""
    name = f"## {grid.name}\n" if len(table.grids) > 1 else "## Numbers\n"
    compared = [column for column in grid.columns if grid.over(column) is not None]
    baselines = {grid.over(column) for column in compared}
    over = f"over {grid.baseline}" if baselines == {grid.baseline} else "over the column named in brackets"
    ratio = f"{RATIOS[grid.ratio]} {over}"
    if grid.ratio == "cost":
        ratio = f"{RATIOS[grid.ratio]} as a multiple of {grid.baseline}'s"
    parts = [name]
    if compared:
        parts += [f"{ratio}, of the same run.\n", _table(table, grid, numbers, compared, _ratio)]
    words = f"{_UNITS[grid.unit]}: median ± half the distance between the 10th and 90th percentile of repeated runs.\n"
    if grid.quantity == "peak_bytes":
        words = f"{_UNITS[grid.unit]} at the peak.\n"
    return [*parts, words, _table(table, grid, numbers, grid.columns, _amount)]


def _table(table: SpeedTable, grid: Grid, numbers: Numbers, columns: Iterable[Column], text: Print) -> str:
    """All rows of a grid."""
    baselines = {grid.over(column) for column in columns} - {None}
    heads = {
        column.name: f"{column.name} [{grid.over(column)}]" if text is _ratio and len(baselines) > 1 else column.name
        for column in columns
    }
    return _markdown(table.gpus, grid, numbers, rows(grid), heads, text)


def _markdown(
    gpus: Iterable[str], grid: Grid, numbers: Numbers, chosen: Iterable[Row], heads: dict[str, str], text: Print
) -> str:
    """Rows by columns; a column of ours is followed by one for each of the paper's GPUs with a number there."""
    header, align = [axis.name for axis in grid.axes], "l" * len(grid.axes)
    chosen = tuple(chosen)
    lines: list[list[object]] = [list(row.labels) for row in chosen]
    for name, head in heads.items():
        several = [numbers[grid.name, row.name, name] for row in chosen]
        printed = [gpu for gpu in gpus if any(_printed(grid, number, gpu, text) != "-" for number in several)]
        header += [head, *(f"*{short(gpu)}*" for gpu in printed)]
        align += "r" * (1 + len(printed))
        for line, number in zip(lines, several, strict=True):
            line += [text(grid, number, None), *(italic(_printed(grid, number, gpu, text)) for gpu in printed)]
    return markdown_table(header, lines, align)


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


def digits(value: float) -> str:
    """Four significant digits without powers of ten."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, 4 - whole)}f}" if abs(value) >= 1e-3 else f"{value:.2g}"


def short(gpu: str) -> str:
    """A GPU's name for the head of a column."""
    return gpu.removeprefix("NVIDIA ")


def part_table(table: SpeedTable, part: Part, numbers: Numbers) -> str:
    """The ratios that one panel of a figure shows."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    text = _markdown(table.gpus, grid, numbers, chosen, {name: name for name in part.columns}, _ratio)
    return f"{part.title}: {RATIOS[grid.ratio].lower()} over {grid.baseline}.\n\n{text}"
