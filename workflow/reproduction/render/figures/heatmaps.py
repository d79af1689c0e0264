"""Heat maps of magnitudes, token or output by channel (QuaRot Figure 1, SpinQuant Figures 2 and 8 to 11).

They are drawn from the arrays of the run files. Panels of one layer share a linear colour scale and the scale of the
strips above the maps. The strips show each channel's mean and largest magnitude: an outlier channel is a peak there
and a dark line below it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.frame.values import Values
from reproduction.render.figures.arrays import array_of
from reproduction.render.figures.panels import panels
from reproduction.render.figures.style import LIGHT, OURS, drawn_rows
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable

if TYPE_CHECKING:
    import numpy as np

#: Panels of a single row drawn side by side.
BESIDE = 2


@dataclass(frozen=True)
class HeatmapPanel:
    """A map [rows, channels], and the mean and largest magnitude of each channel; non-finite values are masked.

    shape: of what the map shows, where one of its values may stand for several neighbours.
    place: panels that share a scale: a column and one of the metric's places, and the row where each panel has its own
        scale.
    """

    place: tuple[str, int, str | None]
    title: str
    shape: tuple[int, int]
    matrix: "np.ma.MaskedArray"
    mean: "np.ma.MaskedArray"
    largest: "np.ma.MaskedArray"


def magnitudes(project: Project, table: RunTable, values: Values, path: Path) -> None:
    """Draw the metric's places, for the first seed of each row.

    The table's rows are side by side, columns and places below each other; the places of a single row are in pairs.

    Raises:
        ResultError: a run file is missing or has no magnitudes.
    """
    lines = _lines(project, table, values)
    weights = _of_weights(table)
    tops: dict[tuple[str, int, str | None], float] = {}
    for panel in (panel for line in lines for panel in line if panel.matrix.count()):
        tops[panel.place] = max(tops.get(panel.place, 0.0), float(panel.matrix.max()))
    shape = (2 * len(lines), len(lines[0]), (2.6, 1.05))
    with panels(path, *shape, names=0.9, least=1.7, together=2, heights=[1, 3] * len(lines)) as (figure, axes):
        for line, (strips, maps) in zip(lines, zip(axes[::2], axes[1::2], strict=True), strict=True):
            apart = len({panel.place for panel in line}) > 1
            for strip, axis, panel in zip(strips, maps, line, strict=True):
                image = _draw(strip, axis, panel, tops.get(panel.place) or 1.0)
                if apart or panel is line[-1]:
                    beside = [strip, axis] if apart else [*strips, *maps]
                    figure.colorbar(image, ax=beside, label="magnitude", shrink=0.8)
            strips[0].set_ylabel("max, mean")
            maps[0].set_ylabel("output channel" if weights else "token")
        figure.supxlabel("input channel" if weights else "channel")


def _of_weights(table: RunTable) -> bool:
    """Whether weights are shown, not activations."""
    return table.metrics[0].get("tensor") == "weights"


def _lines(project: Project, table: RunTable, values: Values) -> list[list[HeatmapPanel]]:
    """The panels line by line."""
    rows, columns = drawn_rows(table), project.columns(table)
    lines = [
        list(line)
        for column in columns
        for line in zip(*(list(_panels(project, table, values, row, column)) for row in rows), strict=True)
    ]
    alone = [panel for line in lines for panel in line]
    if len(rows) > 1 or len(alone) % BESIDE:
        return lines
    return [alone[start : start + BESIDE] for start in range(0, len(alone), BESIDE)]


def _panels(project: Project, table: RunTable, values: Values, row: str, column: str) -> Iterator[HeatmapPanel]:
    """The panels of a cell: one for each of its metric's places."""
    import numpy as np

    value = values[row, column, "peak_ratio"]
    seed = f", seed {value.seeds[0]}" if len(value.seeds) > 1 else ""
    what = "" if _of_weights(table) else "input of "
    names = [row] * (len(drawn_rows(table)) > 1) + [column] * (len(project.columns(table)) > 1)
    for index, panel in enumerate(array_of(project, value.runs[0], "panels")):
        place = f"layer {panel['layer'] + 1}, {what}{panel['linear'].rpartition('.')[2]}"
        title = f"{', '.join([*names, place])}\nmax/median {float(panel['peak_ratio']):.3g}{seed}"
        arrays = (np.ma.masked_invalid(np.array(panel[key], dtype=float)) for key in ("matrix", "mean", "largest"))
        own = row if table.figure is not None and table.figure.own_scales else None
        shape = panel.get("shape") or np.shape(panel["matrix"])  # older runs do not have it
        yield HeatmapPanel((column, index, own), title, tuple(shape), *arrays)


def _draw(strip: Any, axis: Any, panel: HeatmapPanel, top: float) -> Any:
    """Draw one heat map with the strip of its channels above it; return the image."""
    import numpy as np

    (height, channels), drawn = panel.shape, len(panel.mean)
    places = (np.arange(drawn) + 0.5) * channels / drawn - 0.5
    for statistic, color in ((panel.largest, LIGHT), (panel.mean, OURS)):
        strip.fill_between(places, statistic.filled(0.0), step="mid", color=color, linewidth=0)
    strip.set(xlim=(-0.5, channels - 0.5), ylim=(0, top * 1.05), title=panel.title)
    strip.tick_params(axis="x", length=0, labelbottom=False)
    axis.grid(False)
    limits = {"vmin": 0.0, "vmax": top, "extent": (-0.5, channels - 0.5, height - 0.5, -0.5)}
    return axis.imshow(panel.matrix.filled(0.0), cmap="Blues", aspect="auto", interpolation="none", **limits)
