"""Figures of kind `loss_curves`: the loss of every step of a training, whole and its beginning (RCP Figure 6)."""

from reproduction.frame.values import Values
from reproduction.render.figures.arrays import array_of
from reproduction.render.figures.axes import logarithmic
from reproduction.render.figures.panels import Sheet, entry, legend, panels
from reproduction.render.figures.style import SERIES, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title


def loss_curves(project: Project, table: RunTable, values: Values, sheet: Sheet) -> None:
    """Draw all steps for each column, and the first ones next to them; a line is a row's first seed, spikes have marks.

    Raises:
        ResultError: a run file is missing or has no losses.
    """
    columns, rows = project.columns(table), drawn_rows(table)
    first = next(cell.metric.first for cell in project.cells(table.id) if cell.metric.kind == "training_loss")
    with panels(sheet, len(columns), 2, (3.3, 2.3), least=1.7) as (figure, grid):
        for axes, column in zip(grid, columns, strict=True):
            for row, color in zip(rows, SERIES, strict=False):
                key = values[row, column, "final_loss"].runs[0]
                losses, spikes = (array_of(project, key, name) for name in ("losses", "spikes"))
                axes[0].plot(range(len(losses)), losses, color=color, linewidth=0.7)
                axes[1].plot(range(len(losses[:first])), losses[:first], color=color, linewidth=1.0)
                axes[1].plot(spikes, [losses[step] for step in spikes], "v", color=color, markersize=4)
            for axis in axes:
                axis.set_xlabel("step")
                logarithmic(axis, "y")
            axes[0].set(ylabel="loss", title=panel_title(project, table, column))
            axes[1].set_title(f"the first {first} steps")
        entries = [entry(row, color) for row, color in zip(rows, SERIES, strict=False)]
        legend(figure, [*entries, entry("spike", "black", marker="v", markersize=4)])
