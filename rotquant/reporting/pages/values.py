"""Sections "Values" and "Change from the baseline": ours beside the paper's, per column and main quantity."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from rotquant.reporting.figures.changes import change_between
from rotquant.reporting.words.markdown import markdown_table
from rotquant.reporting.words.numbers import italic, not_finite, show, show_change, words
from rotquant.study.project import Project
from rotquant.study.quantities import DESCRIPTIVE, Quantity
from rotquant.study.tables import Row, Table, read_published
from rotquant.study.values import Values, main_quantities

#: Numbers that a line of one table can hold; with more, each quantity gets a table of its own.
WIDTH = 8


def values_section(project: Project, table: Table, values: Values) -> str:
    """Mean and deviation of every main quantity beside the published number, in the paper's order."""
    mains = main_quantities(project, table)
    decimals = {quantity.name: printed_decimals(values, quantity) for quantity in project.quantities(table)}

    def pair(row: str, column: str, quantity: Quantity) -> tuple[str, str]:
        place, digits = (row, column, quantity.name), decimals[quantity.name]
        ours = show(values[place].mean, values[place].deviation, max(2, digits)) if place in values else "-"
        paper = values.published.get(place)
        return ours, italic(show(paper and paper.mean, None, digits))

    tables = _tables(project, table, table.rows, pair, mains)
    return "\n".join(["## Values\n", *tables, _footnotes(project, table, values)])


def change_section(project: Project, table: Table, values: Values) -> str:
    """What each row gains or loses on the baseline row, in percent, ours and the paper's."""
    mains = [quantity for quantity in main_quantities(project, table) if quantity.relative]
    if not mains or len(table.computed_rows) == 1:
        return ""

    def pair(row: str, column: str, quantity: Quantity) -> tuple[str, str]:
        sign = 1.0 if quantity.better == "lower" else -1.0
        loss = change_between(values, (row, column), (table.baseline, column), quantity)
        ours, papers = (None if number is None else sign * number for number in (loss.ours, loss.papers))
        spread = None if values[row, column, quantity.name].deviation is None else loss.spread
        return show_change(ours, spread), italic(show_change(papers))

    rows = [row for row in table.computed_rows if row.name != table.baseline]
    tables = _tables(project, table, rows, pair, mains)
    note = f"In percent of the column's {table.baseline} row. Deviations are the row's own.\n"
    return "\n".join([f"## Change from {table.baseline}\n", *tables, note])


Pair = Callable[[str, str, Quantity], tuple[str, str]]
"""What a cell prints of (row, column, quantity): ours, and the paper's."""


def _tables(project: Project, table: Table, rows: Sequence[Row], pair: Pair, mains: Sequence[Quantity]) -> list[str]:
    """One table of these quantities where a line can hold them, otherwise one per quantity under its own heading."""
    columns = project.columns(table)
    together = len(mains) == 1 or len(columns) * len(mains) * 2 <= WIDTH
    parts = []
    for group in [tuple(mains)] if together else [(quantity,) for quantity in mains]:
        parts.append(_heading(columns, group, together))
        parts.append(_table(table, rows, columns, group, pair))
    return parts


def _table(table: Table, rows: Sequence[Row], columns: tuple[str, ...], group: tuple[Quantity, ...], pair: Pair) -> str:
    """Rows as the paper has them; the published number in a column of its own, or in brackets where it is rare."""
    lines: list[list[object]] = [[row.name, *row.labels] for row in rows]
    header, align = ["Method", *table.label_columns], "l" * (1 + len(table.label_columns))
    for column, quantity in itertools.product(columns, group):
        pairs = [pair(row.name, column, quantity) for row in rows]
        share = sum(papers != "-" for _, papers in pairs) / len(pairs)
        head = column if len(group) == 1 else quantity.title if len(columns) == 1 else f"{column}, {quantity.title}"
        header += [head, "*published*"] if share >= 0.5 else [f"{head} (*published*)"] if share else [head]
        for line, (ours, papers) in zip(lines, pairs, strict=True):
            line += [ours, papers] if share >= 0.5 else [ours if papers == "-" else f"{ours} ({papers})"]
    return markdown_table(header, lines, align + "r" * (len(header) - len(align)))


def _heading(columns: tuple[str, ...], group: tuple[Quantity, ...], together: bool) -> str:
    """What the numbers are and which way is better, as a sentence or as a heading."""
    text = "; ".join((f"{quantity.title}: " if len(group) > 1 else "") + _described(quantity) for quantity in group)
    if len(columns) == 1 and len(group) > 1:
        return f"{columns[0]}. {text}.\n"
    text = text[0].upper() + text[1:]
    return f"{text}.\n" if together else f"### {text}\n"


def _described(quantity: Quantity) -> str:
    unit = f" ({quantity.unit})" if quantity.unit else ""
    better = "" if quantity in DESCRIPTIVE else f", {quantity.better} is better"
    return f"{words(quantity)}{unit}{better}"


def printed_decimals(values: Values, quantity: Quantity) -> int:
    """As many decimals as the paper prints, or two where it prints none. Ours have at least two."""
    texts = [repr(number.mean) for (_, _, name), number in values.published.items() if name == quantity.name]
    return max((min(len(text.partition(".")[2]), 3) for text in texts if "e" not in text), default=2)


def _footnotes(project: Project, table: Table, values: Values) -> str:
    """What a reader must know about the ±, about what is not finite or not computed, and about single columns."""
    seeds = ", ".join(map(str, project.seeds(table)))
    lines = [f"Mean ± sample deviation over the seeds {seeds}; where nothing is random a number is computed once."]
    if len(project.seeds(table)) == 1:
        lines = [f"One run a number; where something is random, of seed {seeds}."]
    lines += not_finite(project.quantities(table), values)
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        if row.not_computed is not None:
            reasons.setdefault(row.not_computed, []).append(row.name)
    lines += [f"Not computed here: {', '.join(rows)}. {reason}" for reason, rows in reasons.items()]
    for column in table.columns:
        if column.published is not None and column.name in project.columns(table):
            source = Path(column.published).stem.replace("table", "Table ").replace("figure", "Figure ")
            own = table.published is not None and any(
                place[1] == column.name for place in read_published(project.root / table.published)
            )
            which = f"numbers of {column.name}{' that this table lacks' if own else ''}"
            lines.append(f"The *published* {which} stand in the paper's {source}.")
    return "\n".join(f"- {line}" for line in [*lines, *table.notes]) + "\n"
