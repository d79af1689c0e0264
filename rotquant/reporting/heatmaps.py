"""Heat maps of activation magnitudes, token by channel (QuaRot Figure 1), drawn from the arrays of the run files.

All panels share one linear colour scale and one scale of the strips above the maps, which show each channel's mean and
largest magnitude: an outlier channel is a peak there and a dark line below it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.errors import ResultError
from rotquant.project import Project
from rotquant.reporting.style import OURS, save_svg, styled
from rotquant.reporting.tables import Value, Values
from rotquant.results import read_result, run_path
from rotquant.tables import Table

if TYPE_CHECKING:
    import numpy as np

#: Colour of the largest magnitudes, behind the darker means.
PEAK = "#9ecae1"
#: Wider maps are drawn with the largest of neighbouring channels, which no outlier is lost by; paper resolves no more.
_MAP_WIDTH = 512


def magnitudes(project: Project, table: Table, values: Values, path: Path) -> None:
    """Draw one panel per row and column of the table, the first seed of each, with common limits.

    Raises:
        ResultError: a run file is missing or holds no magnitudes.
    """
    rows, columns = [row.name for row in table.computed_rows], project.columns(table)
    chosen = {(row, column): values[row, column, "peak_ratio"] for column in columns for row in rows}
    panels = {place: _matrix(project, value.keys[0]) for place, value in chosen.items()}
    with styled() as plt:
        largest = _largest(list(panels.values()))
        figure, axes = plt.subplots(
            *(2 * len(columns), len(rows)),
            figsize=(1.2 + 2.7 * len(rows), 0.7 + 2.3 * len(columns)),
            height_ratios=[1, 3] * len(columns),
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        image = None
        for (row, column), matrix in panels.items():
            place = 2 * columns.index(column), rows.index(row)
            strip, axis = axes[place], axes[place[0] + 1, place[1]]
            title = row if len(columns) == 1 else f"{row}, {column}"
            strip.set_title(f"{title}\n{_ratio(chosen[row, column])}")
            image = _panel(strip, axis, matrix, largest)
        for place in range(len(columns)):
            axes[2 * place, 0].set_ylabel("max, mean")
            axes[2 * place + 1, 0].set_ylabel("token")
        figure.supxlabel("channel", fontsize=8.5)
        figure.colorbar(image, ax=axes, label="magnitude", shrink=0.8)
        save_svg(figure, path)


def _matrix(project: Project, key: str) -> "np.ma.MaskedArray":
    """A run's magnitudes [tokens, channels], what is not finite masked."""
    import numpy as np

    path = project.root / run_path(key)
    arrays = read_result(path).arrays
    if "magnitudes" not in arrays:
        raise ResultError(f"run file {path} holds no magnitudes; delete it and run again.")
    return np.ma.masked_invalid(np.array(arrays["magnitudes"], dtype=float))


def _largest(panels: "list[np.ma.MaskedArray]") -> float:
    """The upper end of the common scale: the largest finite magnitude of all panels."""
    return max((float(panel.max()) for panel in panels if panel.count()), default=0.0) or 1.0


def _panel(strip: Any, axis: Any, matrix: "np.ma.MaskedArray", largest: float) -> Any:
    """One heat map with the strip of its channels above it; returns the image."""
    tokens, channels = matrix.shape
    for statistic, color in ((matrix.max(axis=0), PEAK), (matrix.mean(axis=0), OURS)):
        strip.fill_between(range(channels), statistic.filled(0.0), step="mid", color=color, linewidth=0)
    strip.set(xlim=(-0.5, channels - 0.5), ylim=(0, largest * 1.05))
    strip.tick_params(axis="x", length=0, labelbottom=False)
    shown = narrowed(matrix.filled(0.0))
    extent = (-0.5, channels - 0.5, tokens - 0.5, -0.5)
    axis.grid(False)
    return axis.imshow(shown, cmap="Blues", vmin=0.0, vmax=largest, extent=extent, aspect="auto", interpolation="none")


def narrowed(matrix: "np.ndarray") -> "np.ndarray":
    """[tokens, channels] as at most `_MAP_WIDTH` columns, each the largest of equally many neighbouring channels."""
    import numpy as np

    channels = matrix.shape[1]
    return np.maximum.reduceat(matrix, range(0, channels, -(-channels // _MAP_WIDTH)), axis=1)


def _ratio(value: Value) -> str:
    """The panel's peak, and which seed it shows where there are several."""
    seed = f", seed {value.seeds[0]}" if len(value.seeds) > 1 else ""
    return f"max/median {value.values[0]:.3g}{seed}"
