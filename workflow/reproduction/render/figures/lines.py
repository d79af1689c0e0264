"""Figures of kind `lines`: losses of rows over bits, group sizes or clip ratios, ours next to the paper's.

The last label of the rows is the horizontal axis and the one before it names the series; a panel is a column. In a
table whose columns are settings of one model and whose rows have no labels, the columns are the axis and a panel is a
row. Numbers ascend on the axis.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reproduction.frame.values import Values, main_quantities
from reproduction.render.figures.axes import PercentAxis
from reproduction.render.figures.changes import Change, change_between
from reproduction.render.figures.panels import beyond, broken, entry, leftmost, legend, panels
from reproduction.render.figures.style import DASHED, NEUTRAL, OURS, OURS_MARK, PUBLISHED, PUBLISHED_MARK, SERIES
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity
from reproduction.tables.tables import Row, RunTable
from reproduction.words.describe import panel_title
from reproduction.words.numbers import loss_words

#: With more series than this, ours and the paper's have separate panels.
TOGETHER = 2

_NAMES = {"ours": "computed here", "papers": "published"}
_COLORS = {"ours": OURS, "papers": PUBLISHED}
_LOOKS: dict[str, dict[str, Any]] = {
    "ours": {"linestyle": "-", **OURS_MARK},
    "papers": {"linestyle": DASHED, **PUBLISHED_MARK},
}


@dataclass(frozen=True)
class LinePanel:
    """The series of one panel by name, each by setting."""

    title: str
    series: dict[str, dict[str, Change]]

    @property
    def changes(self) -> list[Change]:
        """The changes of all series."""
        return [change for changes in self.series.values() for change in changes.values()]


@dataclass(frozen=True)
class Block:
    """Panels of one quantity that share an axis, and the numbers they show: "ours", "papers" or both."""

    quantity: Quantity
    panels: list[LinePanel]
    which: tuple[str, ...]

    @cached_property
    def scale(self) -> PercentAxis:
        """The axis of all panels."""
        return PercentAxis(change for panel in self.panels for change in panel.changes)

    def label(self, over: str) -> str:
        """Title of the vertical axis."""
        apart = f"{_NAMES[self.which[0]]}\n" if len(self.which) == 1 else ""
        return f"{apart}{loss_words(self.quantity)}{self.scale.words}\nrelative to {over}"


def lines(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a line of panels per block; the blocks of a table with a single panel each are side by side."""
    over = project.columns(table)[0] if _columns_are_settings(project, table) else table.baseline
    blocks = _blocks(project, table, values)
    width = len(blocks[0].panels)
    shape = (len(blocks), width) if width > 1 else (1, len(blocks))
    with panels(path, *shape, (2.1, 2.1), names=0.6, least=1.25) as (figure, grid):
        for line, (block, axes) in enumerate(zip(blocks, grid.reshape(-1, width), strict=True)):
            for axis, panel in zip(axes, block.panels, strict=True):
                _draw(axis, panel, block.which, block.scale)
                axis.set_title("" if line and width > 1 and not broken(axis, axes) else panel.title)
                axis.set_xlabel((table.figure and table.figure.x) or next(reversed(table.label_columns), ""))
                if axis is axes[0] or leftmost(axis):
                    axis.set_ylabel(block.label(over))
                else:
                    axis.set_yticklabels([])
        legend(figure, _entries(blocks))


def _blocks(project: Project, table: RunTable, values: Values) -> list[Block]:
    """One block per main quantity, or ours above the paper's where there are many series."""
    blocks = []
    for quantity in main_quantities(project, table):
        line = _panels(project, table, values, quantity)
        apart = len(line[0].series) > TOGETHER
        blocks.append(Block(quantity, line, ("ours",) if apart else ("ours", "papers")))
        if apart and _numbers(line, "papers"):
            blocks.append(Block(quantity, line, ("papers",)))
    return blocks


def _columns_are_settings(project: Project, table: RunTable) -> bool:
    """Whether the columns are settings of one model, such as clip ratios, and not models, and rows are no settings."""
    if table.label_columns:
        return False
    slots = {project.slot(table, column).name for column in project.columns(table)}
    return len(slots) == 1 and not slots & set(project.columns(table))


def _panels(project: Project, table: RunTable, values: Values, quantity: Quantity) -> list[LinePanel]:
    """A panel per column: the loss of each row against the baseline row.

    Where the columns are settings, a panel per row: the loss of each column against the first one, so that the paper's
    model and ours compare.
    """
    columns = project.columns(table)
    rows = [row for row in table.rows if row.name != table.baseline]

    if _columns_are_settings(project, table):
        cells = [[(row.name, column) for column in columns] for row in rows]
        losses = ({cell[1]: change_between(values, cell, line[0], quantity) for cell in line} for line in cells)
        return [LinePanel(row.name, {"": loss}) for row, loss in zip(rows, losses, strict=True)]
    found = []
    for column in columns:
        series: dict[str, dict[str, Change]] = {}
        for row in rows:
            setting = str(row.labels[-1]) if row.labels else row.name
            loss = change_between(values, (row.name, column), (table.baseline, column), quantity)
            series.setdefault(_series(table, row), {})[setting] = loss
        found.append(LinePanel(panel_title(project, table, column), series))
    return found


def _series(table: RunTable, row: Row) -> str:
    """Series of a row: its last label but one, or its name without a setting at its end ("RTN A16W4")."""
    if len(row.labels) > 1:
        return f"{table.label_columns[-2]} {row.labels[-2]}"
    named = not row.labels or row.name.endswith(f" {row.labels[-1]}")
    return row.name.rpartition(" ")[0] if named else ""


def _numbers(shown: Iterable[LinePanel], name: str) -> list[float]:
    """All numbers of ours or the paper's."""
    numbers = (getattr(change, name) for panel in shown for change in panel.changes)
    return [number for number in numbers if number is not None]


def _draw(axis: Any, panel: LinePanel, which: tuple[str, ...], scale: PercentAxis) -> None:
    """Draw all series of a panel with a small offset between them."""
    settings = _in_order(dict.fromkeys(setting for changes in panel.series.values() for setting in changes))
    for index, changes in enumerate(panel.series.values()):
        shift = 0.08 * (index - (len(panel.series) - 1) / 2)
        for name in which:
            drawn = {
                settings.index(setting) + shift: change
                for setting, change in changes.items()
                if getattr(change, name) is not None
            }
            _curve(axis, drawn, name, _color(len(panel.series), index, name), scale)
    scale.apply(axis, "y")
    axis.axhline(0, color=NEUTRAL, linewidth=0.8)
    axis.set(xticks=range(len(settings)), xlim=(-0.4, len(settings) - 0.6))
    axis.set_xticklabels(settings)
    axis.tick_params(axis="x", length=0)


def _in_order(settings: Iterable[str]) -> list[str]:
    """Settings in ascending order if all are numbers, else in the table's order."""
    found = list(settings)
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def _curve(axis: Any, drawn: dict[float, Change], name: str, color: str, scale: PercentAxis) -> None:
    """Draw one series of ours or the paper's by its place on the axis."""
    heights = {place: getattr(change, name) for place, change in drawn.items()}
    tops = [scale.place(height) for height in heights.values()]
    axis.plot(list(heights), tops, color=color, linewidth=1.1, **_LOOKS[name])
    scale.mark(axis, "y", heights.items(), color, color if name == "ours" else "white")
    if name == "ours":
        bars = [0.0 if scale.beyond(heights[place]) else change.spread for place, change in drawn.items()]
        axis.errorbar(list(heights), tops, yerr=bars, fmt="none", ecolor=color, elinewidth=1, capsize=1.5)


def _color(count: int, index: int, name: str) -> str:
    """Colour of a series: ours and published for a single one, different colours for several."""
    return _COLORS[name] if count == 1 else SERIES[index % len(SERIES)]


def _entries(blocks: list[Block]) -> list[Any]:
    """Legend entries: series by colour, then the numbers' origins by mark, then what is beyond an axis."""
    names = list(blocks[0].panels[0].series)
    numbers = {name: [number for block in blocks for number in _numbers(block.panels, name)] for name in _NAMES}
    alone = len(names) == 1
    entries = [] if alone else [entry(name, _color(len(names), index, "ours")) for index, name in enumerate(names)]
    for name in _NAMES:
        if name == "ours" or numbers[name]:
            entries.append(entry(_NAMES[name], _COLORS[name] if alone else NEUTRAL, **_LOOKS[name]))
    if any(block.scale.any_beyond for block in blocks):
        entries.append(beyond())
    return entries
