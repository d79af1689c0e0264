"""Figures about the kurtosis of weights (RCP Figures 3 and 8), and of Hadamard-transformed vectors (its Lemma 1).

They are drawn from the arrays of the run files.
"""

from pathlib import Path
from typing import Any

from reproduction.frame.values import Values
from reproduction.render.figures.arrays import array_of
from reproduction.render.figures.panels import entry, legend, panels
from reproduction.render.figures.style import DASHED, NEUTRAL, SERIES, SMALL, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable

_DISTRIBUTIONS = {
    "uniform": "uniform",
    "two_point": "two points",
    "beta": "Beta(2, 2)",
    "truncated_normal": "normal, cut off at two deviations",
    "skewed": "square of a uniform number",
    "laplace": "Laplace",
    "turned_two_point": "Hadamard transform of two points",
    "common_scale": "uniform, times one factor for all",
}


def weight_kurtosis(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a histogram for each of the metric's weights, the first seed of each row; counts in blue.

    A bright line is the mean rise of the error, dotted ones mark where nothing rises.

    Raises:
        ResultError: a run file is missing or has no histograms.
    """
    cells = [(row, column) for column in project.columns(table) for row in drawn_rows(table)]
    shown = [
        (row, column, panel)
        for row, column in cells
        for panel in array_of(project, values[row, column, "correlation"].runs[0], "panels")
    ]
    named = len(cells) > 1
    with panels(path, 1, len(shown), (2.6, 2.5), least=2.1) as (figure, grid):
        for axis, (row, column, panel) in zip(grid[0], shown, strict=True):
            _histogram(axis, panel)
            names = [row] * (len(drawn_rows(table)) > 1) + [column] * (len(project.columns(table)) > 1)
            axis.set_title("\n".join([", ".join(names)] * named + _title(panel)), fontsize=SMALL)
        figure.supxlabel("rise of the mean excess kurtosis of an output element's groups")
        figure.supylabel("rise of its mean |X (Q(W) - W)|")
        mean = entry("mean rise of the error", _BRIGHT)
        legend(figure, [mean, entry("no rise", NEUTRAL, linestyle=":")])


#: Brightness of the line in the paper's figures, on white and on dark blue.
_BRIGHT = "#E69F00"


def _title(panel: dict[str, Any]) -> list[str]:
    low, high, correlation, rise = map(float, (*panel["interval"], panel["correlation"], panel["error_rise"]))
    share = f"$p_{{platy}}$ = {panel['platykurtic'] / 100:.2f} (normal {panel['normal'] / 100:.2f})"
    relation = f"$\\rho$ = {correlation:.2f} [{low:.2f}, {high:.2f}], error {rise:+.1f} %"
    return [f"layer {panel['layer'] + 1}, {panel['weight']}", share, relation]


def _histogram(axis: Any, panel: dict[str, Any]) -> None:
    """Draw counts within the ranges stored by the metric."""
    import numpy as np

    found = panel["histogram"]
    axis.grid(False)
    if not found["counts"]:
        axis.text(0.5, 0.5, "not finite", transform=axis.transAxes, ha="center", color=NEUTRAL)
        axis.set(xticks=[], yticks=[])
        return
    counts = np.ma.masked_equal(np.array(found["counts"]).T, 0)  # [y][x], empty bins stay white
    edges = [np.linspace(found[name][0], found[name][1], len(counts) + 1) for name in ("x", "y")]
    axis.pcolormesh(*edges, counts, cmap="Blues", vmin=-0.2 * counts.max(), linewidth=0)
    axis.text(0.98, 0.02, f"up to {counts.max()} in a field", transform=axis.transAxes, ha="right", fontsize=SMALL)
    before, after = panel["error"]
    look: dict[str, Any] = {"color": NEUTRAL, "linewidth": 0.9, "linestyle": ":"}
    for line, (low, high) in ((axis.axvline, found["x"]), (axis.axhline, found["y"])):
        if low < 0 < high:
            line(0, **look)
    axis.axhline(after - before, color=_BRIGHT, linewidth=1.4)
    axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))


def hadamard_kurtosis(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw a panel for each row: |Kurt(Y_i)| against the length n, i > 1 filled, i = 1 hollow, and lines Kurt(X) / n.

    Both axes are logarithmic; bars are one standard error, and reach the axis where it does not exclude 0.

    Raises:
        ResultError: a run file is missing or has no series.
    """
    rows, column = drawn_rows(table), project.columns(table)[0]
    with panels(path, 1, len(rows), (2.9, 2.8), least=1.9, sharey=True) as (figure, grid):
        for axis, row in zip(grid[0], rows, strict=True):
            series = array_of(project, values[row, column, "largest_z"].runs[0], "series")
            for (name, points), color in zip(series.items(), SERIES, strict=False):
                _series(axis, name, points, color)
            axis.set(xscale="log", yscale="log", ylim=(3e-4, 60), xlabel="length n of the vector", title=row)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.legend(loc="upper right")
        grid[0][0].set_ylabel("size of the excess kurtosis")
        marks = [
            entry("i > 1", NEUTRAL, marker="o", markersize=4),
            entry("i = 1", NEUTRAL, marker="o", markersize=4, markerfacecolor="white"),
            entry("|Kurt(X)| / n", NEUTRAL),
            entry("|Kurt(X)|", NEUTRAL, linestyle=DASHED),
        ]
        legend(figure, marks)


def _series(axis: Any, name: str, points: list[dict[str, Any]], color: str) -> None:
    """Draw a distribution: the lemma's line, Kurt(X), and both kinds of component with standard errors.

    Signs look alike on a logarithmic axis, so points whose sign differs from Kurt(X)'s are crosses.
    """
    sizes = [point["size"] for point in points]
    axis.plot(sizes, [abs(point["kurtosis_x"]) / point["size"] for point in points], color=color, linewidth=0.9)
    axis.plot(
        sizes, [abs(point["kurtosis_x"]) for point in points], color=color, linewidth=0.7, linestyle=DASHED, alpha=0.6
    )
    for kind, shift, look in (("others", 1.0, {}), ("first", 1.12, {"markerfacecolor": "white", "alpha": 0.5})):
        for point in points:
            kurtosis, error = point[kind]
            mark = "o" if kurtosis * point["kurtosis_x"] > 0 else "x"
            axis.errorbar(
                point["size"] * shift,
                abs(kurtosis),
                yerr=error,
                color=color,
                marker=mark,
                markersize=3,
                elinewidth=0.7,
                **look,
            )
    axis.plot([], [], color=color, marker="o", markersize=3, label=_DISTRIBUTIONS[name])
