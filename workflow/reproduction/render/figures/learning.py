"""Figures of kinds `learning` and `loss_curves`: what changes step by step (SpinQuant Figure 7, RCP Figure 6).

Signal-to-noise ratios are drawn from the history stored with learned rotations: end to end and at one layer's o_proj on
each batch, and the gain at the inputs of all linear layers. Losses of a training are drawn whole and at its beginning.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.frame.values import Values
from reproduction.render.figures.arrays import array_of, history_of
from reproduction.render.figures.axes import logarithmic
from reproduction.render.figures.panels import entry, legend, panels
from reproduction.render.figures.style import LIGHT, NEUTRAL, OURS, SERIES, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from reproduction.words.describe import panel_title
from reproduction.words.numbers import show

#: The layer whose o_proj is shown, by its share of the depth: 27 of 32 in the paper, counted from zero.
DEPTH = 27 / 32

#: Steps at each end that a layer's gain is averaged over, since each step has another batch.
ENDS = 5

SITES = {
    "attention_input": "Q, K, V",
    "attention_output": "o_proj",
    "mlp_input": "gate, up",
    "mlp_output": "down_proj",
}

Record = dict[str, Any]


def learning(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw three panels per column for the first drawn row, its first seed; the baseline is its start.

    Raises:
        ResultError: the row learns no rotations, or a file is missing or damaged.
    """
    columns, row = project.columns(table), drawn_rows(table)[0]
    with panels(path, len(columns), 3, (2.3, 2.3), least=1.7) as (_, grid):
        for axes, column in zip(grid, columns, strict=True):
            history = history_of(project, values[row, column, "snr"].runs[0])
            layer = int(DEPTH * layers_of(history))
            whole = {record["step"]: record["end_to_end_snr"] for record in history if "end_to_end_snr" in record}
            one = {record["step"]: record["site_snr"][f"{layer}.attention_output"] for record in history}
            _curve(axes[0], whole, "end to end")
            _curve(axes[1], one, f"input of o_proj, layer {layer + 1}")
            _gains(axes[2], history)
            prefix = f"{column}, " if len(columns) > 1 else ""
            axes[0].set_title(prefix + _ends(table, values, row, column))


def layers_of(history: list[Record]) -> int:
    """Number of layers in a history."""
    return 1 + max(int(place.partition(".")[0]) for place in history[0]["site_snr"])


def gains(history: list[Record]) -> dict[str, list[float]]:
    """Gain in dB at the inputs of each site by layer: the last steps' mean over the first ones'."""
    steps = pd.DataFrame([record["site_snr"] for record in history]).astype(float)
    gained = (steps.tail(ENDS).mean() - steps.head(ENDS).mean()).to_dict()
    return {site: [gained[f"{layer}.{site}"] for layer in range(layers_of(history))] for site in SITES}


def smoothed(numbers: list[float]) -> list[float]:
    """Running means of the numbers, over a tenth of them or at least five neighbours; fewer at the ends."""
    half = max(5, len(numbers) // 10) // 2
    return pd.Series(numbers).rolling(2 * half + 1, center=True, min_periods=1).mean().tolist()


def _curve(axis: Any, by_step: dict[int, float], what: str) -> None:
    """Draw SNR by step, each on another batch, and a running mean."""
    numbers = [float(value) for value in by_step.values()]
    axis.plot(list(by_step), numbers, color=LIGHT, linewidth=0.8, label="one batch")
    axis.plot(list(by_step), smoothed(numbers), color=OURS, linewidth=1.6, label="running mean")
    axis.set(xlabel="iteration", ylabel=f"SNR in dB, {what}")
    axis.legend()


def _ends(table: RunTable, values: Values, row: str, column: str) -> str:
    """SNR on the test text before and after learning."""
    start, end = (show(values[name, column, "snr"].mean) for name in (table.baseline, row))
    return f"test text: $R_0$ {start}, $R_T$ {end} dB"


def _gains(axis: Any, history: list[Record]) -> None:
    """Draw the gain by layer, one mark for each site."""
    for (site, found), color, mark in zip(gains(history).items(), SERIES, "os^D", strict=False):
        layers = range(1, 1 + len(found))
        axis.plot(layers, found, color=color, marker=mark, markersize=3.5, linewidth=0.8, label=SITES[site])
    axis.axhline(0, color=NEUTRAL, linewidth=0.8)
    axis.set(xlabel="layer", ylabel="gain of SNR in dB")
    axis.legend()


def loss_curves(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw all steps for each column, and the first ones next to them; a line is a row's first seed, spikes have marks.

    Raises:
        ResultError: a run file is missing or has no losses.
    """
    columns, rows = project.columns(table), drawn_rows(table)
    first = next(cell.metric.first for cell in project.cells(table.id) if cell.metric.kind == "training_loss")
    with panels(path, len(columns), 2, (3.3, 2.3), least=1.7) as (figure, grid):
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
