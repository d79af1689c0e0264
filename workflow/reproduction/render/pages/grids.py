"""The grids of every page: numbers of runs, times and bytes, and settings.

Ours are next to the paper's, in the paper's order. `cells` decides how each place is printed.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reproduction.frame.limits import CEILING, points
from reproduction.frame.speed import SpeedNumbers, SpeedPlace, short_gpu, shown_ratio
from reproduction.frame.values import Number, Place, Values, main_quantities, printed_accuracies
from reproduction.render.figures.changes import change_between
from reproduction.render.pages import cells
from reproduction.render.pages.model import Grid, GridColumn, Tasks, Whose, beside
from reproduction.tables.project import Project
from reproduction.tables.quantities import DESCRIPTIVE, OF_CHOICES, OF_WINDOWS, Quantity
from reproduction.tables.settings import SettingsTable
from reproduction.tables.speed.definitions import FACTORS, DrawnPart, SpeedGrid, SpeedRow, SpeedTable, matches, rows
from reproduction.tables.tables import Row, RunTable
from reproduction.words.describe import is_about_models, is_stand_in, model_name
from reproduction.words.numbers import show, show_change, words
from rotquant.recipes.recipe import Recipe

#: Numbers that fit a line of one grid; with more, each quantity has its own grid.
WIDTH = 8

Pair = Callable[[str, str, Quantity], tuple[str, str]]
"""What a place prints of (row, column, quantity): ours, and the paper's."""


_RATIOS = {"speedup": "Speedup", "saving": "Saving"}
_UNITS = {
    "ms": "Milliseconds",
    "us": "Microseconds",
    "min": "Minutes",
    "h": "Hours",
    "GiB": "GiB",
    "GB": "10^9 bytes",
    "mJ": "Millijoules",
    "MHz": "MHz",
}

PrintSpeed = Callable[[SpeedPlace, str], str]
"""What a place prints: of the paper's on the GPU that is named, of ours without one."""

BITS = "Bits per weight"


def value_grids(project: Project, table: RunTable, values: Values, bits: Mapping[str, str]) -> tuple[Grid, ...]:
    """Mean and deviation of every main quantity next to the published number.

    Args:
        bits: effective bits per weight by row, shown in their own column; no column without any.
    """
    mains = main_quantities(project, table)
    digits = {
        quantity.name: cells.decimals(one for (_, _, name), one in values.published.items() if name == quantity.name)
        for quantity in mains
    }

    def pair(row: str, column: str, quantity: Quantity) -> tuple[str, str]:
        place, decimals = (row, column, quantity.name), digits[quantity.name]
        if quantity.text:
            return cells.contents(values.texts.get(place)), values.published_texts.get(place, "-")
        ours = cells.measured(values.ours.get(place), max(2, decimals))
        return ours, cells.printed(values.published.get(place), decimals)

    if table.transposed:
        return (_transposed(project, table, pair, mains),)
    grids = tuple(_ranked(project, table, values, grid) for grid in _grids(project, table, table.rows, pair, mains))
    if not bits:
        return grids
    return tuple(
        replace(
            grid,
            stub=[*grid.stub, BITS],
            labels=[[*labels, bits.get(row.name, "-")] for row, labels in zip(table.rows, grid.labels, strict=True)],
        )
        for grid in grids
    )


def _ranked(project: Project, table: RunTable, values: Values, grid: Grid) -> Grid:
    """A grid with the best number of each column among rows of equal bits, and rules around full precision."""
    bits = {(cell.row, cell.column): _bits(cell.runs[0].recipe) for cell in project.cells(table.id)}
    rows = [row.name for row in table.rows]
    best: set[tuple[int, int]] = set()
    for number, one in enumerate(grid.columns):
        quantity, found = one.quantity, values.ours if one.published is None else values.published
        if quantity is None or quantity.text or quantity in DESCRIPTIVE:
            continue
        alike: dict[tuple[int | None, ...], dict[int, float]] = {}
        for place, row in enumerate(rows):
            known, group = found.get((row, one.column, quantity.name)), bits.get((row, one.column))
            if known and math.isfinite(known.mean) and group and any(group):
                alike.setdefault(group, {})[place] = known.mean
        for means in alike.values():
            first = (min if quantity.better == "lower" else max)(means, key=lambda place: means[place])
            mean = show(means[first])
            best |= {(place, number) for place in means if show(means[place]) == mean and len(means) > 1}
    full = [not any(next((known for (of, _), known in bits.items() if of == row), (1,))) for row in rows]
    rules = (place for place in range(1, len(rows)) if full[place] != full[place - 1])
    return replace(grid, best=frozenset(best), rules=tuple(rules))


def _bits(recipe: Recipe) -> tuple[int | None, ...]:
    """The bits of weights, activations, keys and values; None for those in full precision."""
    weights = recipe.weights.scheme.bits if recipe.weights else 1 if recipe.has_role("rounding") else None
    return (weights, *(scheme and scheme.bits for scheme in (recipe.activations, recipe.keys, recipe.values)))


def change_grids(project: Project, table: RunTable, values: Values) -> tuple[Grid, ...]:
    """Gain or loss of each row against the baseline row, in percent, ours and the paper's."""
    mains = [quantity for quantity in main_quantities(project, table) if quantity.relative]

    def pair(row: str, column: str, quantity: Quantity) -> tuple[str, str]:
        sign = 1.0 if quantity.better == "lower" else -1.0
        loss = change_between(values, (row, column), (table.baseline, column), quantity)
        ours, papers = (None if number is None else sign * number for number in (loss.ours, loss.papers))
        own = values.ours.get((row, column, quantity.name))
        return show_change(ours, loss.spread if own and own.deviation is not None else None), show_change(papers)

    rows = [row for row in table.rows if row.name != table.baseline]
    return _grids(project, table, rows, pair, mains) if mains and rows else ()


def endpoint_grids(project: Project, table: RunTable, values: Values) -> tuple[tuple[Grid, ...], tuple[Grid, ...]]:
    """KL divergence of the rows, and log-odds of the right answer: mean and spread over seeds, median, flips.

    Each is empty where no run file has it. Rows and columns are the table's own, since no paper prints any.
    """

    def pair(row: str, column: str, quantity: Quantity) -> tuple[str, str]:
        number = values.ours.get((row, column, quantity.name))
        return cells.measured(number, 1 if quantity.unit == "%" else 3), "-"

    found = []
    for kind in (OF_WINDOWS, OF_CHOICES):
        keys = {one.key for one in kind}
        asked = [one for one in project.endpoints(table) if one.key in keys]
        known = [one for one in asked if any(name == one.name for _, _, name in values.ours)]
        rows = [
            row
            for row in table.rows
            if any((row.name, column, one.name) in values.ours for one in known for column in project.columns(table))
        ]
        found.append(_grids(project, table, rows, pair, known, alone=True) if known else ())
    return found[0], found[1]


def task_grids(project: Project, table: RunTable, values: Values) -> tuple[Tasks, ...]:
    """Accuracies by task for each column: ours by our tasks with chance, and the paper's by its own."""
    ours = [quantity for quantity in project.quantities(table) if quantity.unit == "%"]
    papers = printed_accuracies(values)
    return tuple(
        Tasks(
            column,
            _with_chance(_task_grid(table, column, ours, values.ours, "ours"), table, column, ours, values),
            _task_grid(table, column, _printed(papers, column, values), values.published, "published"),
        )
        for column in _alike(project, table, project.columns(table))
    )


def _task_grid(
    table: RunTable, column: str, tasks: Sequence[Quantity], numbers: Mapping[Place, Number], whose: Whose
) -> Grid:
    """The rows that have a number for any task."""
    rows = [row.name for row in table.rows if any((row.name, column, task.name) in numbers for task in tasks)]

    def text(row: str, task: Quantity) -> str:
        number = numbers.get((row, column, task.name))
        return cells.measured(number) if whose == "ours" else cells.printed(number)

    columns = [GridColumn([text(row, task) for row in rows], task.title) for task in tasks]
    return Grid("", ["Method"], [[row] for row in rows], columns, whose=whose)


def _with_chance(grid: Grid, table: RunTable, column: str, tasks: Sequence[Quantity], values: Values) -> Grid:
    """Add rows below our accuracies: the score of guessing, and the standard errors of the baseline row."""
    columns = []
    for task, above in zip(tasks, grid.columns, strict=True):
        number = values.get((table.baseline, column, task.name))
        below = (show(task.chance, None, 1), show(number and number.standard_error, None, 1))
        columns.append(replace(above, texts=[*above.texts, *below]))
    return replace(grid, labels=[*grid.labels, ["chance"], ["standard error"]], columns=columns, chances=2)


def _printed(tasks: Sequence[Quantity], column: str, values: Values) -> list[Quantity]:
    """The tasks for which the paper prints any number in a column."""
    names = {name for _, place, name in values.published if place == column}
    return [task for task in tasks if task.name in names]


def _grids(
    project: Project,
    table: RunTable,
    rows: Sequence[Row],
    pair: Pair,
    mains: Sequence[Quantity],
    *,
    alone: bool = False,
) -> tuple[Grid, ...]:
    """One grid of these quantities if a line can hold them, otherwise one per quantity.

    Args:
        alone: whether no paper's number is next to ours.
    """
    together = len(mains) == 1 or len(_measured(project, table, mains)) * (1 if alone else 2) <= WIDTH + alone
    groups = [tuple(mains)] if together else [(quantity,) for quantity in mains]
    return tuple(_grid(project, table, rows, pair, group) for group in groups)


def _grid(project: Project, table: RunTable, rows: Sequence[Row], pair: Pair, group: tuple[Quantity, ...]) -> Grid:
    """Ours by column and quantity, each followed by the paper's where it prints any."""
    measured = _measured(project, table, group)
    alike = _alike(project, table, dict.fromkeys(name for name, _ in measured))
    columns: list[GridColumn] = []
    for name, quantity in ((name, quantity) for name, quantity in measured if name in alike):
        ours = [pair(row.name, name, quantity)[0] for row in rows]
        called, one = ", ".join(alike[name]), len(alike[name]) == 1
        head = called if len(group) == 1 else quantity.title if len(alike) == 1 else f"{called}, {quantity.title}"
        place: dict[str, Any] = {"group": called, "remark": remark(project, table, name)}
        place |= {"title": quantity.title, "quantity": quantity}
        papers = [(each, [pair(row.name, each, quantity)[1] for row in rows]) for each in alike[name]]
        printed = [GridColumn(texts, published="" if one else each, column=each, **place) for each, texts in papers]
        columns += beside(GridColumn(ours, head, column=name, **place), *printed)
    remarks = {name: remark(project, table, name) for name in alike}
    names = [f"{name} ({found})" if found else name for name, found in remarks.items()]
    labels = [[row.name, *map(str, row.labels)] for row in rows]
    return Grid(_caption(names, group), ["Method", *table.label_columns], labels, columns)


def _measured(project: Project, table: RunTable, group: Sequence[Quantity]) -> list[tuple[str, Quantity]]:
    """The columns with those of the quantities that are measured there."""
    places = {
        (cell.column, one.name) for cell in project.cells(table.id) for one in (*cell.quantities, *cell.endpoints)
    }
    pairs = itertools.product(project.columns(table), group)
    return [(name, quantity) for name, quantity in pairs if (name, quantity.name) in places]


def _alike(project: Project, table: RunTable, names: Iterable[str]) -> dict[str, list[str]]:
    """Columns computed by the same runs, by the first of them: they are one column of ours."""
    runs: dict[str, list[str]] = {name: [] for name in names}
    for cell in project.cells(table.id):
        if cell.column in runs:
            runs[cell.column] += [cell.row, *(run.key for run in cell.runs)]
    found: dict[tuple[str, ...], list[str]] = {}
    for name, keys in runs.items():
        found.setdefault(tuple(keys), []).append(name)
    return {alike[0]: alike for alike in found.values()}


def _transposed(project: Project, table: RunTable, pair: Pair, mains: Sequence[Quantity]) -> Grid:
    """The table's columns below each other, and its rows with every quantity side by side."""
    names = project.columns(table)
    columns: list[GridColumn] = []
    for row, quantity in itertools.product(table.rows, mains):
        head = quantity.title if len(table.rows) == 1 else f"{row.name}, {quantity.title}"
        columns += _pairs(head, [pair(row.name, name, quantity) for name in names])
    labels = [[name, remark(project, table, name).removeprefix("here: ") or "the paper's model"] for name in names]
    return Grid(_caption(names, tuple(mains)), ["Model", "Here"], labels, columns)


def _caption(columns: Sequence[str], group: Sequence[Quantity]) -> str:
    """Caption of the numbers, and which direction is better."""
    parts = [(f"{quantity.title}: " if len(group) > 1 else "") + _described(quantity) for quantity in group]
    alone = [columns[0]] if len(columns) == 1 and len(group) > 1 else []
    return ". ".join([*alone, *(part[0].upper() + part[1:] for part in parts)])


def _described(quantity: Quantity) -> str:
    unit = f" ({quantity.unit})" if quantity.unit else ""
    better = "" if quantity in DESCRIPTIVE else f", {quantity.better} is better"
    return f"{words(quantity)}{unit}{better}"


def remark(project: Project, table: RunTable, column: str) -> str:
    """A column's model, where one is measured and the column's name does not give it."""
    if not is_about_models(table):
        return ""
    slot = project.slot(table, column)
    here = f"here: {model_name(slot)}" if is_stand_in(slot) else ""
    return here if column == slot.name else f"on {slot.name}{f' ({here})' if here else ''}"


def speed_grids(table: SpeedTable, numbers: SpeedNumbers) -> tuple[list[Grid], list[Grid]]:
    """Every grid of a table except ceilings: ratios of the same run, and the numbers with their spread.

    A grid without ratios has its numbers in their place.
    """
    first: list[Grid] = []
    more: list[Grid] = []
    for grid in _kernels(table):
        ratios, amounts = _ratios_and_amounts(table, grid, numbers)
        first.append(ratios or amounts)
        more += [amounts] if ratios else []
    return first, more


def part_grid(table: SpeedTable, part: DrawnPart, numbers: SpeedNumbers) -> Grid:
    """The ratios in one panel of a figure."""
    grid = table.grid(part.grid)
    chosen = [row for row in rows(grid) if matches(row.name, *part.rows)]
    caption = f"{part.title}: {_ratio_name(grid)} over {grid.baseline}"
    return _speed_grid(grid, caption, _ratio(grid, numbers), {part.column: part.column}, table.gpus, chosen=chosen)


def share_grids(table: SpeedTable, numbers: SpeedNumbers, ceilings: Mapping[str, float]) -> list[Grid]:
    """The share of its floor that each kernel reaches, grid by grid; ceilings: including that of copying."""
    by_place = {point.place: point for point in points(table, numbers)}

    def share(place: SpeedPlace, _: str) -> str:
        if place not in by_place:
            return "-"
        floor, bound = by_place[place].floor(ceilings)
        return f"{100 * floor / by_place[place].seconds:.0f} % {bound[0]}"

    shown = {grid for grid, *_ in by_place}
    timed = [grid for grid in _kernels(table) if grid.name in shown]
    return [_speed_grid(grid, grid.name, share, _names(grid)) for grid in timed]


def _kernels(table: SpeedTable) -> list[SpeedGrid]:
    return [grid for grid in table.grids if grid.benchmark != CEILING]


def _names(grid: SpeedGrid) -> dict[str, str]:
    return {column.name: column.name for column in grid.columns}


def _ratio_name(grid: SpeedGrid) -> str:
    """What a ratio to the baseline is; a cost is one of time, of memory, or the clock's."""
    return _RATIOS.get(grid.ratio) or ("Clock" if grid.unit == "MHz" else "Memory" if grid.timeless else "Time")


def _ratios_and_amounts(table: SpeedTable, grid: SpeedGrid, numbers: SpeedNumbers) -> tuple[Grid | None, Grid]:
    over = {column.name: grid.over(column) for column in grid.columns if grid.over(column) is not None}
    several = len(set(over.values())) > 1
    heads = {name: f"{name} [{other}]" if several else name for name, other in over.items()}
    compared = f"{'as a multiple of' if grid.ratio == 'cost' else 'over'} "
    compared += "the column named in brackets" if several else grid.baseline
    ratio = f"{_ratio_name(grid)} {compared}, {_runs_compared(grid, numbers)}"
    amount = _UNITS[grid.unit]
    if grid.quantity == "peak_bytes":
        amount += " at the peak"
    elif not grid.timeless:
        amount += ": median ± half the distance between the 10th and 90th percentile of repeated runs"
    name = grid.name if len(table.grids) > 1 else ""
    amounts = _speed_grid(grid, amount, _amount(grid, numbers), _names(grid), table.gpus, name=name)
    if not over:
        return None, amounts
    ratios = _speed_grid(grid, ratio, _ratio(grid, numbers), heads, table.gpus, name=name)
    return replace(ratios, best=frozenset() if several else _fastest(grid, ratios, numbers)), amounts


def _fastest(grid: SpeedGrid, ratios: Grid, numbers: SpeedNumbers) -> frozenset[tuple[int, int]]:
    """The place of each row's best ratio, where several are known."""
    best = set()
    for place, row in enumerate(rows(grid)):
        columns = ((number, column.head) for number, column in enumerate(ratios.columns) if column.published is None)
        known = {number: numbers[grid.name, row.name, name].ratio or 0.0 for number, name in columns}
        if sum(ratio > 0 for ratio in known.values()) > 1:
            best.add((place, max(known, key=lambda number: known[number])))
    return frozenset(best)


def _runs_compared(grid: SpeedGrid, numbers: SpeedNumbers) -> str:
    """Whether the numbers of each row are of one sitting: a cell that two grids share may have been measured again."""
    mixed = []
    for row in rows(grid):
        records = (numbers[grid.name, row.name, column.name].record for column in grid.columns)
        if len({record.sitting for record in records if record is not None}) > 1:
            mixed.append(row.name)
    named = f"rows {', '.join(mixed)}" if len(mixed) < 4 else f"{len(mixed)} rows"
    return f"in the same run but for {named}" if mixed else "in the same run"


def _speed_grid(
    grid: SpeedGrid,
    caption: str,
    text: PrintSpeed,
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


def _ratio(grid: SpeedGrid, numbers: SpeedNumbers) -> PrintSpeed:
    """Our ratio, or the paper's."""

    def text(place: SpeedPlace, gpu: str) -> str:
        one = numbers[place].paper(gpu) if gpu else numbers[place]
        return cells.ratio(None if one is None or one.ratio is None else shown_ratio(grid, one.ratio))

    return text


def _amount(grid: SpeedGrid, numbers: SpeedNumbers) -> PrintSpeed:
    """Our number with its spread, or the paper's as printed."""
    factor = FACTORS[grid.unit]

    def text(place: SpeedPlace, gpu: str) -> str:
        paper = numbers[place].paper(gpu)
        if paper is not None:
            return paper.text if paper.value is None or paper.unit == factor else f"{paper.value / factor:.6g}"
        return "-" if gpu else cells.amount(numbers[place].ours, factor)

    return text


def settings_grid(table: SettingsTable) -> Grid:
    """The recipes' settings next to the printed ones."""
    columns: list[GridColumn] = []
    for column in table.columns:
        found = [table.cell(row.name, column.name) for row in table.rows]
        columns += _pairs(column.name, [(cells.setting(cell), cell.published or "-") for cell in found])
    stub = "Tensor" if any(row.part for row in table.rows) else "Method"
    return Grid("Settings of the recipes here", [stub], [[row.name] for row in table.rows], columns)


def _pairs(head: str, pairs: Iterable[tuple[str, str]]) -> tuple[GridColumn, ...]:
    """A column of ours, and the paper's next to it."""
    ours, papers = zip(*pairs, strict=True)
    return beside(GridColumn(ours, head), GridColumn(papers, published=""))
