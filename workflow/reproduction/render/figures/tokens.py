"""Figures of kinds `token_maxima` and `outlier_tokens`: size, kind and place of outlier tokens (PrefixQuant).

Its Figures 2, 3 and 8 to 17, and 4 and 7, drawn from the arrays of the run files of the metrics of the same names.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.frame.values import Number, Values
from reproduction.render.figures.arrays import array_of
from reproduction.render.figures.panels import broken, entry, leftmost, legend, note, panels
from reproduction.render.figures.style import LIGHT, NEUTRAL, OURS, SERIES, SMALL, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.quantities import TENSOR_WORDS
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title

#: Name and style of each statistic, from the largest to the smallest.
STATISTICS: dict[str, tuple[str, dict[str, Any]]] = {
    "top_1": ("top-1", {"color": SERIES[1], "marker": "^"}),
    "top_2": ("top-2", {"color": SERIES[4], "marker": "s"}),
    "top_3": ("top-3", {"color": SERIES[3], "marker": "D"}),
    "median": ("median", {"color": SERIES[0], "marker": "o"}),
    "min_1": ("min-1", {"color": SERIES[2], "marker": "v"}),
}
#: Limit of a ratio for one static scale, as coloured by the paper, by what is measured.
LARGE = {"inputs": 10.0, "attention": 5.0}

SHARE, POSITION = "share of outlier tokens in %", "position in the window (0 is the first)"

#: Drawn fields of outlier tokens.
_DRAWN = ("contents", "first", "others", "positions", "windows", "tokens")

#: Number of contents that a panel names; the others are counted together.
NAMED = 5


def token_maxima(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a panel per row of the table, down, and tensor, across, column after column: statistics by layer.

    Panels of a column and tensor share their scale. The first seed of each row is drawn; non-finite values are left out
    and counted in the title.

    Raises:
        ResultError: a run file is missing or has no maxima.
    """
    tensors = table.metrics[0].get("tensors", "inputs")
    names, rows, columns = TENSOR_WORDS[tensors], drawn_rows(table), project.columns(table)
    with panels(path, len(rows) * len(columns), len(names), (1.6, 1.75), names=0.6) as (figure, grid):
        for place, column in enumerate(columns):
            lines = grid[place * len(rows) : (place + 1) * len(rows)]
            for row, axes in zip(rows, lines, strict=True):
                cell = {name: values[row, column, f"{name}_top"] for name in names}
                maxima = array_of(project, next(iter(cell.values())).runs[0], "maxima")
                for (name, words), axis in zip(names.items(), axes, strict=True):
                    _by_layer(axis, maxima[name], LARGE[tensors])
                    if leftmost(axis):
                        axis.set_ylabel(f"{_row_title(row, column, columns, cell[name])}\nlargest |value| of a token")
                    if row == rows[0] or broken(axis, axes):
                        what = f"input of {words}" if tensors == "inputs" else words
                        axis.set_title(f"{what}\n\n{axis.get_title()}")
            for axes in lines.T:
                _logarithmic(axes)
        for axis in grid[-1]:
            axis.set_xlabel("layer")
        looks = [entry(words, **look, linestyle="-", markersize=4) for words, look in STATISTICS.values()]
        legend(figure, looks)


def _row_title(row: str, column: str, columns: Sequence[str], number: Number) -> str:
    seed = f", seed {number.seeds[0]}" if len(number.seeds) > 1 else ""
    return f"{f'{column}, ' if len(columns) > 1 else ''}{row}{seed}"


def _by_layer(axis: Any, maxima: Mapping[str, Sequence[float]], large: float) -> None:
    """Draw one panel: each statistic by layer, and in the title both ratios, each of its worst layer."""
    from matplotlib.ticker import MaxNLocator

    left = 0
    for statistic, (_, look) in STATISTICS.items():
        numbers = [float(number) for number in maxima[statistic]]
        shown = [number if math.isfinite(number) and number > 0 else math.nan for number in numbers]
        left += sum(map(math.isnan, shown))
        axis.plot(range(1, 1 + len(shown)), shown, **look, markersize=2.8, linewidth=0.9)
    ratios = [_worst(maxima, *ends) for ends in (("top_1", "median"), ("median", "min_1"))]
    words = [f"{'▲' if ratio > large else ''}{_number(ratio)}" for ratio in ratios]
    left_out = f"\n{left} numbers are zero\nor not finite" if left else ""
    axis.set_title(f"top-1/median {words[0]}\nmedian/min-1 {words[1]}{left_out}", fontsize=SMALL)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _worst(maxima: Mapping[str, Sequence[float]], upper: str, lower: str) -> float:
    """The largest ratio of two statistics over the layers; nan where one is not a number."""
    ratios = [
        float(a) / float(b) if float(b) else math.inf if float(a) else math.nan
        for a, b in zip(maxima[upper], maxima[lower], strict=True)
    ]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def _number(ratio: float) -> str:
    return f"{ratio:,.0f}" if 1000 <= ratio < math.inf else f"{ratio:.3g}"


def _logarithmic(axes: Sequence[Any]) -> None:
    """Give panels one logarithmic scale for the numbers of all, with ticks written without exponents."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis in axes:
        axis.set_yscale("log")
    ends = [axis.get_ylim() for axis in axes]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    for axis in axes:
        axis.set_ylim(low, high)
        axis.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def outlier_tokens(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a line of panels per column: contents of outlier tokens in the first row, and their places in every row.

    The first seed of each row is drawn.

    Raises:
        ResultError: a run file is missing or has no outlier tokens.
    """
    rows, columns = drawn_rows(table), project.columns(table)
    found = {
        column: {
            row: {name: array_of(project, values[row, column, "number"].runs[0], name) for name in _DRAWN}
            for row in rows
        }
        for column in columns
    }
    bars = max(min(NAMED + 1, len(cells[rows[0]]["contents"])) for cells in found.values())
    panel = (3.4, 0.45 + 0.14 * max(2.0, bars, 2.2 * len(rows)))
    with panels(path, len(columns), 2, panel, least=2.6, widths=[2, 3]) as (figure, grid):
        for column, (left, right) in zip(columns, grid, strict=True):
            _contents(left, found[column][rows[0]])
            left.set_title(panel_title(project, table, column) if len(columns) > 1 else "")
            _strips(right, {row: (one, values[row, column, "number"].mean) for row, one in found[column].items()})
        grid[-1, 0].set_xlabel(f"{SHARE}\n({rows[0]}, without the first position)")
        grid[-1, 1].set_xlabel(POSITION)
        legend(figure, _marks())


def _marks() -> list[Any]:
    return [
        entry("low in meaning", OURS, linewidth=6),
        entry("other content", LIGHT, linewidth=6),
        entry("outlier token, darker in more windows", NEUTRAL, marker="|", markersize=9),
    ]


def _strips(axis: Any, found: Mapping[str, tuple[Mapping[str, Any], float]]) -> None:
    """Draw strips of positions below each other, each with its name, its number in a window, and the number at 0."""
    names: list[str] = []
    for place, (name, (one, number)) in enumerate(found.items()):
        _positions(axis, place, one["positions"], one["windows"], one["tokens"])
        total = one["first"] + one["others"]
        names.append(f"{name}, {number:.3g} a window" + (f"\n{one['first']} of {total} at 0" if total else ""))
    axis.set(yticks=range(len(names)), ylim=(len(names) - 0.4, -0.6))
    axis.set_yticklabels(names)
    axis.tick_params(axis="y", length=0)


def _contents(axis: Any, found: Mapping[str, Any]) -> None:
    """Draw bars of the most frequent contents and of all others together, or a text where there are none."""
    others = found["others"]
    named = [(_shown(text), count, low) for text, count, low in found["contents"][:NAMED]]
    rest = others - sum(count for _, count, _ in named)
    bars = [*named, *([("others", rest, False)] if rest else [])]
    height = max(2, len(bars))
    axis.set(xlim=(0, 118), ylim=(height - 0.4, -0.6), yticks=range(len(bars)))
    axis.set_yticklabels([text for text, _, _ in bars])
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    if not bars:
        axis.text(59, height / 2 - 0.5, "none elsewhere", ha="center", va="center", color=NEUTRAL)
    for place, (_, count, low) in enumerate(bars):
        share = 100 * count / others
        axis.barh(place, share, height=0.7, color=OURS if low else LIGHT, linewidth=0)
        note(axis, f"{share:.3g} ({count})", (share, place), (2, 0), va="center", color=NEUTRAL)


def _shown(text: str) -> str:
    """A token in readable form, cut where it is long; a dollar sign is no mathematics."""
    cut = text if len(text) <= 12 else f"{text[:11]}…"
    return repr(cut).replace(" ", "␣").replace("$", r"\$")


def _positions(axis: Any, place: int, positions: Sequence[tuple[int, int]], windows: int, tokens: int) -> None:
    """Draw a stroke at each position of outlier tokens, as dark as the share of windows that have one there."""
    axis.set_xlim(-0.02 * tokens, 1.02 * tokens)
    axis.axhline(place, color=NEUTRAL, linewidth=0.4, alpha=0.5)
    for position, count in positions:
        dark = 0.3 + 0.7 * min(1.0, count / windows)
        axis.vlines(position, place - 0.3, place + 0.3, color=OURS, alpha=dark, linewidth=1.6)
    if not positions:
        note(axis, "no outlier token", (tokens / 2, place), (0, 4), ha="center", color=NEUTRAL)
