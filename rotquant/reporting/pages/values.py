"""Sections "Values" and "Change from the baseline": ours beside the paper's, per column and main quantity."""

from pathlib import Path
from typing import Any

from rotquant.project import Project
from rotquant.quantities import Quantity
from rotquant.reporting.numbers import italic, show, show_change, words
from rotquant.reporting.tables import Values, losses, main_quantities, markdown_table
from rotquant.tables import Published, Table

#: Numbers that a line of one table can hold; with more, each quantity gets a table of its own.
WIDTH = 8


def values_section(project: Project, table: Table, values: Values) -> str:
    """Mean and deviation of every main quantity beside the published number, in the paper's order."""
    published = project.published(table)
    decimals = {quantity.name: _decimals(published, quantity) for quantity in project.quantities(table)}

    def cells(row: str, column: str, quantity: Quantity) -> list[str]:
        value = values[row, column, quantity.name]
        digits = decimals[quantity.name]
        return [show(value.mean, value.deviation, digits), italic(show(value.published, None, digits))]

    return "\n".join(["## Values\n", *_tables(project, table, published, cells), _footnotes(project, table)])


def change_section(project: Project, table: Table, values: Values) -> str:
    """What each row gains or loses on the baseline row, in percent, ours and the paper's."""
    if all(metric["kind"] == "magnitudes" for metric in table.metrics) or len(table.rows) == 1:
        return ""

    def cells(row: str, column: str, quantity: Quantity) -> list[str]:
        sign = 1.0 if quantity.better == "lower" else -1.0
        ours, papers = (
            None if loss is None else sign * loss for loss in losses(values, table.baseline, row, column, quantity)
        )
        deviation, base = values[row, column, quantity.name].deviation, values[table.baseline, column, quantity.name]
        spread = None if deviation is None else 100.0 * deviation / base.mean
        return [show_change(ours, spread), italic(show_change(papers))]

    tables = _tables(project, table, project.published(table), cells, without=table.baseline)
    note = f"In percent of the column's {table.baseline} row. Deviations are the row's own.\n"
    return "\n".join([f"## Change from {table.baseline}\n", *tables, note])


def _tables(project: Project, table: Table, published: Published, cells: Any, without: str | None = None) -> list[str]:
    """One table of all main quantities where a line can hold them, otherwise one per quantity under its own heading."""
    columns, mains = project.columns(table), main_quantities(project, table)
    together = len(mains) == 1 or len(columns) * len(mains) * 2 <= WIDTH
    parts = []
    for group in [mains] if together else [(quantity,) for quantity in mains]:
        header, align = ["Method", *table.label_columns], "l" * (1 + len(table.label_columns))
        printed = []
        for column in columns:
            for quantity in group:
                printed.append(any((row.name, column, quantity.name) in published for row in table.rows))
                header += [f"{column}, {quantity.title}" if len(group) > 1 else column]
                header += ["*published*"] if printed[-1] else []
        lines = []
        for row in table.rows:
            if row.name == without:
                continue
            pairs = [cells(row.name, column, quantity) for column in columns for quantity in group]
            numbers = [pair[: 1 + shown] for pair, shown in zip(pairs, printed, strict=True)]
            lines.append([row.name, *row.labels, *(number for pair in numbers for number in pair)])
        parts.append(_heading(group, together))
        parts.append(markdown_table(header, lines, align + "r" * (len(header) - len(align))))
    return parts


def _heading(group: tuple[Quantity, ...], together: bool) -> str:
    described = [
        f"{words(quantity)}{f' ({quantity.unit})' if quantity.unit else ''}, {quantity.better} is better"
        for quantity in group
    ]
    text = "; ".join(
        f"{quantity.title}: {line}" if len(group) > 1 else line for quantity, line in zip(group, described, strict=True)
    )
    text = text[0].upper() + text[1:]
    return f"{text}.\n" if together else f"### {text}\n"


def _decimals(published: Published, quantity: Quantity) -> int:
    """As many decimals as the paper prints, at least two: Table 5 is about differences in the third."""
    texts = [repr(value) for (_, _, name), value in published.items() if name == quantity.name and value is not None]
    return max([2, *(min(len(text.partition(".")[2]), 3) for text in texts if "e" not in text)])


def _footnotes(project: Project, table: Table) -> str:
    """What a reader must know about single columns and about the ±."""
    seeds = ", ".join(map(str, project.config.seeds))
    lines = [f"Mean ± sample deviation over the seeds {seeds}; where nothing is random a number is computed once."]
    for column in table.columns:
        if column.published is not None and column.name in project.columns(table):
            source = Path(column.published).stem.replace("table", "Table ").replace("figure", "Figure ")
            lines.append(f"The *published* numbers of {column.name} stand in the paper's {source}.")
    return "\n".join(f"- {line}" for line in [*lines, *table.notes]) + "\n"
