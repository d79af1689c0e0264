"""The grids of a table: its main quantities, their change from the baseline, and accuracy by task.

Ours are next to the paper's, in the paper's order. `cells` decides how each place is printed.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from reproduction.claims.widths import Course
from reproduction.frame.values import Number, Place, Values, main_quantities, printed_accuracies
from reproduction.render.figures.changes import change_between
from reproduction.render.pages import cells
from reproduction.render.pages.model import Grid, GridColumn, Tasks, Whose, beside
from reproduction.tables.project import Project
from reproduction.tables.quantities import DESCRIPTIVE, OF_CHOICES, OF_WINDOWS, Quantity
from reproduction.tables.tables import Row, RunTable
from reproduction.words.describe import is_stand_in, model_name
from reproduction.words.numbers import show, show_change, words

#: Numbers that fit a line of one grid; with more, each quantity has its own grid.
WIDTH = 8

Pair = Callable[[str, str, Quantity], tuple[str, str]]
"""What a place prints of (row, column, quantity): ours, and the paper's."""


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
    grids = _grids(project, table, table.rows, pair, mains)
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


def change_grids(project: Project, table: RunTable, values: Values) -> tuple[Grid, ...]:
    """Gain or loss of each row against the baseline row, in percent, ours and the paper's."""
    mains = [quantity for quantity in main_quantities(project, table) if quantity.relative]

    def pair(row: str, column: str, quantity: Quantity) -> tuple[str, str]:
        sign = 1.0 if quantity.better == "lower" else -1.0
        loss = change_between(values, (row, column), (table.baseline, column), quantity)
        ours, papers = (None if number is None else sign * number for number in (loss.ours, loss.papers))
        own = values.ours.get((row, column, quantity.name))
        return show_change(ours, loss.spread if own and own.deviation is not None else None), show_change(papers)

    rows = [row for row in table.computed_rows if row.name != table.baseline]
    return _grids(project, table, rows, pair, mains) if mains and rows else ()


def effect_grid(found: Sequence[Course]) -> Grid:
    """Gains of rows over others on models of several widths, in percent with 95 % intervals."""
    columns = list(dict.fromkeys(column for course in found for column in course.rises))
    on_models = [GridColumn([cells.rise(course.rises.get(column)) for course in found], column) for column in columns]
    slopes = [
        "-" if line is None else cells.interval(*(100 * math.expm1(one) for one in (line.slope, line.low, line.high)))
        for line in (course.line for course in found)
    ]
    papers = [f"{show_change(course.papers)} ({course.effect.source})" for course in found]
    rest = [
        GridColumn(slopes, "a doubling of the width"),
        GridColumn(papers, "published", published=""),
        GridColumn([course.way or "-" for course in found], "wider models go"),
    ]
    compared = [f"{course.effect.row} over {course.effect.over}" for course in found]
    labels = [[course.effect.name, rows] for course, rows in zip(found, compared, strict=True)]
    return Grid("", ["Effect", "Rows"], labels, [*on_models, *rest])


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
        for column in project.columns(table)
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
    """One grid of these quantities if a line can hold them, otherwise one per quantity under its own heading.

    Args:
        alone: whether no paper's number is next to ours.
    """
    columns = project.columns(table)
    together = len(mains) == 1 or len(columns) * len(mains) * (1 if alone else 2) <= WIDTH + alone
    groups = [tuple(mains)] if together else [(quantity,) for quantity in mains]
    return tuple(_grid(project, table, rows, pair, group, heading=not together) for group in groups)


def _grid(
    project: Project, table: RunTable, rows: Sequence[Row], pair: Pair, group: tuple[Quantity, ...], *, heading: bool
) -> Grid:
    """Ours by column and quantity, each followed by the paper's where it prints any."""
    places = {
        (cell.column, one.name) for cell in project.cells(table.id) for one in (*cell.quantities, *cell.endpoints)
    }
    measured = [
        (name, quantity)
        for name, quantity in itertools.product(project.columns(table), group)
        if (name, quantity.name) in places
    ]
    alike = _alike(project, table, dict.fromkeys(name for name, _ in measured))
    columns: list[GridColumn] = []
    for name, quantity in ((name, quantity) for name, quantity in measured if name in alike):
        ours = [pair(row.name, name, quantity)[0] for row in rows]
        called, one = ", ".join(alike[name]), len(alike[name]) == 1
        head = called if len(group) == 1 else quantity.title if len(alike) == 1 else f"{called}, {quantity.title}"
        place = {"group": called, "remark": _remark(project, table, name), "title": quantity.title}
        papers = [(each, [pair(row.name, each, quantity)[1] for row in rows]) for each in alike[name]]
        printed = [GridColumn(texts, published="" if one else each, **place) for each, texts in papers]
        columns += beside(GridColumn(ours, head, **place), *printed)
    names = list(alike)
    labels = [[row.name, *map(str, row.labels)] for row in rows]
    return Grid(_caption(names, group), ["Method", *table.label_columns], labels, columns, heading)


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
        ours, papers = zip(*(pair(row.name, name, quantity) for name in names), strict=True)
        head = quantity.title if len(table.rows) == 1 else f"{row.name}, {quantity.title}"
        columns += beside(GridColumn(ours, head), GridColumn(papers, published=""))
    labels = [[name, _remark(project, table, name).removeprefix("here: ") or "the paper's model"] for name in names]
    return Grid(_caption(names, tuple(mains)), ["Model", "Here"], labels, columns)


def _caption(columns: Sequence[str], group: Sequence[Quantity]) -> str:
    """Caption of the numbers, and which direction is better."""
    text = "; ".join((f"{quantity.title}: " if len(group) > 1 else "") + _described(quantity) for quantity in group)
    if len(columns) == 1 and len(group) > 1:
        return f"{columns[0]}. {text}"
    return text[0].upper() + text[1:]


def _described(quantity: Quantity) -> str:
    unit = f" ({quantity.unit})" if quantity.unit else ""
    better = "" if quantity in DESCRIPTIVE else f", {quantity.better} is better"
    return f"{words(quantity)}{unit}{better}"


def _remark(project: Project, table: RunTable, column: str) -> str:
    """A column's model, where the column's name does not give it."""
    slot = project.slot(table, column)
    here = f"here: {model_name(slot)}" if is_stand_in(slot) else ""
    return here if column == slot.name else f"on {slot.name}{f' ({here})' if here else ''}"
