"""Figures of kind `lines`: what rows lose as bits, group sizes or clip ratios change, ours beside the paper's.

The last label of the rows is the horizontal axis and the one before it names the series; a panel is a column. In a
table whose columns are settings of one model instead, the columns are the axis and a panel is a row.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotquant.project import Project
from rotquant.quantities import Quantity
from rotquant.reporting.describe import panel_title
from rotquant.reporting.numbers import loss_words
from rotquant.reporting.style import (
    NEUTRAL,
    OURS,
    OURS_MARK,
    PUBLISHED,
    PUBLISHED_MARK,
    SERIES,
    PercentAxis,
    save_svg,
    styled,
)
from rotquant.reporting.tables import Values, loss_percent, main_quantities, percent_of
from rotquant.tables import Row, Table

#: With more series than this, ours and the paper's get panels of their own.
TOGETHER = 2

_NAMES = {"ours": "computed here", "papers": "published"}
_DASHED = (0, (4, 2))


@dataclass(frozen=True)
class Point:
    """One number of a series: its setting, what it loses in percent (ours with deviation, the paper's)."""

    setting: str
    ours: float | None
    spread: float | None
    papers: float | None


@dataclass(frozen=True)
class Panel:
    """The series of one panel by name."""

    title: str
    series: dict[str, list[Point]]

    @property
    def points(self) -> list[Point]:
        """The points of all series."""
        return [point for points in self.series.values() for point in points]


@dataclass(frozen=True)
class Block:
    """Panels of one quantity that share an axis, and which numbers they show: "ours", "papers" or both."""

    quantity: Quantity
    panels: list[Panel]
    which: tuple[str, ...]

    def label(self, over: str) -> str:
        """Title of the vertical axis."""
        apart = f"{_NAMES[self.which[0]]}\n" if len(self.which) == 1 else ""
        return f"{apart}{loss_words(self.quantity)}\nrelative to {over}"


def lines(project: Project, table: Table, values: Values, path: Path) -> None:
    """A line of panels per block; the blocks of a table with a single panel each stand side by side."""
    by_row = _columns_are_settings(project, table)
    over = project.columns(table)[0] if by_row else table.baseline
    blocks = _blocks(project, table, values, _by_row if by_row else _by_column)
    width = len(blocks[0].panels)
    shape = (len(blocks), width) if width > 1 else (1, len(blocks))
    with styled() as plt:
        size = (1.0 + 2.3 * shape[1], 0.6 + 2.1 * shape[0])
        figure, grid = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
        for line, (block, axes) in enumerate(zip(blocks, grid.reshape(-1, width), strict=True)):
            scale = PercentAxis([*_changes(block.panels, ("ours", "papers")), *_ends(block.panels)])
            for axis, panel in zip(axes, block.panels, strict=True):
                _draw(axis, panel, block.which, scale)
                axis.set_title("" if line and width > 1 else panel.title)
                if axis is not axes[0]:
                    axis.set_yticklabels([])
            axes[0].set_ylabel(block.label(over))
        for axis in grid[-1]:
            axis.set_xlabel(table.figure.x or (table.label_columns[-1] if table.label_columns else ""))
        handles = _handles(plt, blocks)
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if len(handles) <= 5 else 4)
        save_svg(figure, path)


def _blocks(project: Project, table: Table, values: Values, panels_of: Callable[..., list[Panel]]) -> list[Block]:
    """One block per main quantity, or ours above the paper's where there are many series."""
    blocks = []
    for quantity in main_quantities(project, table):
        panels = panels_of(project, table, values, quantity)
        apart = len(panels[0].series) > TOGETHER
        blocks.append(Block(quantity, panels, ("ours",) if apart else ("ours", "papers")))
        if apart and _changes(panels, ("papers",)):
            blocks.append(Block(quantity, panels, ("papers",)))
    return blocks


def _columns_are_settings(project: Project, table: Table) -> bool:
    """Whether the columns are settings of one model, such as clip ratios, and no models."""
    slots = {project.slot(table, column).name for column in project.columns(table)}
    return len(slots) == 1 and not slots & set(project.columns(table))


def _by_column(project: Project, table: Table, values: Values, quantity: Quantity) -> list[Panel]:
    """A panel per column: what each row loses on the baseline row."""
    panels = []
    for column in project.columns(table):
        series: dict[str, list[Point]] = {}
        for row in table.rows:
            if row.name != table.baseline:
                setting = str(row.labels[-1]) if row.labels else row.name
                point = _point(values, setting, (row.name, column), (table.baseline, column), quantity)
                series.setdefault(_series(table, row), []).append(point)
        panels.append(Panel(panel_title(project, table, column), series))
    return panels


def _series(table: Table, row: Row) -> str:
    """The series of a row: its last label but one, or its name without the setting at its end ("RTN A16W4")."""
    if len(row.labels) > 1:
        return f"{table.label_columns[-2]} {row.labels[-2]}"
    return row.name.rpartition(" ")[0]


def _by_row(project: Project, table: Table, values: Values, quantity: Quantity) -> list[Panel]:
    """A panel per row: what each column loses on the first one, so that the paper's model and ours compare."""
    columns = project.columns(table)
    rows = [row.name for row in table.rows if row.name != table.baseline]
    return [
        Panel(row, {"": [_point(values, column, (row, column), (row, columns[0]), quantity) for column in columns]})
        for row in rows
    ]


def _point(values: Values, setting: str, place: tuple[str, str], over: tuple[str, str], quantity: Quantity) -> Point:
    value, base = values[*place, quantity.name], values[*over, quantity.name]
    spread = percent_of(value.deviation, base.mean)
    ours = loss_percent(quantity, value.mean, base.mean)
    return Point(setting, ours, spread, loss_percent(quantity, value.published, base.published))


def _changes(panels: Iterable[Panel], which: Iterable[str]) -> list[float]:
    """All numbers of the panels that are to be drawn."""
    numbers = (getattr(point, name) for panel in panels for point in panel.points for name in which)
    return [number for number in numbers if number is not None]


def _ends(panels: Iterable[Panel]) -> list[float]:
    """Both ends of every error bar."""
    bars = [(point.ours, _bar(point)) for panel in panels for point in panel.points if point.ours is not None]
    return [end for ours, bar in bars if bar for end in (ours - bar, ours + bar)]


def _bar(point: Point) -> float:
    """Length of a point's error bar: nothing where there is none or where the network broke down."""
    return point.spread if point.spread is not None and math.isfinite(point.spread) else 0.0


def _draw(axis: Any, panel: Panel, which: tuple[str, ...], scale: PercentAxis) -> None:
    settings = list(dict.fromkeys(point.setting for point in panel.points))
    for index, points in enumerate(panel.series.values()):
        shift = 0.08 * (index - (len(panel.series) - 1) / 2)
        places = {setting: place + shift for place, setting in enumerate(settings)}
        for name in which:
            drawn = [(places[point.setting], point) for point in points if getattr(point, name) is not None]
            if drawn:
                _curve(axis, drawn, name, _color(len(panel.series), index, name), scale)
    scale.apply(axis, "y")
    axis.axhline(0, color=NEUTRAL, linewidth=0.8)
    axis.set(xticks=range(len(settings)), xlim=(-0.4, len(settings) - 0.6))
    axis.set_xticklabels(settings)
    axis.tick_params(axis="x", length=0)


def _curve(axis: Any, drawn: list[tuple[float, Point]], name: str, color: str, scale: PercentAxis) -> None:
    """One series of ours or the paper's; what broke down points up, out of the panel."""
    heights = [getattr(point, name) for _, point in drawn]
    look = {"linestyle": "-", **OURS_MARK} if name == "ours" else {"linestyle": _DASHED, **PUBLISHED_MARK}
    places, tops = [place for place, _ in drawn], [scale.place(height) for height in heights]
    axis.plot(places, tops, color=color, linewidth=1.1, **look)
    for place, top, height in zip(places, tops, heights, strict=True):
        if not math.isfinite(height):
            filled = color if name == "ours" else "white"
            axis.plot(place, top, "^", markersize=8, color=color, markerfacecolor=filled)
    if name == "ours":
        axis.errorbar(
            places, tops, yerr=[_bar(point) for _, point in drawn], fmt="none", ecolor=color, elinewidth=1, capsize=1.5
        )


def _color(count: int, index: int, name: str) -> str:
    """A lone series takes the colours of ours and published; several are told apart by theirs."""
    return {"ours": OURS, "papers": PUBLISHED}[name] if count == 1 else SERIES[index % len(SERIES)]


def _handles(plt: Any, blocks: list[Block]) -> list[Any]:
    """The legend: series by colour, then whose numbers by mark, then what broke down."""
    names = list(blocks[0].panels[0].series)
    numbers = {name: [n for block in blocks for n in _changes(block.panels, (name,))] for name in _NAMES}
    if len(names) == 1:
        handles, colors = [], {"ours": OURS, "papers": PUBLISHED}
    else:
        handles = [
            plt.Line2D([], [], color=_color(len(names), index, "ours"), label=name) for index, name in enumerate(names)
        ]
        colors = dict.fromkeys(_NAMES, NEUTRAL)
    handles.append(plt.Line2D([], [], color=colors["ours"], **OURS_MARK, label=_NAMES["ours"]))
    if numbers["papers"]:
        look = {"linestyle": _DASHED, **PUBLISHED_MARK}
        handles.append(plt.Line2D([], [], color=colors["papers"], **look, label=_NAMES["papers"]))
    if not all(map(math.isfinite, numbers["ours"] + numbers["papers"])):
        handles.append(plt.Line2D([], [], color=NEUTRAL, linestyle="", marker="^", markersize=7, label="Inf or NaN"))
    return handles
